"""How long it takes to list a large catalog, from the shell's view."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmkv.layout import Layer, Layout, Plane

CONVERSATIONS, TOKENS = 192, 500_000


def test_list_of_192_conversations_takes_less_than_a_second(
    tmp_path: Path, make_pool: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    """Also prints the times; `pytest -s` shows them."""
    pool = make_pool(tmp_path / "large", Layout([Layer({"k": Plane("uint8", (1,))})], model="large"), 1 << 32, 62)
    blocks = pool.geometry.blocks_for(TOKENS)
    for number in range(CONVERSATIONS):
        pool.put(f"conversation-{number:03d}", TOKENS, [(number * blocks, blocks)])
    command = [sys.executable, "-m", "mmkv_inspect", "list", str(pool.path)]
    seconds: list[float] = []
    # Five runs; more only while other work on the machine slows all of them down.
    while len(seconds) < 5 or (min(seconds) >= 1 and len(seconds) < 20):
        started = time.perf_counter()
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        seconds.append(time.perf_counter() - started)
    assert shown.splitlines()[-1] == f"192 conversations, {CONVERSATIONS * TOKENS:,} tokens"
    print(f"\nmmkv-inspect list, {CONVERSATIONS} conversations x {TOKENS:,} tokens ({blocks} blocks of "
          f"{pool.geometry.block_tokens}): median {statistics.median(seconds):.3f} s, "
          f"{min(seconds):.3f} to {max(seconds):.3f} s")  # fmt: skip
    record_property("median_seconds", round(statistics.median(seconds), 3))
    assert min(seconds) < 1
