"""The pool against a dict, over sequences of steps that Hypothesis thinks up and shrinks.

`MMKV_MODEL_EXAMPLES` sets how many sequences each kind of pool is put through.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import mmkv
from tests.computed import HYBRID, UNIFORM, Ids, ids_of
from tests.mirror import Mirror

EXAMPLES = int(os.environ.get("MMKV_MODEL_EXAMPLES", "12"))
CAPACITY = 4 << 20
HOT_CAPACITY = 600_000

names = st.sampled_from("abcdef")
namespaces = st.sampled_from(["", "other"])
lengths = st.sampled_from([1, 7, 300, 511, 512, 513, 1024, 1500, 2048, 2600])
# Few seeds, so that conversations begin alike.
texts = st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=3).map(lambda parts: ids_of(*parts))


class PoolMachine(RuleBasedStateMachine):
    layout: mmkv.Layout
    base: Path
    hot_base: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="mmkv-model-", dir=self.base))
        self.hot: Path | None = None
        if self.hot_base is not None:
            self.hot = Path(tempfile.mkdtemp(prefix="mmkv-model-", dir=self.hot_base))
        self.mirror = Mirror(
            self.directory / "pool",
            self.layout,
            CAPACITY,
            None if self.hot is None else self.hot / "hot",
            None if self.hot is None else HOT_CAPACITY,
            "first",
        )

    @initialize(always=st.booleans())
    def choose_verify(self, always: bool) -> None:
        """Half of the pools check every take."""
        self.mirror.verify = "always" if always else "first"
        self.mirror.reopen()

    def teardown(self) -> None:
        try:
            self.mirror.close()
        finally:
            shutil.rmtree(self.directory)
            if self.hot is not None:
                shutil.rmtree(self.hot, ignore_errors=True)

    def some(self, index: int) -> str:
        parked = sorted(self.mirror.model)
        return parked[index % len(parked)]

    @rule(name=names, ids=texts, namespace=namespaces, share=st.booleans(), durable=st.booleans(), end=st.booleans())
    def park(self, name: str, ids: Ids, namespace: str, share: bool, durable: bool, end: bool) -> None:
        self.mirror.park(name, ids, namespace, share=share, durable=durable, boundary=end)

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), seed=st.integers(0, 2), length=lengths)
    def grow(self, index: int, seed: int, length: int) -> None:
        name = self.some(index)
        former = self.mirror.model[name].ids
        self.mirror.park(name, np.concatenate([former, ids_of((seed, length))]))

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), share=st.floats(0.0, 1.0), seed=st.integers(0, 2), length=lengths)
    def edit(self, index: int, share: float, seed: int, length: int) -> None:
        name = self.some(index)
        former = self.mirror.model[name].ids
        self.mirror.park(name, np.concatenate([former[: int(share * len(former))], ids_of((seed, length))]))

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), cut=lengths)
    def truncate(self, index: int, cut: int) -> None:
        name = self.some(index)
        former = self.mirror.model[name].ids
        self.mirror.park(name, former[: max(1, len(former) - cut)])

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), share=st.none() | st.floats(0.0, 1.0), have=st.floats(0.0, 1.0))
    def take(self, index: int, share: float | None, have: float) -> None:
        name = self.some(index)
        length = len(self.mirror.model[name].ids)
        tokens = None if share is None else max(1, int(share * length))
        self.mirror.take(name, tokens, int(have * length))

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), point=st.integers(0, 5))
    def take_to_a_checkpoint(self, index: int, point: int) -> None:
        name = self.some(index)
        points = self.mirror.pool.info(name).checkpoints
        if points:
            self.mirror.take(name, points[point % len(points)])

    @rule(ids=texts, namespace=namespaces, hold=st.booleans())
    def match(self, ids: Ids, namespace: str, hold: bool) -> None:
        self.mirror.match(ids, namespace, hold=hold and len(self.mirror.leases) < 3)

    @precondition(lambda self: self.mirror.leases)
    @rule(index=st.integers(0, 2))
    def take_lease(self, index: int) -> None:
        self.mirror.take_lease(index)

    @precondition(lambda self: self.mirror.leases)
    @rule(index=st.integers(0, 2))
    def close_lease(self, index: int) -> None:
        self.mirror.close_lease(index)

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), into=names, share=st.none() | st.floats(0.0, 1.0))
    def fork(self, index: int, into: str, share: float | None) -> None:
        source = self.some(index)
        length = len(self.mirror.model[source].ids)
        self.mirror.fork(source, into, None if share is None else max(1, int(share * length)))

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5))
    def drop(self, index: int) -> None:
        self.mirror.drop(self.some(index))

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), pinned=st.booleans())
    def pin(self, index: int, pinned: bool) -> None:
        self.mirror.pin(self.some(index), pinned=pinned)

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), leaving=names, ids=texts)
    def swap(self, index: int, leaving: str, ids: Ids) -> None:
        self.mirror.swap(leaving, ids, self.some(index))

    @rule(capacity=st.sampled_from([1, 300_000, 500_000, 800_000, CAPACITY]))
    def resize(self, capacity: int) -> None:
        self.mirror.resize(capacity)

    @rule()
    def keep_house(self) -> None:
        self.mirror.keep_house()

    @rule()
    def flush(self) -> None:
        self.mirror.flush()

    @rule()
    def reopen(self) -> None:
        self.mirror.reopen()

    @rule(lose_hot=st.booleans())
    def crash(self, lose_hot: bool) -> None:
        self.mirror.crash(lose_hot=lose_hot)

    @rule()
    def write(self) -> None:
        self.mirror.write()

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5), cancel=st.booleans())
    def prefetch(self, index: int, cancel: bool) -> None:
        self.mirror.prefetch(self.some(index), cancel=cancel)

    @precondition(lambda self: self.mirror.model)
    @rule(index=st.integers(0, 5))
    def flush_one(self, index: int) -> None:
        name = self.some(index)
        self.mirror.pool.flush(name)
        assert self.mirror.pool.info(name).synced

    @precondition(lambda self: self.mirror.hot)
    @rule()
    def lose_hot_after_a_flush(self) -> None:
        self.mirror.flush()
        before = set(self.mirror.model)
        self.mirror.crash(lose_hot=True)
        assert set(self.mirror.model) == before

    @precondition(lambda self: self.mirror.hot)
    @rule()
    def relieve(self) -> None:
        self.mirror.relieve()

    @precondition(lambda self: self.hot)
    @rule(name=st.sampled_from(["hot", "other"]), capacity=st.sampled_from([120_000, 250_000, HOT_CAPACITY]))
    def change_hot(self, name: str, capacity: int) -> None:
        assert self.hot is not None
        self.mirror.change_hot(self.hot / name, capacity)

    @precondition(lambda self: self.hot)
    @rule()
    def give_up_hot(self) -> None:
        self.mirror.change_hot(None, None)

    @invariant()
    def everything_is_in_its_place(self) -> None:
        self.mirror.check()


def _machine(layout: mmkv.Layout, base: str, hot_base: str | None = None) -> type:
    places = {"layout": layout, "base": Path(base), "hot_base": None if hot_base is None else Path(hot_base)}
    machine = type(f"PoolMachine_{layout.model}", (PoolMachine,), places)
    case: type = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


RAM = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()

TestUniformInRam = _machine(UNIFORM, RAM)
TestUniformOnDisk = _machine(UNIFORM, tempfile.gettempdir())
TestHybridInRam = _machine(HYBRID, RAM)
TestHybridOnDisk = _machine(HYBRID, tempfile.gettempdir())
TestUniformInTwoTiers = _machine(UNIFORM, tempfile.gettempdir(), RAM)
TestHybridInTwoTiers = _machine(HYBRID, tempfile.gettempdir(), RAM)
