"""Checksums end to end: what takes find, and what becomes of bad blocks."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mmkv
from benchmarks.corruptions import KINDS, Trials
from mmkv.exporting import export_conversation
from mmkv.geometry import Extent
from mmkv.layout import Layout
from mmkv.piecesums import PieceSums
from mmkv.unit_table import read_bad, read_units
from tests.computed import HYBRID, ONLY_STATES, UNIFORM, Ids, assert_holds, assert_parked, ids_of, make_slot, park

BLOCK = 512


@pytest.fixture
def pool(pool_dir: Path) -> Iterator[mmkv.Pool]:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB", verify="always") as opened:
        yield opened


def number_of(pool: mmkv.Pool, name: str, block: int) -> int:
    version = pool._ledger.conversations[name].version
    return [n for first, count in version.extents for n in range(first, first + count)][block]


def flip(pool: mmkv.Pool, name: str, token: int, *, layer: int = 1, plane: str = "k") -> None:
    """Flip a bit of the row of a token, at the path."""
    space = pool._space
    runs = space.geometry.token_runs([Extent(number_of(pool, name, token // BLOCK), 1)], token % BLOCK, BLOCK)
    file = space.planes[layer]
    assert file is not None
    flip_at(file.path, int(space.geometry.plane_offsets(runs, layer, plane)[0]))


def flip_at(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)


def take(pool: mmkv.Pool, name: str, ids: Ids, xp: Any = np, **options: Any) -> mmkv.Receipt:
    slot = make_slot(pool.layout, len(ids) + 3, xp, fill=0xAA)
    receipt = pool.take(name, slot, **options).result(30)
    assert_holds(slot, ids[: receipt.tokens], have=receipt.tokens - receipt.tokens_written, fill=0xAA)
    return receipt


def corrupt(pool: mmkv.Pool, name: str, room: int, **options: Any) -> mmkv.ConversationCorrupt:
    with pytest.raises(mmkv.ConversationCorrupt) as caught:
        pool.take(name, make_slot(pool.layout, room), **options).result(30)
    return caught.value


def matched(pool: mmkv.Pool, ids: Ids) -> int:
    with pool.match(ids) as match:
        return match.tokens


# What is found


@pytest.mark.parametrize("place", ["ram", "disk", "tiers"])
def test_single_corruptions_are_found_and_clean_takes_are_clean(place: str, tmp_path: Path, ram_path: Path) -> None:
    directory = (ram_path if place == "ram" else tmp_path) / "pool"
    trials = Trials(directory, place, ram_path / "hot" if place == "tiers" else None, seed=7)
    try:
        for _ in range(60):
            trials.take_clean()
        for _ in range(60):
            trials.corrupt()
        for _ in range(60):
            trials.take_clean()
    finally:
        trials.close()
    assert trials.missed == []
    assert trials.alarms == []
    assert trials.wrong == 0
    assert set(trials.made) == set(KINDS)


def test_the_error_names_layer_plane_and_tokens(pool: mmkv.Pool, xp: ModuleType) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids, xp=xp)
    flip(pool, "chat", 700, layer=2, plane="scale")
    with pytest.raises(mmkv.ConversationCorrupt, match="layer 2, 'scale', tokens 512 to 1023") as caught:
        pool.take("chat", make_slot(UNIFORM, 1300, xp)).result(30)
    assert (caught.value.layer, caught.value.plane, caught.value.tokens) == (2, "scale", (512, 1024))


@pytest.mark.parametrize("layout", [HYBRID, ONLY_STATES], ids=lambda layout: layout.model)
@pytest.mark.usefixtures("late_sums")
def test_an_engine_may_change_a_state_as_soon_as_its_layer_is_there(pool_dir: Path, layout: Layout) -> None:
    ids = ids_of((1, 900))
    with mmkv.Pool.open(pool_dir, layout, capacity="8MiB", verify="always") as pool:
        park(pool, "chat", ids)
        slot = make_slot(layout, 903)
        transfer = pool.take("chat", slot)
        for layer in transfer:
            for state in slot.state[layer].values():
                state.view(np.uint8)[...] ^= 0xFF
        transfer.result(30)


@pytest.mark.parametrize("layout", [HYBRID, ONLY_STATES], ids=lambda layout: layout.model)
def test_a_flipped_bit_of_a_state_is_found(pool_dir: Path, layout: Layout) -> None:
    ids = ids_of((1, 900))
    with mmkv.Pool.open(pool_dir, layout, capacity="8MiB", verify="always") as pool:
        park(pool, "chat", ids[:600])
        park(pool, "chat", ids)
        points = pool._ledger.conversations["chat"].version.row.checkpoints
        layer = next(index for index, spec in enumerate(layout.layers) if spec.state)
        file, name = pool._space.states[layer], next(iter(layout.layers[layer].state))
        assert file is not None
        flip_at(file.path, pool._space.geometry.state_offset(layer, name, points[-1].record) + 5)
        error = corrupt(pool, "chat", 900)
        assert (error.layer, error.plane) == (layer, name)
        assert "read its prompt again from token 600 on" in str(error)
        assert matched(pool, ids) == 600, "the checkpoint before is as it was"
        with mmkv.Pool.open(pool_dir, readonly=True) as reader:
            assert pool.info("chat").usable_tokens == reader.info("chat").usable_tokens == 600
        with pytest.raises(mmkv.ConversationCorrupt, match="take its first 600 tokens, and read its prompt again from"):
            pool.take("chat", make_slot(layout, 900))
        assert take(pool, "chat", ids, tokens=600).tokens == 600
        park(pool, "chat", ids)
        assert take(pool, "chat", ids).tokens == 900
        assert matched(pool, ids) == 900


def test_a_flipped_id_is_found(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    runs = pool._space.geometry.token_runs(pool._ledger.conversations["chat"].version.extents, 650, 651)
    flip_at(pool.path / "tokens.kv", int(pool._space.geometry.id_offsets(runs)[0]))
    error = corrupt(pool, "chat", 700)
    assert (error.layer, error.plane, error.tokens) == (-1, "token_ids", (512, 700))


@pytest.mark.parametrize(("have", "tokens"), [(0, 600), (700, 1300), (600, 650), (599, 600), (513, 1024)])
def test_a_unit_that_is_taken_in_part_is_checked_whole(pool: mmkv.Pool, have: int, tokens: int) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    # Behind, before or among the rows that are taken.
    flip(pool, "chat", 1000)
    assert corrupt(pool, "chat", 1300, tokens=tokens, have=have).tokens == (512, 1024)


def test_what_the_slot_held_before_does_not_count(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    # The slot holds no byte of what it is said to have.
    for have, tokens in [(100, 1300), (600, 601), (1299, 1300), (700, 900), (512, 1024)]:
        take(pool, "chat", ids, have=have, tokens=tokens)


def with_other_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """From now on the copies of a transfer, layer by layer, are what `change` makes of them."""
    place = mmkv.pool.layer_copies

    def changed(*arguments: Any) -> Any:
        layers = place(*arguments)
        change(layers)
        return layers

    monkeypatch.setattr(mmkv.pool, "layer_copies", changed)


def test_a_copy_to_the_wrong_rows_is_found(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)

    def shifted(layers: Any) -> None:
        for copy in layers[1].copies:
            copy.buffer_offsets = copy.buffer_offsets + UNIFORM.layers[1].planes[copy.name].token_bytes

    with_other_copies(monkeypatch, shifted)
    assert corrupt(pool, "chat", 1310).layer == 1


def test_a_copy_that_is_left_out_is_found(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)

    def fewer(layers: Any) -> None:
        layers[2].copies = layers[2].copies[:1]

    with_other_copies(monkeypatch, fewer)
    error = corrupt(pool, "chat", 1300)
    assert (error.layer, error.plane) == (2, "scale")


def test_a_park_whose_bytes_went_astray_is_found(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of((1, 1300))

    def crossed(layers: Any) -> None:
        layers[0].copies, layers[1].copies = (
            tuple(type(copy)(copy.name, other.file, copy.buffer, copy.file_offsets, copy.buffer_offsets, copy.sizes)
                  for copy, other in zip(mine.copies, others.copies, strict=True))
            for mine, others in ((layers[0], layers[1]), (layers[1], layers[0]))
        )  # fmt: skip

    with_other_copies(monkeypatch, crossed)
    park(pool, "chat", ids)
    monkeypatch.undo()
    assert corrupt(pool, "chat", 1300).layer == 0


# What becomes of a bad block


def test_a_bad_block_leaves_matching_and_sharing_and_is_written_anew(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1800))
    park(pool, "chat", ids)
    pool.fork("chat", "fork")
    bad = number_of(pool, "chat", 1)
    flip(pool, "chat", 700)
    corrupt(pool, "chat", 1800)
    for name in ("chat", "fork"):
        with pytest.raises(mmkv.ConversationCorrupt, match="take its first 512 tokens, and"):
            pool.take(name, make_slot(UNIFORM, 1800))
        assert pool.info(name).usable_tokens == 512
    assert matched(pool, ids) == 512
    assert take(pool, "chat", ids, tokens=512).tokens == 512
    with pytest.raises(mmkv.ConversationCorrupt):
        pool.fork("chat", "other")
    # Neither its owner nor somebody else keeps or shares it.
    assert park(pool, "other", ids).tokens_written == 1800 - 512
    assert park(pool, "chat", ids).tokens_written <= 1800 - 512
    assert bad not in {number_of(pool, name, block) for name in ("chat", "other") for block in range(4)}
    for name in ("chat", "other"):
        assert_parked(pool, name, ids)
    assert matched(pool, ids) == 1800
    assert pool.stats().corrupt == pool._space.geometry.block_bytes
    assert pool._space.blocks.counts[bad] == 1
    # With the last that holds it, it is free, and no longer bad.
    pool.drop("fork")
    assert pool._space.blocks.counts[bad] == 0
    assert pool.stats().corrupt == 0


@pytest.mark.parametrize("layout", [UNIFORM, HYBRID], ids=lambda layout: layout.model)
def test_where_nothing_is_left_the_whole_prompt_is_to_be_read(pool_dir: Path, layout: Layout) -> None:
    with mmkv.Pool.open(pool_dir, layout, capacity="8MiB", verify="always") as pool:
        park(pool, "chat", ids_of((1, 900)))
        # The one checkpoint is at the end.
        flip(pool, "chat", 600 if layout.state_bytes else 0, layer=0)
        assert str(corrupt(pool, "chat", 900)).endswith("; read its prompt again")
        assert pool.info("chat").usable_tokens == 0
        with pytest.raises(mmkv.ConversationCorrupt, match=r"'chat' cannot be taken up to token 900: .*; read its pr"):
            pool.take("chat", make_slot(layout, 900))


def test_quarantine_outlives_the_process(pool_dir: Path) -> None:
    ids = ids_of((1, 1800))
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB", verify="always") as pool:
        park(pool, "chat", ids)
        flip(pool, "chat", 700)
        corrupt(pool, "chat", 1800)
        with mmkv.Pool.open(pool_dir, readonly=True) as reader:
            assert matched(reader, ids) == 512
            assert reader.stats().corrupt == pool.stats().corrupt == pool._space.geometry.block_bytes
            assert reader.stats().unverified == 0
            assert reader.info("chat").usable_tokens == 512
    with mmkv.Pool.open(pool_dir, verify="never") as pool:
        assert matched(pool, ids) == 512
        with pytest.raises(mmkv.ConversationCorrupt):
            pool.take("chat", make_slot(UNIFORM, 1800))
        park(pool, "chat", ids)
        assert take(pool, "chat", ids).tokens == 1800
        bad = {row.number for row in read_bad(pool._catalog)}
        assert not bad & {number_of(pool, "chat", block) for block in range(4)}


def test_growth_goes_on_before_a_bad_block(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    flip(pool, "chat", 600)
    corrupt(pool, "chat", 700)
    longer = np.concatenate([ids, ids_of((2, 100))])
    assert park(pool, "chat", longer).tokens_written == 800 - 512
    assert_parked(pool, "chat", longer)


def test_an_export_checks(pool: mmkv.Pool, tmp_path: Path) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    pool.fork("chat", "cut", 1200)
    for name in ("chat", "cut"):
        export_conversation(pool.path, name, tmp_path / f"{name}.safetensors")
    # Behind what the fork has, in a block that it shares.
    flip(pool, "chat", 1250)
    for name in ("chat", "cut"):
        with pytest.raises(mmkv.ConversationCorrupt, match="layer 1, 'k', tokens 1024 to 1299"):
            export_conversation(pool.path, name, tmp_path / f"again-{name}.safetensors")
    assert not list(tmp_path.glob("again*"))
    pool.import_file(tmp_path / "chat.safetensors", "copy")
    assert_parked(pool, "copy", ids)
    flip(pool, "copy", 3)
    assert corrupt(pool, "copy", 1300).tokens == (0, 512)


# What the checksums cover


def units(pool: mmkv.Pool, name: str) -> list[int]:
    """How many tokens of each block of a conversation have checksums."""
    blocks = -(-pool.info(name).tokens // BLOCK)
    numbers = np.array([number_of(pool, name, block) for block in range(blocks)])
    found = pool._checks.units["blocks"].tokens(numbers).tolist()
    listed = read_units(pool._catalog, "blocks", pool._checks.columns, BLOCK)
    assert [int(listed.tokens[listed.numbers == n].sum()) for n in numbers] == found
    return [int(count) for count in found]


def test_growth_in_place_goes_on_where_the_checksums_end(ram_path: Path) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        ids = ids_of((1, 1300))
        for end in (1, 100, 511, 512, 513, 900, 1300):
            assert park(pool, "chat", ids[:end]).tokens_written < 512
            assert_parked(pool, "chat", ids[:end])
        assert units(pool, "chat") == [512, 512, 276]


def test_rows_are_not_appended_behind_rows_that_were_cut(ram_path: Path) -> None:
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB", verify="always") as pool:
        ids = ids_of((1, 500))
        park(pool, "chat", ids)
        park(pool, "chat", ids[:300])
        assert units(pool, "chat") == [500]
        assert_parked(pool, "chat", ids[:300])
        other = np.concatenate([ids[:300], ids_of((2, 100))])
        assert park(pool, "chat", other).tokens_written == 400
        assert units(pool, "chat") == [400]
        assert_parked(pool, "chat", other)
        park(pool, "chat", np.concatenate([other, ids_of((3, 50))]))
        assert units(pool, "chat") == [450]


def test_never_takes_no_checksums_and_checks_nothing(pool_dir: Path) -> None:
    ids = ids_of((1, 1300))
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB", verify="never") as pool:
        park(pool, "chat", ids)
        assert units(pool, "chat") == [0, 0, 0]
        flip(pool, "chat", 700)
        pool.take("chat", make_slot(UNIFORM, 1300), verify="always").result(30)
        assert pool.stats().unverified == 3 * pool._space.geometry.block_bytes
    with mmkv.Pool.open(pool_dir, verify="always") as pool:
        # What has none stays so; what is new has some.
        pool.take("chat", make_slot(UNIFORM, 1300)).result(30)
        longer = np.concatenate([ids, ids_of((2, 900))])
        park(pool, "chat", longer)
        assert units(pool, "chat")[:2] == [0, 0]
        assert units(pool, "chat")[3:] == [512, 2200 - 4 * 512]
        flip(pool, "chat", 1700)
        assert corrupt(pool, "chat", 2200).tokens == (1536, 2048)


def test_never_lets_go_of_the_checksums_of_a_block_that_it_appends_to(ram_path: Path) -> None:
    ids = ids_of((1, 400))
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids[:300])
        assert units(pool, "chat") == [300]
    with mmkv.Pool.open(ram_path / "pool", verify="never") as pool:
        park(pool, "chat", ids)
        assert units(pool, "chat") == [0]
    with mmkv.Pool.open(ram_path / "pool", verify="always") as pool:
        assert_parked(pool, "chat", ids)


# When takes check


def test_first_checks_what_another_process_left_once(ram_path: Path) -> None:
    ids = ids_of((1, 1300))
    with mmkv.Pool.open(ram_path / "pool", UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids)
        assert take(pool, "chat", ids).verified == 0, "it was parked here, into RAM"
        assert take(pool, "chat", ids, verify="always").verified == 1300 * UNIFORM.token_bytes
    with mmkv.Pool.open(ram_path / "pool") as pool:
        assert take(pool, "chat", ids, verify="never").verified == 0
        assert take(pool, "chat", ids, tokens=600).verified == 600 * UNIFORM.token_bytes
        assert take(pool, "chat", ids).verified == (1300 - 1024) * UNIFORM.token_bytes
        assert take(pool, "chat", ids).verified == 0
        assert pool.stats().bytes_verified == (1300 - 1024 + 600) * UNIFORM.token_bytes
        flip(pool, "chat", 700)
        pool.take("chat", make_slot(UNIFORM, 1300)).result(30)
        assert corrupt(pool, "chat", 1300, verify="always").tokens == (512, 1024)
        assert pool.stats().mismatches == 1


def test_first_checks_what_comes_from_a_disk_each_time(tmp_path: Path) -> None:
    ids = ids_of((1, 1300))
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids)
        for _ in range(2):
            assert take(pool, "chat", ids).verified == 1300 * UNIFORM.token_bytes
        flip(pool, "chat", 3)
        assert corrupt(pool, "chat", 1300).tokens == (0, 512)


def test_first_checks_what_was_brought_from_the_path(tmp_path: Path, ram_path: Path) -> None:
    ids = ids_of((1, 1300))
    with mmkv.Pool.open(tmp_path / "pool", UNIFORM, capacity="8MiB", hot=ram_path / "hot", hot_capacity="4MiB") as pool:
        park(pool, "chat", ids)
        assert take(pool, "chat", ids).verified == 0
        pool.flush()
        assert pool._hot is not None
        while pool._hot.give_back_one():
            pass
        # The first take brings it, and checks it; for the next one it is in RAM.
        assert take(pool, "chat", ids).verified == 1300 * UNIFORM.token_bytes
        assert take(pool, "chat", ids).verified == 0
        while pool._hot.give_back_one():
            pass
        flip(pool, "chat", 700)
        assert corrupt(pool, "chat", 1300).tokens == (512, 1024)
        park(pool, "chat", ids)
        assert_parked(pool, "chat", ids)


@pytest.mark.parametrize("value", ["sometimes", None, 1, True])
def test_other_words_are_refused(pool: mmkv.Pool, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify must be one of always, first, never"):
        mmkv.Pool.open(tmp_path / "other", UNIFORM, capacity="8MiB", verify=value)
    if value is not None:
        with pytest.raises(ValueError, match="verify must be"):
            pool.take("chat", make_slot(UNIFORM, 3), verify=value)


# The catalog


def test_a_catalog_without_checksums_gets_them(pool_dir: Path) -> None:
    ids = ids_of((1, 1300))
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids)
    db = sqlite3.connect(pool_dir / "catalog.sqlite3")
    db.executescript(
        "DROP TABLE units_of_blocks; DROP TABLE units_of_checkpoints; DROP TABLE quarantine; PRAGMA user_version = 2"
    )
    db.close()
    with mmkv.Pool.open(pool_dir, readonly=True) as reader:
        assert matched(reader, ids) == 1300
    with mmkv.Pool.open(pool_dir, verify="always") as pool:
        assert_parked(pool, "chat", ids)
        assert pool.stats().unverified == 3 * pool._space.geometry.block_bytes
        park(pool, "other", ids_of((2, 600)))
        assert units(pool, "other") == [512, 88]
        pool.drop("chat")
        assert pool.stats().unverified == 0


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE units_of_blocks SET checksums = x'00'",
        "UPDATE units_of_blocks SET tokens = 513",
        "UPDATE units_of_blocks SET tokens = 0",
        "UPDATE units_of_blocks SET checksums = 'text'",
        "UPDATE units_of_blocks SET number = -1 WHERE number = (SELECT min(number) FROM units_of_blocks)",
        "INSERT INTO quarantine VALUES ('others', 0, 0, 'k', 0.0)",
    ],
)
def test_rows_that_make_no_sense_are_refused(pool_dir: Path, change: str) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="8MiB") as pool:
        park(pool, "chat", ids_of((1, 1300)))
    db = sqlite3.connect(pool_dir / "catalog.sqlite3")
    db.execute(change)
    db.commit()
    db.close()
    with pytest.raises(mmkv.PoolCorrupt, match="is damaged"):
        mmkv.Pool.open(pool_dir)


# What goes wrong meanwhile


@pytest.mark.parametrize("where", ["piece", "layer"])
def test_checksums_that_cannot_be_taken_fail_the_transfer(
    pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device fell off the bus")

    if where == "piece":
        monkeypatch.setattr(PieceSums, "add", fail)
    else:
        monkeypatch.setattr(pool._checks.digester, "checksums", fail)
        # So that pieces tell nothing.
        monkeypatch.setattr(PieceSums, "add", lambda *_: None)
    with pytest.raises(mmkv.TransferError, match="checksums could not be taken: the device fell off"):
        pool.take("chat", make_slot(UNIFORM, 1300)).result(30)
    with pytest.raises(mmkv.TransferError, match="checksums could not be taken"):
        park(pool, "other", ids_of((2, 600)))
    monkeypatch.undo()
    assert "other" not in pool
    assert_parked(pool, "chat", ids)


def test_a_quarantine_that_cannot_be_noted_holds_all_the_same(pool: mmkv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    flip(pool, "chat", 700)

    def fail(*_: Any) -> None:
        raise mmkv.PoolFull("no room")

    monkeypatch.setattr("mmkv.checks.put_bad", fail)
    assert "could not be noted in the catalog: no room" in corrupt(pool, "chat", 1300).__notes__[0]
    assert matched(pool, ids) == 512


def test_a_swap_checks_what_arrives_and_knows_what_left(pool: mmkv.Pool) -> None:
    here, there = ids_of((1, 1300)), ids_of((2, 900))
    park(pool, "there", there)
    slot = make_slot(UNIFORM, 1300)
    park(pool, "here", here)
    pool.take("here", slot).result(30)
    pool.drop("here")
    left, arrived = pool.swap(slot, leaving="here", leaving_ids=here, arriving="there")
    left.result(30)
    assert arrived.result(30).verified == 900 * UNIFORM.token_bytes
    assert_parked(pool, "here", here)
    flip(pool, "there", 10)
    pool.take("here", slot).result(30)
    left, arrived = pool.swap(slot, leaving="again", leaving_ids=here, arriving="there")
    left.result(30)
    with pytest.raises(mmkv.ConversationCorrupt):
        arrived.result(30)
    assert_parked(pool, "again", here)
