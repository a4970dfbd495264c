"""The soak, for some seconds: `make soak` goes on for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soaking import Soak


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [False, True], ids=["ram", "two tiers"])
def test_everything_at_once(tmp_path: Path, ram_path: Path, tiers: bool) -> None:
    soak = Soak(tmp_path / "pool" if tiers else ram_path / "pool", ram_path / "hot" if tiers else None, "cpu", seed=3)
    soak.run(2.5, kill=True)
    soak.run(2.5, kill=False)
    assert soak.wrong == []
    assert soak.kills == 1
    assert soak.operations["park"] > 0
    assert soak.operations["take"] + soak.operations["match"] > 0
    assert soak.bytes > 0


def test_a_wrong_byte_is_told(ram_path: Path) -> None:
    soak = Soak(ram_path / "pool", None, "cpu", seed=3)
    soak.run(1.5, kill=False)
    # What every conversation was parked as is forgotten: nothing that is there can be right.
    found = {conversation: {99} for conversation in soak.versions}
    assert found
    soak.versions = found
    soak.run(1.0, kill=False)
    assert soak.wrong
