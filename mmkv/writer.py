"""The writer: brings what was parked to the medium of the path, in the background and when it is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.between import Pairs
from mmkv.blocks import block_numbers, number_extents
from mmkv.catalog import Catalog
from mmkv.errors import MmkvError
from mmkv.hot import Hot
from mmkv.ledger import Conversation, Ledger, Version
from mmkv.refused import started
from mmkv.space import KINDS, Kind, Space
from mmkv.store.posix import PosixStore
from mmkv.traffic import Traffic
from mmkv.transfer import Transfer

__all__ = ["Writer"]

_Numbers: TypeAlias = npt.NDArray[np.int64]
_BATCH_BYTES, _GENTLE_BATCH_BYTES = 256 << 20, 64 << 20
_GENTLE_THREADS = 2
# Syncs cost a flush of the medium's cache: many parks share one.
_SYNC_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_log = logging.getLogger("mmkv")


class Writer:
    """Writes what the path lacks, and syncs it.

    Parameters
    ----------
    lock : RLock
        The pool's lock.
    catalog, path, ledger, traffic
        The pool's parts.
    hot : Hot or None
        The hot tier; without one, everything that is parked is at the path already and has to be synced only.
    deadline : float or None
        Seconds after which a write fails for those who wait.
    ended : callable
        Called with each write's transfer when it let go of everything.
    """

    def __init__(
        self,
        lock: threading.RLock,
        catalog: Catalog,
        path: Space,
        ledger: Ledger,
        traffic: Traffic,
        hot: Hot | None,
        deadline: float | None,
        ended: Callable[[Transfer], None],
    ) -> None:
        self._catalog = catalog
        self._path = path
        self._ledger = ledger
        self._traffic = traffic
        self._hot = hot
        self._deadline = deadline
        self._ended = ended
        self._changed = threading.Condition(lock)
        self._gentle = PosixStore(_GENTLE_THREADS)
        self._writing: dict[Kind, dict[int, Transfer]] = {kind: {} for kind in KINDS}
        self._stopping = False
        self._synced_at = 0.0
        self.error: str | None = None
        self.counters = dict.fromkeys(("spills", "bytes_spilled"), 0)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write in the background, where there is a hot tier to write from."""
        if self._hot is not None:
            self._thread = started(self._run, "mmkv-writer")

    def notify(self) -> None:
        """There may be something to write."""
        with self._changed:
            self._changed.notify_all()

    def bring(self, conversations: Sequence[Conversation]) -> None:
        """Wait until the newest versions of `conversations` are on the medium, and their fallbacks free.

        The pool's lock must not be held: bytes move.

        Raises
        ------
        MmkvError
            They could not be written or synced; what was kept for their sake still is.
        """
        with self._changed:
            waiting = [(c, c.version) for c in conversations if not c.version.row.synced]
        if not waiting:
            return
        self.write([version for _, version in waiting])
        self._sync(waiting)

    def write(self, versions: Iterable[Version]) -> None:
        """Wait until the path has all bytes of `versions`, synced or not."""
        if self._hot is None:
            return
        self.write_numbers(_numbers_of(versions))

    def write_numbers(self, numbers: Mapping[Kind, _Numbers]) -> None:
        """Wait until the path has the bytes of all residents among `numbers`, by kind."""
        before: Transfer | None = None
        # One is under way while the one before ends, which leaves the medium little to do and then nothing.
        while (transfer := self._write_some(numbers, _BATCH_BYTES)) is not None:
            if before is not None:
                before.result()
            before = transfer
        if before is not None:
            before.result()

    def write_pairs(self, pairs: Mapping[Kind, Pairs]) -> None:
        """Wait until the path has the bytes of pairs that are no residents yet, and that the caller holds."""
        with self._changed:
            transfer = self._begin(pairs, lambda: None)
        transfer.result()

    def _write_some(self, numbers: Mapping[Kind, _Numbers], most: int) -> Transfer | None:
        """Begin to write some of what the path lacks, or give another's write of it; `None` if it lacks nothing."""
        with self._changed:
            pairs, other = self._lacking(numbers, most)
            if any(len(pairs[kind]) for kind in KINDS):
                return self._begin(pairs, partial(self._mark_clean, pairs))
            return other

    def _begin(self, pairs: Mapping[Kind, Pairs], finish: Callable[[], None]) -> Transfer:
        """Begin to write pairs, which are held from here on until the hardware is done with them."""
        hot = self._hot
        assert hot is not None
        size = hot.between.bytes(pairs)

        def release(transfer: Transfer) -> None:
            with self._changed:
                for kind in KINDS:
                    for number in pairs[kind].numbers.tolist():
                        del self._writing[kind][number]
                    hot.release(kind, pairs[kind].hot)
                    self._path.allocator(kind).release(number_extents(pairs[kind].numbers))
                if not transfer.stopped:
                    self.counters["spills"] += 1
                    self.counters["bytes_spilled"] += size
                self._changed.notify_all()
            self._ended(transfer)

        transfer = Transfer(
            "writing to the path",
            len(self._path.geometry.layout.layers),
            kind="spill",
            parts=1,
            deadline=self._deadline,
            finish=finish,
            release=release,
        )
        for kind in KINDS:
            self._writing[kind].update(dict.fromkeys(pairs[kind].numbers.tolist(), transfer))
            self._path.allocator(kind).hold(number_extents(pairs[kind].numbers))
            hot.hold(kind, pairs[kind].hot)
        self._traffic.enter(transfer, size, lambda: None)
        transfer.begin()
        store = self._gentle if self._traffic.moves_slots else hot.store
        store.write(hot.between.copies(pairs), transfer)
        return transfer

    def _lacking(self, numbers: Mapping[Kind, _Numbers], most: int) -> tuple[dict[Kind, Pairs], Transfer | None]:
        """What the path lacks of `numbers` and nobody writes, up to `most` bytes, and a write of others of them."""
        hot = self._hot
        assert hot is not None
        pairs: dict[Kind, Pairs] = {}
        other = None
        for kind in KINDS:
            residents = hot.residents[kind]
            dirty = np.unique(numbers[kind][residents.is_dirty(numbers[kind])])
            writes = [self._writing[kind].get(number) for number in dirty.tolist()]
            free = np.array([write is None for write in writes], dtype=bool)
            other = other or next((write for write in writes if write is not None), None)
            count = max(1, most // max(1, hot.space.number_bytes(kind)))
            mine = dirty[free][:count]
            pairs[kind] = Pairs(mine, residents.places(mine))
        return pairs, other

    def _mark_clean(self, pairs: Mapping[Kind, Pairs]) -> None:
        assert self._hot is not None
        with self._changed:
            residents = self._hot.residents
            clean = {kind: residents[kind].dirty_at(pairs[kind].numbers, pairs[kind].hot) for kind in KINDS}
            self._catalog.mark_clean([(kind, number) for kind in KINDS for number in clean[kind].tolist()])
            for kind in KINDS:
                residents[kind].mark_clean(clean[kind])

    def _sync(self, waiting: Sequence[tuple[Conversation, Version]]) -> None:
        """Bring what is at the path to the medium, and free what was kept for the sake of these versions."""
        self._path.sync()
        with self._changed:
            self._synced_at = time.monotonic()
            done = [c for c, version in waiting if c.version is version and version.linked and not version.row.synced]
            self._catalog.mark_synced([c.version.row.id for c in done])
            for conversation in done:
                self._ledger.mark_synced(conversation)
            if done:
                # The transaction that was synced comes after all that freed numbers, these among them.
                self._path.settle()
            self._changed.notify_all()

    # In the background

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                if self._stopping:
                    return
            try:
                if not self._write_oldest() and not self._sync_written():
                    with self._changed:
                        if not self._stopping:
                            self._changed.wait(_SYNC_SECONDS)
                self.error = None
                pause = _FIRST_PAUSE
            except MmkvError as error:
                # No call owns this: what is parked stays in the hot tier, and a flush meets the same error.
                if self.error is None:
                    _log.error("cannot write to the pool's path, and will go on trying: %s", error)
                self.error = str(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, timeout=pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _write_oldest(self) -> bool:
        """Write a batch of the conversation that was parked first of those that the path lacks."""
        assert self._hot is not None
        with self._changed:
            waiting = [c for c in self._ledger.conversations.values() if not c.version.row.synced]
            waiting.sort(key=lambda conversation: conversation.version.row.id)
            oldest = next((c.version for c in waiting if self._lacks(c.version)), None)
            if oldest is None:
                return False
            numbers = _numbers_of([oldest])
        most = _GENTLE_BATCH_BYTES if self._traffic.moves_slots else _BATCH_BYTES
        transfer = self._write_some(numbers, most)
        if transfer is not None:
            transfer.result()
        return True

    def _sync_written(self) -> bool:
        """Sync, where there are versions that have all their bytes at the path and only lack that."""
        with self._changed:
            waiting = [(c, c.version) for c in self._ledger.conversations.values() if not c.version.row.synced]
            written = [(c, version) for c, version in waiting if not self._lacks(version)]
            if not written or time.monotonic() - self._synced_at < _SYNC_SECONDS:
                return False
        self._sync(written)
        return True

    def _lacks(self, version: Version) -> bool:
        """Whether the path lacks bytes of a version."""
        numbers = _numbers_of([version])
        return self._hot is not None and any(
            bool(self._hot.residents[kind].is_dirty(numbers[kind]).any()) for kind in KINDS
        )

    def stop(self) -> None:
        """End the thread and wait for it. A second call does nothing."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._gentle.close()


def _numbers_of(versions: Iterable[Version]) -> dict[Kind, _Numbers]:
    versions = list(versions)
    return {
        "blocks": _joined([block_numbers(version.extents) for version in versions]),
        "checkpoints": _joined([block_numbers(version.records) for version in versions]),
    }


def _joined(runs: list[_Numbers]) -> _Numbers:
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)
