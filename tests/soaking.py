"""An engine that does everything at once and at random, with faults, and is killed again and again, on one pool.

Some threads park, grow, edit, fork, take, swap, drop, pin and prefetch. What a conversation holds is a function of its
number and version, so that every byte of a take is known, whoever parked it, and after a kill, too. Reads and writes
fail now and then, or move a part. The parent knows from the child's lines what each conversation may be after a kill.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import mmkv
from tests.computed import Ids, assert_holds, compute, ids_of, make_slot

THREADS = 4
CONVERSATIONS = 24
CAPACITY, HOT_CAPACITY = 48 << 20, 24 << 20
MOST_TOKENS = 6000
LAYOUT = mmkv.Layout(
    [mmkv.Layer({"k": mmkv.Plane("uint8", (256,)), "v": mmkv.Plane("uint8", (128,))})] * 3
    + [mmkv.Layer({"k": mmkv.Plane("uint8", (256,))}, {"s": mmkv.State("float32", (64,))})],
    model="soaked",
)
_ROOT = Path(__file__).parent.parent
# One call of some hundreds fails.
_FAULTS_A_CALL = 1 / 400
_ANCHOR = "anchor"


def text(conversation: int, version: int) -> Ids:
    """The ids of a version: one of three prompts, a course of its own, which every fifth version leaves."""
    course, turn = divmod(version, 5)
    return ids_of(
        (conversation % 3, 1100), (1000 * (conversation + 1) + course, 300), (7_000 + conversation, 383 * turn + 1)
    )


class Faults:
    """Lets reads, writes and allocations of files fail, or move a part, one call of some hundreds."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.count = 0
        self.active = True

    def install(self) -> None:
        """Stand between mmkv and the system calls, in this process, for good."""
        for name in ("preadv", "pwritev", "pread", "pwrite"):
            setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, data: Any, *rest: Any) -> Any:
            if not self.active or self._rng.random() >= _FAULTS_A_CALL:
                return real(fd, data, *rest)
            self.count += 1
            code = self._rng.choice([errno.EIO, errno.ENOSPC, 0])
            if code == 0 and isinstance(data, list) and len(data) == 1 and len(data[0]) > 4096:
                return real(fd, [memoryview(data[0])[:4096]], *rest)
            raise OSError(code or errno.EIO, os.strerror(code or errno.EIO))

        return call


@dataclass
class Engine:
    """The child: threads that use the pool until they are killed, or told to end."""

    pool: mmkv.Pool
    faults: Faults
    device: str
    # What each conversation may be: versions; nothing where it was dropped.
    versions: dict[int, set[int]]
    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    wrong: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def say(self, *words: object) -> None:
        """Tell the parent."""
        with self._lock:
            print(*words, flush=True)

    def count(self, what: str, size: int = 0) -> None:
        """Note an operation."""
        with self._lock:
            self.operations[what] += 1
            self.bytes += size

    def slot(self) -> mmkv.Slot:
        """A slot on the device."""
        return make_slot(LAYOUT, MOST_TOKENS, self._xp())

    def _xp(self) -> Any:
        if self.device == "cpu":
            return np
        import cupy

        return cupy

    def check(self, slot: mmkv.Slot, ids: Ids, what: str, *, have: int = 0) -> None:
        """See that the slot holds a conversation, and forget that at once for the next take."""
        try:
            assert_holds(_rows_only(slot, len(ids)), ids, have=have)
        except AssertionError as error:
            with self._lock:
                self.wrong += 1
            self.say("wrong", what, str(error).replace("\n", " "))

    def run(self, seconds: float) -> None:
        """All threads, for so long."""
        threads = [threading.Thread(target=self._thread, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._ended = True
        for thread in threads:
            thread.join()

    def _thread(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        slot = self.slot()
        mine = range(number, CONVERSATIONS, THREADS)
        steps = [self.park, self.park, self.park, self.take, self.take, self.match, self.match, self.fork, self.swap,
                 self.drop, self.prefetch, self.pin, self.flush, self.look]  # fmt: skip
        while not self._ended:
            step = rng.choice(steps)
            try:
                step(rng, rng.choice(mine), slot)
                self.count(step.__name__)
            except mmkv.MmkvError as error:
                self.count(type(error).__name__)
            except TimeoutError:
                self.count("TimeoutError")

    # Steps

    def park(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Grow a conversation, or let it leave its course; one of eight is cancelled."""
        version = max(self.versions.get(conversation) or {-1}) + rng.randint(1, 3)
        ids = text(conversation, version)
        compute(slot, ids)
        self.say("begin", conversation, version)
        transfer = self.pool.park(f"chat {conversation}", slot, ids, durable=rng.random() < 0.1)
        if rng.random() < 0.125:
            transfer.cancel()
        self._settle(conversation, version, transfer)

    def _settle(self, conversation: int, version: int, transfer: mmkv.Transfer) -> None:
        try:
            receipt = transfer.result(120)
        except mmkv.MmkvError:
            # The former version is whole, which the next takes of it show.
            self.say("failed", conversation, version)
            raise
        self.versions[conversation] = {version}
        self.say("done", conversation, version)
        self.count("bytes", receipt.bytes)

    def take(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Take a conversation, which may have been evicted."""
        versions = self.versions.get(conversation)
        _clear(slot)
        verify: Literal["always", "first"] = "always" if rng.random() < 0.3 else "first"
        transfer = self.pool.take(f"chat {conversation}", slot, verify=verify)
        receipt = transfer.result(120)
        self.count("bytes", receipt.bytes)
        fitting = [version for version in versions or () if len(text(conversation, version)) == receipt.tokens]
        if not fitting:
            with self._lock:
                self.wrong += 1
            self.say("wrong", f"chat {conversation} has {receipt.tokens} tokens, none of {versions}")
            return
        self.check(slot, text(conversation, fitting[0]), f"take of chat {conversation}")

    def match(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Take the longest prefix of what anyone may have parked, behind what the slot has of it."""
        other = rng.randrange(CONVERSATIONS)
        del conversation
        ids = text(other, max(self.versions.get(other) or {0}) + rng.randint(0, 1))
        with self.pool.match(ids) as match:
            if not match.tokens:
                return
            compute(slot, ids[: match.tokens])
            have = rng.choice([0, 0, rng.randint(0, match.tokens)])
            for _, array in _arrays(slot):
                array[have : match.tokens] = 0
            receipt = self.pool.take(match, slot, have=have).result(120)
            self.count("bytes", receipt.bytes)
            self.check(slot, ids[: match.tokens], f"match of {match.conversation}")

    def fork(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Fork what is there, take the fork, and drop it."""
        ids = text(conversation, max(self.versions.get(conversation) or {0}))
        name = f"fork {conversation}"
        with self.pool.match(ids) as match:
            if not match.tokens:
                return
            with suppress(mmkv.ConversationNotFound):
                self.pool.drop(name)
            self.pool.fork(match, name)
            tokens = match.tokens
        if rng.random() < 0.7:
            _clear(slot)
            self.pool.take(name, slot).result(120)
            self.check(slot, ids[:tokens], f"take of {name}")
        self.pool.drop(name)

    def swap(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Park one while another one of the same thread arrives in its place."""
        other = (conversation + THREADS * rng.randint(1, 3)) % CONVERSATIONS
        versions = self.versions.get(other)
        if not versions or other == conversation:
            return
        version = max(self.versions.get(conversation) or {-1}) + 1
        ids = text(conversation, version)
        _clear(slot)
        compute(slot, ids)
        self.say("begin", conversation, version)
        park, take = self.pool.swap(slot, leaving=f"chat {conversation}", leaving_ids=ids, arriving=f"chat {other}")
        self._settle(conversation, version, park)
        receipt = take.result(120)
        fitting = [one for one in versions if len(text(other, one)) == receipt.tokens]
        self.check(slot, text(other, fitting[0]), f"swap to chat {other}")

    def drop(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Drop a conversation, one time of four."""
        del slot
        if rng.random() < 0.25:
            self.pool.drop(f"chat {conversation}")

    def prefetch(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Prefetch a conversation, and give that up half the time."""
        del slot
        transfer = self.pool.prefetch(f"chat {conversation}")
        if rng.random() < 0.5:
            transfer.cancel()
        transfer.result(120)

    def pin(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Pin a conversation for a while."""
        del slot, rng
        self.pool.pin(f"chat {conversation}")
        time.sleep(0.01)
        self.pool.unpin(f"chat {conversation}")

    def flush(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Wait until a conversation is on the medium, one time of ten."""
        del slot
        if rng.random() < 0.1:
            self.pool.flush(f"chat {conversation}")

    def look(self, rng: random.Random, conversation: int, slot: mmkv.Slot) -> None:
        """Figures of the pool and of a conversation."""
        del slot, rng
        stats = self.pool.stats()
        if stats.used > stats.allocated or stats.allocated > CAPACITY:
            raise AssertionError(f"{stats.used} of {stats.allocated} of {CAPACITY} bytes are used")
        self.pool.info(f"chat {conversation}")


def _arrays(slot: mmkv.Slot) -> list[tuple[str, Any]]:
    return [(name, array) for layer in slot.arrays for name, array in layer.items()]


def _clear(slot: mmkv.Slot) -> None:
    for _, array in _arrays(slot):
        array[...] = 0


def _rows_only(slot: mmkv.Slot, tokens: int) -> mmkv.Slot:
    """The first rows of a slot, as one of its own: what lies behind them is of other steps."""
    arrays = [{name: array[:tokens] for name, array in layer.items()} for layer in slot.arrays]
    made = mmkv.Slot(slot.layout, arrays, slot.state)
    made.arrays, made.state = arrays, slot.state
    return made


def child(path: str, hot: str | None, device: str, seed: int, seconds: float) -> None:
    """Use the pool for so long, or until killed."""
    known = {int(key): set(value) for key, value in json.loads(sys.stdin.readline()).items()}
    faults = Faults(seed)
    faults.active = False
    faults.install()
    options: dict[str, Any] = {} if hot is None else {"hot": hot, "hot_capacity": HOT_CAPACITY}
    with mmkv.Pool.open(path, LAYOUT, capacity=CAPACITY, min_free_ram=0, deadline=60, **options) as pool:
        engine = Engine(pool, faults, device, known, seed)
        _look_after_kill(engine)
        faults.active = True
        engine.run(seconds)
        faults.active = False
        operations = dict(engine.operations)
        operations.pop("bytes", None)
        engine.say("end", json.dumps([operations, engine.bytes, faults.count, engine.wrong]))


def _look_after_kill(engine: Engine) -> None:
    """Every conversation is what one of its versions was; the anchor, which is pinned and synced, is always there."""
    pool, slot = engine.pool, engine.slot()
    ids = text(10_000, 0)
    if _ANCHOR in pool:
        pool.take(_ANCHOR, slot, verify="always").result(120)
        engine.check(slot, ids, _ANCHOR)
    else:
        if engine.versions:
            engine.say("wrong", "the anchor is lost")
        pool.park(_ANCHOR, compute(slot, ids), ids, durable=True).result(120)
        pool.pin(_ANCHOR)
    for conversation in range(CONVERSATIONS):
        name = f"chat {conversation}"
        with suppress(mmkv.ConversationNotFound):
            pool.unpin(name)
        if name in pool:
            engine.take(random.Random(0), conversation, slot)
            tokens = pool.info(name).tokens
            fitting = {v for v in engine.versions.get(conversation, ()) if len(text(conversation, v)) == tokens}
            engine.versions[conversation] = fitting
    for name in pool.conversations():
        if name.startswith("fork"):
            pool.drop(name)


@dataclass
class Soak:
    """Runs one child after another on one pool; kills most of them.

    Attributes
    ----------
    operations : Counter
        What all children did, of those that were not killed.
    faults, kills, wrong, bytes, runs : int
        Faults injected, children killed, wrong takes, bytes moved, children in all.
    """

    path: Path
    hot: Path | None
    device: str
    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    faults: int = 0
    kills: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    versions: dict[int, set[int]] = field(default_factory=dict)

    def run(self, seconds: float, *, kill: bool) -> None:
        """One child for so long."""
        self.runs += 1
        hot = None if self.hot is None else str(self.hot)
        arguments = (str(self.path), hot, self.device, self.seed + self.runs, 3600.0 if kill else seconds)
        code = f"from tests.soaking import child; child(*{arguments!r})"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        ) as process:
            assert process.stdin is not None
            known = {str(key): sorted(value) for key, value in self.versions.items()}
            process.stdin.write(json.dumps(known) + "\n")
            process.stdin.flush()
            timer = threading.Timer(seconds, process.kill)
            if kill:
                timer.start()
            try:
                self._listen(process)
            finally:
                timer.cancel()
                if process.poll() is None and sys.exc_info()[0] is not None:
                    process.kill()
        if kill:
            self.kills += 1
        elif process.returncode:
            raise RuntimeError(f"the engine ended with {process.returncode}")

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            word, _, rest = line.strip().partition(" ")
            if word == "wrong":
                self.wrong.append(rest)
            elif word == "end":
                operations, size, faults, _ = json.loads(rest)
                self.operations.update(operations)
                self.bytes += size
                self.faults += faults
            elif word in ("begin", "done", "failed"):
                self._note(word, *map(int, rest.split()))

    def _note(self, word: str, conversation: int, version: int) -> None:
        may_be = self.versions.setdefault(conversation, set())
        if word == "begin":
            may_be.add(version)
        elif word == "done":
            self.versions[conversation] = {version}
        else:
            may_be.discard(version)
