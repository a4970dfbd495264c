"""Runs the source of a kernel on the processor, lane by lane, where there is a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILER = shutil.which("g++") or shutil.which("c++")
_HEADER = Path(__file__).with_name("lanes.hpp")


@functools.cache
def compile_for_host(source: str, name: str, parameters: str) -> Callable[..., None]:
    """A function `(blocks, threads, *arguments)` that runs a kernel; `parameters` are the types of its arguments."""
    assert COMPILER is not None
    types = [kind.strip() for kind in parameters.split(",")]
    names = ", ".join(f"a{index}" for index in range(len(types)))
    declared = ", ".join(f"{kind} a{index}" for index, kind in enumerate(types))
    runner = (
        f'extern "C" void run(unsigned blocks, unsigned threads, {declared})\n'
        f"{{ run_grid(blocks, threads, [=] {{ {name}({names}); }}); }}\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"{name}.cpp")
        path.write_text(f'#include "{_HEADER}"\n{source}\n{runner}')
        library = path.with_suffix(".so")
        subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", library, path], check=True)
        function = ctypes.CDLL(str(library)).run

    def run(blocks: int, threads: int, *arguments: Any) -> None:
        function(ctypes.c_uint(blocks), ctypes.c_uint(threads), *map(ctypes.c_uint64, map(int, arguments)))

    return run
