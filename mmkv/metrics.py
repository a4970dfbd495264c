"""The figures of pools for Prometheus. Needs the extra `metrics`; `import mmkv` does without."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, get_args
from weakref import WeakKeyDictionary

from mmkv.errors import MmkvError, PoolClosed
from mmkv.info import PoolStats, TransferKind, TransferStats
from mmkv.pool import Pool

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise ImportError("mmkv.metrics needs prometheus-client: pip install 'mmkv[metrics]'") from error

__all__ = ["PoolCollector", "register"]

_log = logging.getLogger("mmkv")
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily
_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


class _Figure(NamedTuple):
    """One metric: its name, what it says, and its samples, each the values of `labels` and a number."""

    name: str
    text: str
    samples: Callable[[PoolStats], _Samples]
    labels: tuple[str, ...] = ()

    def family(self) -> _Family:
        """The metric without samples; by Prometheus' convention, what ends in `_total` is a counter."""
        make = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        return make(self.name, self.text, labels=["pool", *self.labels])


def _field(name: str) -> Callable[[PoolStats], _Samples]:
    return lambda stats: [((), getattr(stats, name))]


def _tiers(name: str) -> Callable[[PoolStats], _Samples]:
    return lambda stats: [((tier.name,), getattr(tier, name)) for tier in stats.tiers]


def _under_way(value: Callable[[list[TransferStats]], float]) -> Callable[[PoolStats], _Samples]:
    """One sample a kind, also where none is under way."""
    return lambda stats: [
        ((kind,), value([transfer for transfer in stats.under_way if transfer.kind == kind]))
        for kind in get_args(TransferKind)
    ]


_FIGURES = (
    _Figure("mmkv_capacity_bytes", "The limit of what the files take.", _field("capacity")),
    _Figure("mmkv_allocated_bytes", "What the files take.", _field("allocated")),
    _Figure("mmkv_used_bytes", "What conversations hold.", _field("used")),
    _Figure("mmkv_free_bytes", "What can be parked without dropping anything.", _field("free")),
    _Figure("mmkv_quarantined_bytes", "What transfers hold that timed out or were cancelled.", _field("quarantined")),
    _Figure("mmkv_conversations", "Parked conversations.", _field("conversations")),
    _Figure("mmkv_leases", "Leases that are held.", _field("leases")),
    _Figure("mmkv_transfers", "Transfers under way.", _field("transfers")),
    _Figure("mmkv_free_runs", "Runs of consecutive free blocks.", _field("free_runs")),
    _Figure("mmkv_largest_free_run_bytes", "The longest run of free blocks.", _field("largest_free_run")),
    _Figure("mmkv_fragmentation_ratio", "1 - longest free run / free blocks.", _field("fragmentation")),
    _Figure("mmkv_parks_total", "Parks done.", _field("parks")),
    _Figure("mmkv_takes_total", "Takes done.", _field("takes")),
    _Figure("mmkv_hits_total", "Matches that found tokens.", _field("hits")),
    _Figure("mmkv_misses_total", "Matches that found none.", _field("misses")),
    _Figure("mmkv_evictions_total", "Conversations dropped to make room.", _field("evictions")),
    _Figure("mmkv_expirations_total", "Conversations dropped because nobody used them.", _field("expirations")),
    _Figure("mmkv_failures_total", "Transfers that failed.", _field("failures")),
    _Figure("mmkv_mismatches_total", "Takes that found other bytes than were parked.", _field("mismatches")),
    _Figure("mmkv_corrupt_bytes", "Blocks and checkpoints in quarantine, whose bytes are others.", _field("corrupt")),
    _Figure("mmkv_unverified_bytes", "Blocks and checkpoints that have no checksums.", _field("unverified")),
    _Figure("mmkv_verified_bytes_total", "Bytes that takes checked.", _field("bytes_verified")),
    _Figure("mmkv_parked_bytes_total", "Bytes moved by parks.", _field("bytes_parked")),
    _Figure("mmkv_taken_bytes_total", "Bytes moved by takes.", _field("bytes_taken")),
    _Figure(
        "mmkv_moved_bytes_total",
        "Bytes moved, by the path that moved them.",
        lambda stats: (((path,), size) for path, size in stats.moved.items()),
        ("path",),
    ),
    _Figure(
        "mmkv_device_path_info",
        "1 for the path that device arrays take; posix before one was seen.",
        lambda stats: [((stats.path,), 1)],
        ("path",),
    ),
    _Figure("mmkv_tier_capacity_bytes", "The limit of what a tier's files take.", _tiers("capacity"), ("tier",)),
    _Figure("mmkv_tier_allocated_bytes", "What a tier's files take.", _tiers("allocated"), ("tier",)),
    _Figure("mmkv_tier_used_bytes", "What conversations hold of a tier.", _tiers("used"), ("tier",)),
    _Figure("mmkv_tier_dirty_bytes", "What is not at the pool's path yet.", _tiers("dirty"), ("tier",)),
    _Figure("mmkv_tier_quarantined_bytes", "What is in quarantine in a tier.", _tiers("quarantined"), ("tier",)),
    _Figure(
        "mmkv_tier_trouble",
        "1 for a tier that cannot be used or written to; stats() says why.",
        lambda stats: [((tier.name,), int(bool(tier.trouble))) for tier in stats.tiers],
        ("tier",),
    ),
    _Figure(
        "mmkv_tier_info",
        "1 for each tier: where its files lie, and on what.",
        lambda stats: [((tier.name, tier.directory, tier.medium), 1) for tier in stats.tiers],
        ("tier", "directory", "medium"),
    ),
    _Figure("mmkv_under_way", "Transfers under way, by kind.", _under_way(len), ("kind",)),
    _Figure(
        "mmkv_under_way_bytes",
        "What transfers under way have moved so far.",
        _under_way(lambda transfers: sum(transfer.bytes for transfer in transfers)),
        ("kind",),
    ),
    _Figure(
        "mmkv_under_way_longest_seconds",
        "Since when the oldest transfer is under way.",
        _under_way(lambda transfers: max((transfer.seconds for transfer in transfers), default=0.0)),
        ("kind",),
    ),
    _Figure("mmkv_spills_total", "Conversations copied from the hot tier to the path.", _field("spills")),
    _Figure("mmkv_promotions_total", "Conversations copied to the hot tier.", _field("promotions")),
    _Figure("mmkv_hot_evictions_total", "Conversations dropped from the hot tier alone.", _field("hot_evictions")),
    _Figure("mmkv_prefetches_total", "Prefetches done.", _field("prefetches")),
    _Figure("mmkv_spilled_bytes_total", "Bytes copied from the hot tier to the path.", _field("bytes_spilled")),
    _Figure("mmkv_promoted_bytes_total", "Bytes copied to the hot tier.", _field("bytes_promoted")),
)


class PoolCollector:
    """Gives a Prometheus registry the figures of pools at each scrape; holds no pool alive.

    A pool that was closed, or that nobody holds any more, has no figures. One whose catalog cannot be read has
    `mmkv_up` 0 and nothing else, and the log says why.
    """

    def __init__(self) -> None:
        self._pools: dict[str, weakref.ref[Pool]] = {}

    def add(self, pool: Pool, name: str) -> None:
        """Collect from a pool; it takes the place of an earlier one of that name."""
        self._pools[name] = weakref.ref(pool)

    def describe(self) -> Iterable[_Family]:
        """The metrics without figures, so that registering asks no pool."""
        return [_up(), *(figure.family() for figure in _FIGURES)]

    def collect(self) -> Iterable[_Family]:
        """The metrics of the open pools. Costs each pool one `stats()`."""
        up, families = _up(), [figure.family() for figure in _FIGURES]
        for name, stats in self._read():
            up.add_metric([name], stats is not None)
            if stats is not None:
                for figure, family in zip(_FIGURES, families, strict=True):
                    for labels, value in figure.samples(stats):
                        family.add_metric([name, *labels], value)
        return [family for family in (up, *families) if family.samples]

    def _read(self) -> Iterator[tuple[str, PoolStats | None]]:
        for name, reference in list(self._pools.items()):
            pool = reference()
            try:
                if pool is not None:
                    yield name, pool.stats()
            except PoolClosed:
                continue
            except MmkvError as error:
                # A scrape carries the figures of others, too.
                _log.warning("no figures of the pool at %s for Prometheus: %s", name, error)
                yield name, None


def _up() -> GaugeMetricFamily:
    return GaugeMetricFamily("mmkv_up", "Whether the pool's figures could be read.", labels=["pool"])


_collectors: WeakKeyDictionary[CollectorRegistry, PoolCollector] = WeakKeyDictionary()


def register(pool: Pool, registry: CollectorRegistry | None = None, *, name: str | None = None) -> PoolCollector:
    """Export what `pool.stats()` tells to Prometheus.

    Parameters
    ----------
    pool : Pool
        The pool, also one that is open for reading only. Nothing here keeps it alive; once it is closed, a scrape
        leaves it out.
    registry : CollectorRegistry, optional
        Where to; by default prometheus-client's own.
    name : str, optional
        The value of the label `pool`; by default the pool's path. A pool takes the place of an earlier one of the
        same name.

    Returns
    -------
    PoolCollector
        The registry's collector of pools, one for all of them; `registry.unregister` takes it out again.
    """
    if not isinstance(pool, Pool):
        raise TypeError(f"pool must be a Pool, not {pool!r}")
    registry = REGISTRY if registry is None else registry
    collector = _collectors.get(registry)
    if collector is None:
        collector = PoolCollector()
        registry.register(collector)
        _collectors[registry] = collector
    collector.add(pool, str(pool.path) if name is None else name)
    return collector
