"""Layer files that are gone, cut or replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmkv
from tests.bad_input.whole import CAPACITY, IDS
from tests.computed import (
    UNIFORM,
    computed,
    ids_of,
    make_slot,
    park,
)


def files_of(path: Path) -> list[Path]:
    return [path / "tokens.kv", *sorted(path.glob("layers/*"))]


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(bytes(file.stat().st_size))
    new.rename(file)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "is truncated: it has"),
        (Path.unlink, "is missing"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is not a plain file"),
        (lambda file: (file.rename(file.with_suffix(".x")), file.symlink_to(file.with_suffix(".x"))), "symbolic link"),
    ],
    ids=["cut", "gone", "a pipe", "a link"],
)
def test_a_damaged_layer_file_of_a_closed_pool(
    closed: Path, which: int, damage: Callable[[Path], Any], text: str
) -> None:
    damage(files_of(closed)[which])
    for readonly in (False, True):
        with pytest.raises(mmkv.PoolCorrupt, match=text):
            mmkv.Pool.open(closed, readonly=readonly)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("damage", [_cut, Path.unlink, _replace], ids=["cut", "gone", "replaced"])
def test_a_damaged_layer_file_of_an_open_pool(pool_dir: Path, which: int, damage: Callable[[Path], Any]) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        damage(files_of(pool_dir)[which])
        with pytest.raises(mmkv.PoolCorrupt, match=r"truncated|deleted or replaced"):
            pool.take("chat", make_slot(UNIFORM, 1000)).result(30)
        with pytest.raises(mmkv.PoolCorrupt, match=r"truncated|deleted or replaced"):
            park(pool, "other", ids_of((2, 700)))
        assert pool.conversations() == ["chat"]


def test_a_file_that_is_cut_while_it_is_read_is_an_error(pool_dir: Path) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        # As if it happened after the take has looked.
        pool._space.require_whole = lambda: None  # type: ignore[method-assign]
        os.truncate(files_of(pool_dir)[1], 100)
        with pytest.raises(
            mmkv.TransferError, match=r"layer 0, 'k': .*0000\.kv ends at 100 bytes.*truncated"
        ) as caught:
            pool.take("chat", make_slot(UNIFORM, 1000)).result(30)
        assert (caught.value.layer, caught.value.plane) == (0, "k")
        os.truncate(files_of(pool_dir)[0], 100)
        with pytest.raises(mmkv.PoolCorrupt, match=r"tokens\.kv ends at 100 bytes"):
            pool.match(IDS)


def test_a_file_that_is_cut_while_it_is_written_is_not_committed(
    pool_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY) as pool:
        park(pool, "chat", IDS)
        slot = computed(UNIFORM, ids_of((2, 700)))
        begin = mmkv.Transfer.begin

        def cut(transfer: mmkv.Transfer) -> None:
            os.truncate(files_of(pool_dir)[1], 100)
            begin(transfer)

        monkeypatch.setattr(mmkv.Transfer, "begin", cut)
        with pytest.raises(mmkv.PoolCorrupt, match="truncated"):
            pool.park("other", slot, ids_of((2, 700))).result(30)
        assert pool.conversations() == ["chat"]
