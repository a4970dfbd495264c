"""How long it takes to list a large catalog, from the shell's view."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmkv.layout import Layer, Layout, Plane

CONVERSATIONS, TOKENS = 192, 500_000


def test_list_of_192_conversations_is_mostly_the_start_of_the_interpreter(
    tmp_path: Path, make_pool: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    """Also prints the times; `pytest -s` shows them."""
    pool = make_pool(tmp_path / "large", Layout([Layer({"k": Plane("uint8", (1,))})], model="large"), 1 << 32, 62)
    blocks = pool.geometry.blocks_for(TOKENS)
    for number in range(CONVERSATIONS):
        pool.put(f"conversation-{number:03d}", TOKENS, [(number * blocks, blocks)])
    command = [sys.executable, "-m", "mmkv_inspect", "list", str(pool.path)]
    elapsed, worked, started_only = [], [], []
    for _ in range(5):
        started_only.append(_run([*command[:3], "--help"])[2])
        shown, seconds, of_processor = _run(command)
        elapsed.append(seconds)
        worked.append(of_processor)
    assert shown.splitlines()[-1] == f"192 conversations, {CONVERSATIONS * TOKENS:,} tokens"
    print(
        f"\nmmkv-inspect list, {CONVERSATIONS} conversations x {TOKENS:,} tokens "
        f"({blocks} blocks of {pool.geometry.block_tokens}), 5 runs: "
        f"median {statistics.median(elapsed):.3f} s, {min(elapsed):.3f} to {max(elapsed):.3f} s; "
        f"of the processor {statistics.median(worked):.3f} s, {min(worked):.3f} to {max(worked):.3f} s"
    )
    record_property("median_seconds", round(statistics.median(elapsed), 3))
    # Side by side, so that what other processes on the machine take counts on both sides.
    assert min(worked) < 4 * min(started_only)


def _run(command: list[str]) -> tuple[str, float, float]:
    """What a command prints, and the seconds that it took, and those of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return shown, elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
