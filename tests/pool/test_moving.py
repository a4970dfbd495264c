"""What moves when a conversation is parked again, and which rows a take writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mmkv
from tests.computed import (
    HYBRID,
    ONLY_STATES,
    UNIFORM,
    assert_holds,
    assert_parked,
    assert_untouched,
    compute,
    computed,
    ids_of,
    make_slot,
    park,
)

BLOCK = 512


def on_disk(pool: mmkv.Pool) -> bool:
    return not pool._opened.medium.in_ram


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 3000])
def test_a_take_gives_what_was_parked(pool: mmkv.Pool, xp: ModuleType, tokens: int) -> None:
    ids = ids_of((1, tokens))
    receipt = park(pool, "chat", ids, xp=xp)
    assert (receipt.tokens, receipt.tokens_written) == (tokens, tokens)
    assert receipt.bytes == tokens * UNIFORM.token_bytes
    assert_parked(pool, "chat", ids, xp=xp)
    if xp is np:
        in_ram = pool._opened.medium.in_ram
        assert set(receipt.path.split("+")) <= ({"posix"} if in_ram else {"posix", "posix-direct"})


REPORTED = mmkv.Layer(
    {"k": mmkv.Plane("int8", (4, 128)), "v": mmkv.Plane("uint8", (4, 64)), "s": mmkv.Plane("float16", (24,))}
)
LATENT = mmkv.Layer({"c_kv": mmkv.Plane("bfloat16", (512,)), "k_pe": mmkv.Plane("bfloat16", (64,))})
ODD = mmkv.Layer({"k": mmkv.Plane("float8_e4m3fn", (3, 5)), "v": mmkv.Plane("float8_e5m2", (16,))})
ATTENTION = mmkv.Layer({"k": mmkv.Plane("float16", (8,))})
RECURRENT = mmkv.Layer({}, {"s": mmkv.State("float32", (64,))})

MIXED = mmkv.Layout([REPORTED, LATENT, ODD], model="mixed")
DEEP = mmkv.Layout([RECURRENT, RECURRENT, RECURRENT, ATTENTION] * 12, model="12 of 48 layers with planes")


@pytest.mark.parametrize("layout", [MIXED, DEEP, HYBRID, ONLY_STATES], ids=lambda layout: layout.model)
def test_layouts_of_real_models_come_back(pool_dir: Path, xp: ModuleType, layout: mmkv.Layout) -> None:
    ids = ids_of((1, 700), (2, 600))
    with mmkv.Pool.open(pool_dir, layout, capacity="64MiB") as pool:
        park(pool, "chat", ids[:700], xp=xp)
        park(pool, "chat", ids, xp=xp)
        assert_parked(pool, "chat", ids, xp=xp)
        slot = make_slot(layout, 800, xp, fill=1)
        pool.take("chat", slot, tokens=700).result(30)
        assert_holds(slot, ids[:700], fill=1)


@pytest.mark.parametrize("former", [1, 500, 512, 1000, 1024, 2000])
@pytest.mark.parametrize("new", [1, 383, 1024])
def test_growth_moves_what_is_new_and_at_most_a_block(pool: mmkv.Pool, former: int, new: int) -> None:
    ids = ids_of((1, former + new))
    park(pool, "chat", ids[:former])
    receipt = park(pool, "chat", ids)
    assert receipt.tokens_written == (new + former % BLOCK if on_disk(pool) else new)
    assert_parked(pool, "chat", ids)


def test_an_edited_turn_moves_only_what_comes_after_it(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 3000))
    park(pool, "chat", ids)
    edited = np.concatenate([ids[:1700], ids_of((2, 900))])
    assert park(pool, "chat", edited).tokens_written == len(edited) - 1700 // BLOCK * BLOCK
    assert_parked(pool, "chat", edited)
    with pool.match(ids) as match:
        assert match.tokens == 1700, "of the old course nothing is left"


def test_the_same_ids_again_move_nothing(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    receipt = park(pool, "chat", ids)
    assert (receipt.tokens_written, receipt.bytes, receipt.path) == (0, 0, "none")


@pytest.mark.parametrize("cut", [1, 512, 600, 699])
def test_a_conversation_can_be_cut_and_go_on_otherwise(pool: mmkv.Pool, cut: int) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    assert park(pool, "chat", ids[:cut]).tokens_written == 0
    assert_parked(pool, "chat", ids[:cut])
    other = np.concatenate([ids[:cut], ids_of((2, 300))])
    park(pool, "chat", other)
    assert_parked(pool, "chat", other)


def test_conversations_of_many_turns_stay_in_few_extents(pool_dir: Path) -> None:
    texts = {name: ids_of((seed, 40 * 190)) for seed, name in enumerate("abc")}
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity="256MiB") as pool:
        for turn in range(1, 41):
            for name, ids in texts.items():
                park(pool, name, ids[: turn * 190])
            # Turns are seconds apart, and housekeeping comes round meanwhile.
            pool._keep_spare()
        for name, ids in texts.items():
            assert_parked(pool, name, ids)
            assert pool.info(name).extents <= 4


def test_what_is_appended_behind_the_ids_does_not_matter(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 900))
    slot = computed(UNIFORM, ids)
    transfer = pool.park("chat", slot, ids[:600])
    compute(slot, np.concatenate([ids[:600], ids_of((2, 300))]))
    transfer.result(30)
    assert_parked(pool, "chat", ids[:600])


@pytest.mark.parametrize(("have", "tokens"), [(0, 1), (0, 600), (511, 513), (600, 1000), (1000, 1000), (1, 999)])
def test_only_the_rows_from_have_to_tokens_are_written(pool: mmkv.Pool, xp: ModuleType, have: int, tokens: int) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids, xp=xp)
    slot = make_slot(UNIFORM, 1200, xp, fill=0xAA)
    receipt = pool.take("chat", slot, tokens=tokens, have=have).result(30)
    assert (receipt.tokens, receipt.tokens_written) == (tokens, tokens - have)
    assert_holds(slot, ids[:tokens], have=have, fill=0xAA)


def test_what_is_around_the_arrays_is_not_touched(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    memory = np.full((900, 3, 8), 0xAA, dtype=np.uint8)
    inside = memory.reshape(3, -1)[1].view(np.int8)[: 700 * 8].reshape(700, 4, 2)
    slot = computed(UNIFORM, ids)
    arrays = [dict(layer) for layer in slot.arrays]
    arrays[1]["k"] = inside
    pool.take("chat", mmkv.Slot(UNIFORM, arrays)).result(30)
    assert (inside == slot.arrays[1]["k"]).all()
    inside[...] = np.int8(-86)
    assert (memory == 0xAA).all()


def test_layers_land_in_order_for_who_iterates(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))
    park(pool, "chat", ids)
    slot = make_slot(UNIFORM, 700)
    seen = []
    for layer in pool.take("chat", slot):
        assert (slot.arrays[layer]["k"] == computed(UNIFORM, ids).arrays[layer]["k"]).all()
        seen.append(layer)
    assert seen == [0, 1, 2]


def test_a_take_and_a_park_can_be_awaited(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 700))

    async def turn() -> list[mmkv.Receipt]:
        slot = make_slot(UNIFORM, 700)
        parked = await pool.park("chat", computed(UNIFORM, ids), ids)
        return [parked, *await asyncio.gather(*[_awaited(pool.take("chat", slot)) for _ in range(3)])]

    assert [receipt.tokens for receipt in asyncio.run(turn())] == [700] * 4


async def _awaited(transfer: mmkv.Transfer) -> mmkv.Receipt:
    return await transfer


def test_an_unknown_conversation_is_not_found(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 10, fill=7)
    for call in (
        lambda: pool.take("nobody", slot),
        lambda: pool.info("nobody"),
        lambda: pool.drop("nobody"),
        lambda: pool.pin("nobody"),
        lambda: pool.flush("nobody"),
        lambda: pool.fork("nobody", "b"),
    ):
        with pytest.raises(mmkv.ConversationNotFound, match="no conversation 'nobody' in the pool at"):
            call()
    assert_untouched(slot, 7)
