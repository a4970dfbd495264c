"""What Prometheus scrapes of a pool."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path

import pytest

import mmkv
from mmkv import metrics
from mmkv.errors import PoolCorrupt
from mmkv.info import PoolStats

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402 - it may be missing

LAYOUT = mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (64,))})] * 2, model="test/metrics")


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry(auto_describe=True)


@pytest.fixture
def pool(tmp_path: Path) -> mmkv.Pool:
    with mmkv.Pool.open(tmp_path / "pool", LAYOUT, capacity="16MiB") as pool:
        yield pool


def scrape(registry: prometheus_client.CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a scrape by name and labels, as a Prometheus server reads them."""
    text = prometheus_client.generate_latest(registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    assert text.count("# TYPE ") == len({line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")})
    return samples


def one(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_a_scrape_tells_what_the_pool_does(pool: mmkv.Pool, registry: prometheus_client.CollectorRegistry) -> None:
    metrics.register(pool, registry)
    slot = mmkv.Slot.allocate(LAYOUT, 2000)
    pool.park("a", slot, range(2000)).result()
    pool.take("a", slot).result()
    with pool.match([1]) as match:
        assert match.tokens == 0
    samples, stats, path = scrape(registry), pool.stats(), str(pool.path)
    assert one(samples, "mmkv_up", pool=path) == 1
    assert one(samples, "mmkv_capacity_bytes", pool=path) == 16 << 20
    assert one(samples, "mmkv_used_bytes", pool=path) == stats.used > 0
    assert one(samples, "mmkv_parks_total", pool=path) == one(samples, "mmkv_takes_total", pool=path) == 1
    assert one(samples, "mmkv_misses_total", pool=path) == 1
    assert one(samples, "mmkv_taken_bytes_total", pool=path) == 2000 * LAYOUT.token_bytes
    assert stats.moved
    for way, size in stats.moved.items():
        assert one(samples, "mmkv_moved_bytes_total", pool=path, path=way) == size
    assert one(samples, "mmkv_device_path_info", pool=path, path=stats.path) == 1


def test_tiers_and_what_is_under_way(
    pool: mmkv.Pool, registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.register(pool, registry, name="x")
    samples = scrape(registry)
    assert one(samples, "mmkv_tier_capacity_bytes", pool="x", tier="path") == 16 << 20
    assert one(samples, "mmkv_under_way", pool="x", kind="park") == 0
    sizes = {"capacity": 100, "allocated": 80, "used": 50, "dirty": 20, "quarantined": 5}
    hot = mmkv.TierStats("hot", "/dev/shm/hot", "tmpfs", **sizes, trouble="it is gone")
    takes = tuple(mmkv.TransferStats("take of 'a'", "take", 4, 1, 1000 * n, float(n)) for n in (1, 2))
    stats = replace(pool.stats(), tiers=(hot, *pool.stats().tiers), under_way=takes, spills=3, bytes_spilled=9)
    monkeypatch.setattr(pool, "stats", lambda: stats)
    samples = scrape(registry)
    assert one(samples, "mmkv_tier_dirty_bytes", pool="x", tier="hot") == 20
    assert one(samples, "mmkv_tier_info", pool="x", tier="hot", directory="/dev/shm/hot", medium="tmpfs") == 1
    assert one(samples, "mmkv_tier_trouble", pool="x", tier="hot") == 1
    assert one(samples, "mmkv_tier_trouble", pool="x", tier="path") == 0
    assert one(samples, "mmkv_under_way", pool="x", kind="take") == 2
    assert one(samples, "mmkv_under_way_bytes", pool="x", kind="take") == 3000
    assert one(samples, "mmkv_under_way_longest_seconds", pool="x", kind="take") == 2
    assert one(samples, "mmkv_spills_total", pool="x") == 3
    assert one(samples, "mmkv_spilled_bytes_total", pool="x") == 9


def test_names_follow_the_conventions() -> None:
    for figure in metrics._FIGURES:
        family = figure.family()
        assert figure.name.startswith("mmkv_")
        assert (family.type == "counter") == figure.name.endswith("_total")
        assert figure.text.endswith(".")


def test_every_field_of_the_figures_is_exported() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def __getattr__(self, name: str) -> object:
            self.seen.add(name)
            return {"moved": {}, "tiers": (), "under_way": ()}.get(name, 0)

    recorder = Recorder()
    for figure in metrics._FIGURES:
        list(figure.samples(recorder))
    assert recorder.seen == {field.name for field in fields(PoolStats)}


def test_several_pools_share_a_registry(
    pool: mmkv.Pool, registry: prometheus_client.CollectorRegistry, tmp_path: Path
) -> None:
    collector = metrics.register(pool, registry, name="one")
    with mmkv.Pool.open(tmp_path / "other", LAYOUT, capacity="32MiB") as other:
        assert metrics.register(other, registry, name="two") is collector
        samples = scrape(registry)
        assert one(samples, "mmkv_capacity_bytes", pool="one") == 16 << 20
        assert one(samples, "mmkv_capacity_bytes", pool="two") == 32 << 20
    assert {dict(labels)["pool"] for _, labels in scrape(registry)} == {"one"}


def test_a_closed_pool_yields_nothing(pool: mmkv.Pool, registry: prometheus_client.CollectorRegistry) -> None:
    metrics.register(pool, registry)
    pool.close()
    assert scrape(registry) == {}
    with mmkv.Pool.open(pool.path) as again:
        metrics.register(again, registry)
        assert one(scrape(registry), "mmkv_up", pool=str(pool.path)) == 1


def test_nothing_holds_the_pool(registry: prometheus_client.CollectorRegistry, tmp_path: Path) -> None:
    pool = mmkv.Pool.open(tmp_path / "pool", LAYOUT, capacity="16MiB")
    metrics.register(pool, registry)
    pool.close()
    reference = weakref.ref(pool)
    del pool
    gc.collect()
    assert reference() is None
    assert scrape(registry) == {}


def test_a_pool_that_cannot_be_read_is_down(
    pool: mmkv.Pool,
    registry: prometheus_client.CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def damaged() -> PoolStats:
        raise PoolCorrupt("the catalog is damaged")

    metrics.register(pool, registry, name="x")
    monkeypatch.setattr(pool, "stats", damaged)
    assert scrape(registry) == {("mmkv_up", (("pool", "x"),)): 0}
    assert "the catalog is damaged" in caplog.text


def test_only_a_pool_is_registered(registry: prometheus_client.CollectorRegistry) -> None:
    with pytest.raises(TypeError, match="'/mnt/kv'"):
        metrics.register("/mnt/kv", registry)


def test_without_prometheus_client_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; import mmkv\n"
        "assert 'mmkv.metrics' not in sys.modules\n"
        "import mmkv.metrics"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1].endswith("pip install 'mmkv[metrics]'")
