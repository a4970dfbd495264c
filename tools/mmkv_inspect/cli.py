"""How mmkv-inspect starts and ends."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run mmkv-inspect with the process's arguments; ends the process with its exit code."""
    # What imports make stays: not to look through it for garbage saves a tenth of a command's time.
    gc.disable()
    # Typer's Pydantic would look through every installed package for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from mmkv.errors import MmkvError
    from mmkv_inspect.care import app
    from mmkv_inspect.text import complain

    gc.freeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal of another encoding, or an argument that was no text, must not end in a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="mmkv-inspect")
    except MmkvError as error:
        complain(str(error))
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    sys.exit(1)
