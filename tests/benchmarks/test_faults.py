"""The table of operations and faults, for those that do most."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, OPERATIONS, outcome


@pytest.mark.parametrize("tiers", [False, True], ids=["disk", "two tiers"])
@pytest.mark.parametrize("operation", ["park, grown", "take, checked", "swap"])
def test_whatever_fails_everything_is_whole(tmp_path: Path, ram_path: Path, operation: str, tiers: bool) -> None:
    met = 0
    for number, fault in enumerate(FAULTS):
        (tmp_path / str(number)).mkdir()
        (ram_path / str(number)).mkdir()
        said, whole = outcome(operation, fault, tmp_path / str(number), ram_path / str(number) if tiers else None)
        assert whole
        met += said != "-"
    assert met >= 3
    assert set(OPERATIONS) >= {"fork", "drop", "flush", "close, open"}
