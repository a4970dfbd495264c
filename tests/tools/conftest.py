"""Pools made without the library's engine side: a description, a catalog, and files of the right length."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv import directory
from mmkv.catalog import Catalog
from mmkv.geometry import Extent, Geometry, choose_geometry
from mmkv.layout import Layer, Layout, Plane, State
from mmkv.rows import Checkpoint, VersionRow
from mmkv_inspect import cli

UNIFORM = Layout([Layer({"k": Plane("int8", (4, 128)), "scale": Plane("float16", (24,))})] * 4, model="test/model-7b")
_ATTENTION, _RECURRENT = Layer({"k": Plane("int8", (64,))}), Layer({}, {"s": State("float32", (32, 32))})
HYBRID = Layout([_ATTENTION, _RECURRENT, _ATTENTION], model="test/hybrid")


@dataclass
class MadePool:
    """A pool's directory and what a test may put into its catalog."""

    path: Path
    geometry: Geometry
    catalog: Catalog
    used: int = 0

    def put(
        self,
        name: str,
        tokens: int,
        extents: Iterable[tuple[int, int]],
        *,
        namespace: str = "",
        age: float = 0.0,
        taken: float | None = None,
        pinned: bool = False,
        checkpoints: Sequence[tuple[int, int]] = (),
        synced: bool = False,
        keep_fallback: int | None = None,
    ) -> VersionRow:
        """Park a conversation, `age` seconds ago, by its row alone."""
        self.used += 1
        now = time.time()
        version = VersionRow(
            0, tokens, now - age, "boot", synced, np.zeros(tokens // self.geometry.block_tokens, dtype=np.uint64),
            tuple(Extent(*extent) for extent in extents),
            tuple(Checkpoint(at, record, False) for at, record in checkpoints),
        )  # fmt: skip
        committed = self.catalog.put_version(name, namespace, version, self.used, keep_fallback=keep_fallback)
        if pinned:
            self.catalog.pin(name, True)
        if taken is not None:
            self.catalog.touch([(name, now - taken, self.used)])
        return committed

    def run_sql(self, statement: str, *values: object) -> None:
        """Change the catalog behind everybody's back."""
        with self.catalog.transaction() as db:
            db.execute(statement, values)


def _make_pool(path: Path, layout: Layout = UNIFORM, capacity: int = 1 << 28, segments: int = 16) -> MadePool:
    """A pool with so many segments allocated and nothing parked."""
    path.mkdir(mode=0o700)
    geometry = choose_geometry(layout, capacity)
    description = directory.describe(layout, geometry)
    directory.write_description(path, description)
    catalog = Catalog(path / "catalog.sqlite3", create=True)
    catalog.set_property("uuid", description.uuid)
    catalog.set_property("capacity", capacity)
    (path / "layers").mkdir(mode=0o700)
    sizes = {"tokens.kv": geometry.tokens_segment_bytes}
    for layer, (planes, states) in enumerate(
        zip(geometry.layer_segment_bytes, geometry.layer_state_segment_bytes, strict=True)
    ):
        sizes |= {f"layers/{layer:04d}.kv": planes} if planes else {}
        sizes |= {f"layers/{layer:04d}.state": states} if states else {}
    for name, size in sizes.items():
        with (path / name).open("wb") as file:
            file.truncate(size * segments)
    for segment in range(segments):
        catalog.add_segment("blocks", segment)
        if geometry.segment_checkpoints:
            catalog.add_segment("checkpoints", segment)
    return MadePool(path, geometry, catalog)


@pytest.fixture
def make_pool() -> Iterable[Callable[..., MadePool]]:
    """Makes pools: a path, a layout, a capacity, and how many segments are allocated."""
    made: list[MadePool] = []

    def make(*arguments: Any) -> MadePool:
        made.append(_make_pool(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.catalog.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterable[MadePool]:
    """A pool of uniform layers."""
    made = _make_pool(tmp_path / "pool")
    yield made
    made.catalog.close()


@pytest.fixture
def hybrid_pool(tmp_path: Path) -> Iterable[MadePool]:
    """A pool of a layout with states."""
    made = _make_pool(tmp_path / "hybrid", HYBRID)
    yield made
    made.catalog.close()


@dataclass
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs mmkv-inspect in this process, as its console script would."""
    monkeypatch.delenv("MMKV_POOL", raising=False)
    # main sets it, and it should not stay set.
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "__all__")

    def run(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["mmkv-inspect", *(str(argument) for argument in arguments)])
        capsys.readouterr()
        code: int | str | None = 0
        with contextlib.suppress(SystemExit):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
                raise
        assert isinstance(code, int | None)
        out, err = capsys.readouterr()
        return Result(code or 0, out, err)

    return run
