"""What importing mmkv brings along."""

from __future__ import annotations

import subprocess
import sys


def test_mmkv_by_itself_needs_neither_torch_nor_transformers() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "cupy", "accelerate")))
import mmkv, mmkv.integrations
mmkv.Slot.allocate(mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("bfloat16", (2,))})], model="m"), 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
