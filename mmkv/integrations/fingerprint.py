"""A model of Transformers in one string: all that its KV cache depends on besides the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["model_string"]

# What a configuration says that no row of a cache depends on.
_NOISE = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Elements of each parameter that are looked at.
_SAMPLE = 64


def model_string(model: Any, name: str | None = None, revision: str | None = None) -> str:
    """The `model` of a layout: equal for models whose caches can stand for each other.

    Holds the name, the revision, the type of the weights, the attention that is used, the rope settings, a digest of
    the whole configuration and one of a sample of the weights, so that neither another scaling nor a model that was
    trained further goes for the same. A digest costs one pass over the names of the parameters and a few bytes of
    each.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    name : str, optional
        Its name; by default the one that it was loaded by, of a directory the last part.
    revision : str, optional
        Its revision; by default the commit that it was loaded from.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    settings = {key: value for key, value in text.to_dict().items() if key not in _NOISE and value is not None}
    loaded = str(getattr(config, "_name_or_path", "") or "")
    if loaded and Path(loaded).is_dir():
        loaded = Path(loaded).name
    rope = {key: value for key, value in settings.items() if "rope" in key or "rotary" in key}
    described = {
        "name": (name if name is not None else loaded) or type(model).__name__,
        "revision": revision if revision is not None else getattr(config, "_commit_hash", None),
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(text, "_attn_implementation", None),
        "rope": rope,
        "config": _digest(_canonical(settings).encode()),
        "weights": _weights_digest(model),
    }
    return _canonical(described)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _weights_digest(model: torch.nn.Module) -> str:
    """A digest of every parameter's name, shape and first elements, the same whatever devices they lie on."""
    parameters = sorted(_parameters(model), key=lambda named: named[0])
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in parameters:
        if parameter.device.type != "meta":
            sample = parameter.detach().flatten()[:_SAMPLE].view(torch.uint8)
            by_device.setdefault(parameter.device, []).append((name, sample))
    found: dict[str, bytes] = {}
    for samples in by_device.values():
        # Joined first: one copy to the host, not one a parameter.
        joined = torch.cat([sample for _, sample in samples]).cpu().numpy().tobytes()
        start = 0
        for name, sample in samples:
            found[name] = joined[start : start + sample.numel()]
            start += sample.numel()
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode() + found.get(name, b""))
    return digest.hexdigest()[:16]


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by its name; one that Accelerate keeps elsewhere, from there."""
    for path, module in model.named_modules(remove_duplicate=False):
        kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            known = parameter if kept is None or parameter.device.type != "meta" else kept[name]
            yield f"{path}.{name}", known
