"""Conversations as files of their own: out of one pool, into another, byte by byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmkv
from mmkv.exporting import export_conversation
from mmkv.tensorfile import TensorFile
from tests.computed import (
    HYBRID,
    ONLY_STATES,
    UNIFORM,
    assert_parked,
    ids_of,
    make_slot,
    park,
    plane_rows,
    prefix_words,
)

CAPACITY = 16 << 20
CHAT = ids_of((1, 3000))
ODD = mmkv.Layout(
    [
        mmkv.Layer(
            {
                "k.with.dots": mmkv.Plane("bfloat16", (3, 5)),
                "v": mmkv.Plane("float8_e4m3", (7,)),
                "é": mmkv.Plane("bool", ()),
            },
            {
                "s": mmkv.State("complex64", (3,)),
                "t": mmkv.State("float8_e8m0fnu", (2, 1)),
                "n": mmkv.State("int64", ()),
            },
        ),
        mmkv.Layer({"k": mmkv.Plane("float64", (1, 1, 3)), "raw": mmkv.Plane("V3", (2,))}),
    ],
    model="odd",
)
LAYOUTS = {"planes": UNIFORM, "hybrid": HYBRID, "states": ONLY_STATES, "odd": ODD}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> mmkv.Layout:
    """Layouts of planes, states, both, and of all types."""
    return LAYOUTS[request.param]


def test_out_and_in(layout: mmkv.Layout, pool_dir: Path, tmp_path: Path) -> None:
    """Into a pool of other sizes, with all its checkpoints; the bytes of the second file are those of the first."""
    file, again = tmp_path / "chat.safetensors", tmp_path / "again.safetensors"
    with mmkv.Pool.open(pool_dir, layout, capacity=CAPACITY) as pool:
        park(pool, "other", ids_of((2, 700)))
        park(pool, "chat", CHAT[:1000], boundary=True, namespace="ns", salt="ns")
        park(pool, "chat", CHAT[:2000], namespace="ns", salt="ns")
        park(pool, "chat", CHAT, namespace="ns", salt="ns")
        # Beside its owner.
        size = export_conversation(pool_dir, "chat", file)
        points = pool.info("chat").checkpoints
    assert size == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []
    with mmkv.Pool.open(tmp_path / "second", layout, capacity=3 * CAPACITY) as pool:
        park(pool, "taker", ids_of((5, 1111)))
        receipt = pool.import_file(file)
        assert (receipt.tokens, receipt.path) == (3000, "posix")
        assert_parked(pool, "chat", CHAT, salt="ns")
        info = pool.info("chat")
        assert (info.namespace, info.checkpoints, info.synced) == ("ns", points, True)
        with pool.match(CHAT, namespace="ns") as match:
            assert (match.conversation, match.tokens) == ("chat", 3000)
        for tokens in points[:-1]:
            slot = make_slot(layout, tokens)
            assert pool.take("chat", slot, tokens=tokens).result().tokens == tokens
        # It grows like any other.
        longer = np.concatenate([CHAT, ids_of((8, 900))])
        assert park(pool, "chat", longer, namespace="ns", salt="ns").tokens_written < 900 + 4096
        pool.import_file(file, replace=True)
        export_conversation(pool.path, "chat", again)
    assert again.read_bytes() == file.read_bytes()
    with mmkv.Pool.open(tmp_path / "second") as pool:
        assert_parked(pool, "chat", CHAT, salt="ns")


def test_other_programs_can_read_it(layout: mmkv.Layout, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with mmkv.Pool.open(tmp_path / "pool", layout, capacity=CAPACITY) as pool:
        park(pool, "chat", CHAT)
        export_conversation(pool.path, "chat", tmp_path / "file")
    found = dict(safetensors.deserialize((tmp_path / "file").read_bytes()))
    assert np.array_equal(np.frombuffer(found["token_ids"]["data"], dtype=np.int64), CHAT)
    words = prefix_words(CHAT)
    for index, layer in enumerate(layout.layers):
        for name, plane in layer.planes.items():
            entry = found[f"planes.{index}.{name}"]
            assert bytes(entry["data"]) == plane_rows(words, index, name, plane).tobytes()
            assert entry["shape"][: 1 + len(plane.shape)] == [3000, *plane.shape]
    with TensorFile(tmp_path / "file") as file:
        assert file.metadata["conversation"] == "chat"
        assert json.loads(file.metadata["layout"]) == layout.to_json()


def test_opaque_pages_go_whole(tmp_path: Path) -> None:
    """Which bytes of a page are used, only the engine knows: those of the last one go, too."""
    layer = mmkv.Layer({"k": mmkv.Plane("int8", (8,))})
    layout = mmkv.Layout([layer] * 2, "paged", opaque_page_tokens=16)
    arrays = [{"k": np.random.default_rng(n).integers(-128, 127, (100, 16, 8), dtype=np.int8)} for n in range(2)]
    ids = np.arange(1001)
    table = np.random.default_rng(3).permutation(100)
    with mmkv.Pool.open(tmp_path / "one", layout, capacity=CAPACITY) as pool:
        pool.park("chat", mmkv.PagedSlot(layout, arrays, table, 16, opaque=True), ids).result()
        export_conversation(pool.path, "chat", tmp_path / "file")
    taken = [{"k": np.zeros((100, 16, 8), dtype=np.int8)} for _ in range(2)]
    with mmkv.Pool.open(tmp_path / "two", layout, capacity=CAPACITY) as pool:
        pool.import_file(tmp_path / "file", "copy")
        pool.take("copy", mmkv.PagedSlot(layout, taken, table, 16, opaque=True)).result()
    pages = table[: -(-1001 // 16)]
    for mine, theirs in zip(arrays, taken, strict=True):
        assert np.array_equal(mine["k"][pages], theirs["k"][pages])


def test_out_of_two_tiers(ram_path: Path, tmp_path: Path) -> None:
    """The newest bytes may be in the hot tier alone."""
    with mmkv.Pool.open(
        tmp_path / "pool", HYBRID, capacity=CAPACITY, hot=ram_path / "hot", hot_capacity=CAPACITY
    ) as pool:
        park(pool, "chat", CHAT[:1500])
        pool.flush()
        pool._writer.stop()
        park(pool, "chat", CHAT)
        assert pool.info("chat").dirty_bytes > 0
        export_conversation(pool.path, "chat", tmp_path / "file")
        # A copy of the pool whose hot tier is gone has not got them.
        shutil.copytree(pool.path, tmp_path / "copy")
        catalog = sqlite3.connect(tmp_path / "copy/catalog.sqlite3", isolation_level=None)
        catalog.execute("UPDATE properties SET value = 'null' WHERE key = 'hot'")
        catalog.close()
        with pytest.raises(mmkv.ConversationCorrupt, match="hot tier that is gone"):
            export_conversation(tmp_path / "copy", "chat", tmp_path / "none")
        pool.import_file(tmp_path / "file", "twin")
        assert_parked(pool, "twin", CHAT)
        park(pool, "twin", np.concatenate([CHAT, ids_of((4, 50))]))
        assert_parked(pool, "twin", np.concatenate([CHAT, ids_of((4, 50))]))


def test_out_while_it_is_parked(pool_dir: Path, tmp_path: Path) -> None:
    """What was read while the conversation was parked anew is one version, or an error."""
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", ids_of((0, 1500)))
        end = threading.Event()
        courses = [ids_of((seed, 2500)) for seed in range(3)]

        def engine() -> None:
            turn = 0
            while not end.is_set():
                park(pool, "chat", courses[turn % 3])
                turn += 1
                time.sleep(0.02)

        thread = threading.Thread(target=engine)
        thread.start()
        whole = 0
        errors: list[str] = []
        try:
            for number in range(6):
                try:
                    export_conversation(pool_dir, "chat", tmp_path / f"{number}")
                except mmkv.MmkvError as error:
                    errors.append(str(error))
                else:
                    whole += 1
        finally:
            end.set()
            thread.join()
        assert whole
        assert all("parked anew" in error for error in errors)
    with mmkv.Pool.open(tmp_path / "second", UNIFORM, capacity=CAPACITY) as pool:
        for number in range(6):
            if (tmp_path / f"{number}").exists():
                pool.import_file(tmp_path / f"{number}", replace=True)
                with TensorFile(tmp_path / f"{number}") as file:
                    ids = np.zeros(int(file.metadata["tokens"]), dtype=np.int64)
                    file.read("token_ids", ids.data.cast("B"))
                assert_parked(pool, "chat", ids)


def test_memory_is_bounded(tmp_path: Path) -> None:
    layout = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (4096,))})], "large")
    slot = mmkv.Slot.allocate(layout, 16_384)
    with mmkv.Pool.open(tmp_path / "pool", layout, capacity="256MiB") as pool:
        pool.park("chat", slot, np.arange(16_384)).result()
        del slot
        tracemalloc.start()
        try:
            assert export_conversation(pool.path, "chat", tmp_path / "file") > 64 << 20
            pool.import_file(tmp_path / "file", "copy")
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


# What is refused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a pool of one conversation and the file of that."""
    path = tmp_path_factory.mktemp("made")
    with mmkv.Pool.open(path / "pool", HYBRID, capacity=CAPACITY) as pool:
        park(pool, "chat", ids_of((1, 600)))
        export_conversation(pool.path, "chat", path / "file")
    return path


@pytest.fixture
def exported(made: Path, tmp_path: Path) -> Path:
    """A file, and beside it a pool that has its conversation, too."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "file"


def test_an_id_that_is_taken(exported: Path) -> None:
    with mmkv.Pool.open(exported.parent / "pool") as pool:
        with pytest.raises(ValueError, match="exists already"):
            pool.import_file(exported)
        with pytest.raises(ValueError, match="in namespace ''"):
            pool.import_file(exported, namespace="x", replace=True)
        pool.import_file(exported, "second", namespace="x")
        assert_parked(pool, "second", ids_of((1, 600)))
        for name in ("", "n" * 513):
            with pytest.raises(ValueError, match="1 to 512 characters"):
                pool.import_file(exported, name)
    with pytest.raises(ValueError, match="exists"):
        export_conversation(exported.parent / "pool", "chat", exported)
    with pytest.raises(mmkv.ConversationNotFound):
        export_conversation(exported.parent / "pool", "nobody", exported, replace=True)
    with pytest.raises(mmkv.ConversationNotFound, match="in the namespace ''"):
        export_conversation(exported.parent / "pool", "chat", exported, namespace="x", replace=True)


def test_another_layout(exported: Path, tmp_path: Path) -> None:
    for other in (UNIFORM, mmkv.Layout(HYBRID.layers, "another model")):
        with (
            mmkv.Pool.open(tmp_path / other.model, other, capacity=CAPACITY) as pool,
            pytest.raises(mmkv.LayoutMismatch, match="cannot be imported"),
        ):
            pool.import_file(exported)


def test_no_room(exported: Path, tmp_path: Path) -> None:
    with mmkv.Pool.open(tmp_path / "small", HYBRID, capacity=1 << 18) as pool:
        park(pool, "chat", ids_of((1, 600)))
        pool.pin("chat")
        before = pool.stats().used
        copies = 0
        try:
            while True:
                pool.import_file(exported, f"copy-{copies}")
                pool.pin(f"copy-{copies}")
                copies += 1
        except mmkv.PoolFull:
            assert pool.stats().used == before * (copies + 1)


def test_a_file_that_is_none(exported: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with mmkv.Pool.open(exported.parent / "pool") as pool:
        for name in ("pipe", "empty", "missing", "pool"):
            with pytest.raises((mmkv.MmkvError, ValueError)):
                pool.import_file(tmp_path / name)


def _rewrite(file: Path, change: Any) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


HEADERS: dict[str, Any] = {
    "overlap": lambda h: h["planes.0.k"]["data_offsets"].reverse(),
    "a gap": lambda h: h.update({"token_ids": {**h["token_ids"], "data_offsets": [8, 4808]}}),
    "a dtype": lambda h: h["planes.0.k"].update(dtype="U16"),
    "an unknown dtype": lambda h: h["planes.0.k"].update(dtype="X"),
    "a shape": lambda h: h["planes.0.k"].update(shape=[4, 600]),
    "a giant shape": lambda h: h["planes.0.k"].update(shape=[1 << 61, 1 << 61, 1 << 61]),
    "a negative size": lambda h: h["planes.0.k"].update(shape=[-600, -4]),
    "a fraction": lambda h: h["planes.0.k"].update(shape=[600.0, 4]),
    "a truth": lambda h: h["planes.0.k"].update(data_offsets=[False, True]),
    "one missing": lambda h: h.pop("planes.0.k"),
    "one more": lambda h: h.update({"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "fewer tokens": lambda h: h["__metadata__"].update(tokens="599"),
    "tokens of another script": lambda h: h["__metadata__"].update(tokens="\u0666\u0660\u0660"),
    "no tokens": lambda h: h["__metadata__"].pop("tokens"),
    "no checkpoint": lambda h: h["__metadata__"].update(checkpoints="[]"),
    "a checkpoint behind": lambda h: h["__metadata__"].update(checkpoints="[[601, true]]"),
    "checkpoints in disorder": lambda h: h["__metadata__"].update(checkpoints="[[600, true], [600, true]]"),
    "nested checkpoints": lambda h: h["__metadata__"].update(checkpoints="[" * 100_000),
    "a newer format": lambda h: h["__metadata__"].update(mmkv_format="2"),
    "another's file": lambda h: h["__metadata__"].update(format="pt"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "metadata of numbers": lambda h: h["__metadata__"].update(tokens=600),
    "a long id": lambda h: h["__metadata__"].update(conversation="n" * 513),
    "another fingerprint": lambda h: h["__metadata__"].update(fingerprint="0", layout="[" * 100_000),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_does_not_fit(exported: Path, change: str) -> None:
    _rewrite(exported, HEADERS[change])
    with mmkv.Pool.open(exported.parent / "pool") as pool:
        used = pool.stats().used
        with pytest.raises((ValueError, mmkv.LayoutMismatch)) as caught:
            pool.import_file(exported, "copy")
        assert str(exported) in str(caught.value)
        assert (pool.conversations(), pool.stats().used) == (["chat"], used)


@pytest.mark.parametrize(
    "text",
    [b"{" * 100_000, b'{"a":' * 50_000, b"[]", b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":' + b"9" * 9000 + b"}", b"\xff"],
)
def test_a_header_that_is_none(exported: Path, text: bytes) -> None:
    exported.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="no safetensors file"):
        TensorFile(exported)


@pytest.mark.parametrize("length", [0, 1, 1 << 24, 1 << 40, (1 << 64) - 1])
def test_a_header_of_a_length_that_cannot_be(exported: Path, length: int) -> None:
    data = exported.read_bytes()
    exported.write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match="no safetensors file"):
        TensorFile(exported)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_file(exported: Path, data: st.DataObject) -> None:
    """Flipped, cut and grown: refused in words, or whole; never more than that."""
    kept = exported.with_name("kept")
    if not kept.exists():
        shutil.copy(exported, kept)
    raw = bytearray(kept.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 3000))
        raw[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(raw), len(raw) - 1, 4000, 7, len(raw) + 3]))
    exported.write_bytes(bytes(raw[:end]) + bytes(max(0, end - len(raw))))
    with contextlib.suppress(ValueError), TensorFile(exported) as file:
        assert sum(tensor.bytes for tensor in file.tensors.values()) < len(raw)
