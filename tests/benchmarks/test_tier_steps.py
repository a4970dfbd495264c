"""A pool of three times its hot tier gives every byte of random takes, and takes no memory for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tier_steps import walk


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_random_takes_from_three_times_the_hot_tier(tmp_path: Path, ram_path: Path) -> None:
    found = walk(tmp_path / "pool", ram_path / "hot", conversations=30, tokens=2000, steps=60, seed=1)
    assert found.takes == 60
    assert found.stats.promotions > 0
    assert found.stats.hot_evictions > 0
    assert found.stats.tiers[0].allocated <= found.stats.tiers[0].capacity
    # All that is parked would be more than a hundred.
    assert found.grown_bytes < 24 << 20
