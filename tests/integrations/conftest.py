"""Fixtures of the tests of integrations."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def pool_in_ram(ram_path: Path) -> Path:
    """A directory for a pool, on tmpfs."""
    return ram_path / "pool"
