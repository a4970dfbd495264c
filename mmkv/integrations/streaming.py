"""Layer after layer: a model computes its first layers while the later ones' bytes are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import mmkv

__all__ = ["by_layer", "decoder_layers", "device_of", "streams_of"]


def decoder_layers(model: Any, count: int) -> list[torch.nn.Module]:
    """The modules that compute the layers of a model's cache, in their order.

    Raises
    ------
    ValueError
        The decoder has no list of so many layers.
    """
    decoder = model.get_decoder()
    for module in (decoder if isinstance(decoder, torch.nn.Module) else model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers, one for each layer of its cache")


def device_of(module: torch.nn.Module) -> torch.device:
    """The device that a module computes on, also where Accelerate keeps its weights elsewhere."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return _indexed(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    first = next(module.parameters(), None)
    if first is None or first.device.type == "meta":
        raise ValueError(f"{type(module).__name__} has no weights in memory, so that it computes on no known device")
    return _indexed(first.device)


def _indexed(device: torch.device) -> torch.device:
    plain = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if plain else device


def streams_of(slot: mmkv.Slot) -> dict[int, Any] | None:
    """The stream that computes on each device of a slot, as `park` and `take` want them."""
    return {device: torch.cuda.current_stream(device) for device in slot.memory.devices} or None


@contextmanager
def by_layer(
    model: Any, take: mmkv.Transfer, layers: int, *, note: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Let each decoder layer wait for its own part of a take, and for no other.

    On a GPU it is the layer's stream that waits, not the host.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model; hooks are put on its layers and removed at the end.
    take : Transfer
        The take, which may be under way.
    layers : int
        How many layers the cache has.
    note : callable, optional
        Called with a layer's number when its wait was passed on.

    Raises
    ------
    MmkvError
        From the model's `forward`: the take failed.
    """

    def wait(index: int, device: torch.device, *_: Any) -> None:
        take.wait(index, torch.cuda.current_stream(device) if device.type == "cuda" else None)
        if note is not None:
            note(index)

    handles = [
        module.register_forward_pre_hook(partial(wait, index, device_of(module)))
        for index, module in enumerate(decoder_layers(model, layers))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
