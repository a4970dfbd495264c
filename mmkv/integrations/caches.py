"""Transformers' static caches as slots: the layout of a model, the cache's own memory as planes and states.

A static cache keeps (batch, heads, tokens, head_dim), so that a head's rows are in one piece: each is a plane of its
own, `k0`, `k1`, ..., `v0`, ... A sliding window is rolled as tokens come, so it is a state, with its cursor; the states
of a convolution or a recurrence are states.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import mmkv
from mmkv.integrations.fingerprint import model_string
from mmkv.integrations.streaming import decoder_layers, device_of
from mmkv.sizes import as_count

__all__ = ["cache_argument", "layout_of", "new_cache", "require_model", "seek", "slot_of"]

# The caches that are understood, by the names of the classes that Transformers gives its layers.
_FULL = {"DynamicLayer", "StaticLayer"}
_WINDOW = {"DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"}
_LINEAR = {"LinearAttentionLayer"}
_LINEAR_AND_FULL = {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"}
_LINEAR_AND_WINDOW = {
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}
_NOTHING = {"DummyLayer"}
_KNOWN = _FULL | _WINDOW | _LINEAR | _LINEAR_AND_FULL | _LINEAR_AND_WINDOW | _NOTHING


def layout_of(model: Any, *, name: str | None = None, revision: str | None = None) -> mmkv.Layout:
    """The layout of a model's cache.

    Costs one token through the model: what it leaves in a cache says what each layer keeps.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that generates, on any devices.
    name, revision : str, optional
        What to call it in the layout's `model`; by default as it was loaded. See `model_string`.

    Raises
    ------
    ValueError
        A layer keeps its cache in a way that has no planes and states; the text names it.
    TypeError
        It is no model.
    """
    require_model(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder, whose cache no token ids stand for: use a decoder")
    cache = transformers.DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=device_of(model.get_input_embeddings()))
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    layers = [_layer_of(index, layer) for index, layer in enumerate(cache.layers)]
    return mmkv.Layout(layers, model=model_string(model, name, revision))


def new_cache(model: Any, layout: mmkv.Layout, max_tokens: int) -> transformers.StaticCache:
    """An empty static cache whose memory is there, each layer's on the device that computes it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    layout : Layout
        Its layout.
    max_tokens : int
        How many tokens it holds; where the model has windows, at least the widest one's.
    """
    require_model(model)
    tokens = as_count(max_tokens, "max_tokens", least=1)
    windows = [layer.state["k"].shape[1] for layer in layout.layers if "k" in layer.state]
    cache = transformers.StaticCache(config=model.config, max_cache_len=max(tokens, *windows, 1))
    modules = decoder_layers(model, len(layout.layers))
    for layer, module, spec in zip(cache.layers, modules, layout.layers, strict=True):
        _give_memory(layer, spec, device_of(module))
    return cache


def slot_of(cache: transformers.Cache, layout: mmkv.Layout) -> mmkv.Slot:
    """The slot of a static cache: views of its own memory, no copy.

    The cursors of the layers are the cache's own business, which `seek` sets.

    Parameters
    ----------
    cache : transformers.StaticCache
        A cache for one conversation whose memory is there: made by `new_cache`, or run once.
    layout : Layout
        The layout of its model.

    Raises
    ------
    ValueError, TypeError
        The cache is not what the layout says; the text names the layer and the plane.
    """
    planes, states = [], []
    for index, layer in enumerate(cache.layers):
        _require_static(index, layer)
        planes.append(_planes_of(layer))
        states.append(_states_of(layer))
    return mmkv.Slot(layout, planes, states)


def seek(cache: transformers.Cache, tokens: int) -> None:
    """Let the cache count so many tokens, whose rows and states are there or on their way.

    With 0 the cache is an empty one: states are cleared, and rows are overwritten before they are read.
    """
    count = as_count(tokens, "tokens", least=0)
    with torch.inference_mode():
        for index, layer in enumerate(cache.layers):
            _require_static(index, layer)
            for state in _states_of(layer).values() if count == 0 else ():
                state.zero_()
            if isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.cumulative_length.fill_(count)
                if hasattr(layer, "cumulative_length_int"):
                    layer.cumulative_length_int = count
            for number in getattr(layer, "has_previous_state", ()):
                layer.has_previous_state[number] = count > 0


def require_model(model: object) -> None:
    """Raise a `TypeError` unless a model of Transformers is what was given."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            "model must be a model of Transformers, such as AutoModelForCausalLM.from_pretrained(...) gives, not "
            f"{reprlib.repr(model)}"
        )


def cache_argument(model: Any) -> str:
    """What a model's `forward` calls its cache: `cache`, or `past_key_values` in older releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# --- what a layer keeps ---------------------------------------------------------------------------------------------


def _layer_of(index: int, layer: Any) -> mmkv.Layer:
    """What a layer of a dynamic cache, through which a token went, keeps."""
    kind = _kind_of(index, layer)
    planes: dict[str, mmkv.Plane] = {}
    state: dict[str, mmkv.State] = {}
    if kind in _LINEAR | _LINEAR_AND_FULL | _LINEAR_AND_WINDOW:
        state |= {name: mmkv.State(_dtype(array), tuple(array.shape)) for name, array in _linear_states(layer).items()}
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return mmkv.Layer(planes, state)
    if kind in _FULL | _LINEAR_AND_FULL:
        for name, array in (("k", keys), ("v", values)):
            rows = mmkv.Plane(_dtype(array), (array.shape[-1],))
            planes |= {f"{name}{head}": rows for head in range(array.shape[1])}
    else:
        for name, array in (("k", keys), ("v", values)):
            shape = (array.shape[1], layer.sliding_window, array.shape[-1])
            state[name] = mmkv.State(_dtype(array), shape)
        state["cursor"] = mmkv.State("int64", ())
    return mmkv.Layer(planes, state)


def _planes_of(layer: Any) -> dict[str, torch.Tensor]:
    if type(layer).__name__ not in _FULL | _LINEAR_AND_FULL or layer.keys is None:
        return {}
    return {
        f"{name}{head}": rows
        for name, array in (("k", layer.keys), ("v", layer.values))
        for head, rows in enumerate(array[0])
    }


def _states_of(layer: Any) -> dict[str, torch.Tensor]:
    kind = type(layer).__name__
    states: dict[str, torch.Tensor] = {}
    if kind in _LINEAR | _LINEAR_AND_FULL | _LINEAR_AND_WINDOW:
        states |= _linear_states(layer)
    if kind in _WINDOW | _LINEAR_AND_WINDOW and layer.keys is not None:
        states |= {"k": layer.keys[0], "v": layer.values[0], "cursor": layer.cumulative_length}
    return states


def _linear_states(layer: Any) -> dict[str, torch.Tensor]:
    named = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {
        f"{name}{number}": array[0]
        for name, arrays in named
        for number, array in arrays.items()
        if array is not None
    }  # fmt: skip


def _give_memory(layer: Any, spec: mmkv.Layer, device: torch.device) -> None:
    """Make the arrays of a static cache's layer that has none yet."""
    for name, state in spec.state.items():
        for kind in ("conv", "recurrent"):
            if name.startswith(kind):
                empty = _zeros((1, *state.shape), state.dtype, device)
                layer.lazy_initialization(**{f"{kind}_states": empty}, state_idx=int(name.removeprefix(kind)))
    nothing = []
    for name in ("k", "v"):
        if name in spec.state:
            heads, _, size = spec.state[name].shape
            nothing.append(_zeros((1, heads, 0, size), spec.state[name].dtype, device))
        elif f"{name}0" in spec.planes:
            heads = sum(plane.startswith(name) for plane in spec.planes)
            plane = spec.planes[f"{name}0"]
            nothing.append(_zeros((1, heads, 0, *plane.shape), plane.dtype, device))
    if nothing:
        layer.lazy_initialization(*nothing)


def _zeros(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)


def _dtype(array: torch.Tensor) -> str:
    return str(array.dtype).removeprefix("torch.")


def _kind_of(index: int, layer: Any) -> str:
    kind = type(layer).__name__
    if kind not in _KNOWN:
        raise ValueError(f"layer {index} keeps its cache in a {kind}, of which mmkv knows neither planes nor states")
    return kind


def _require_static(index: int, layer: Any) -> None:
    kind = _kind_of(index, layer)
    if kind.startswith("Dynamic") or kind in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    ):
        raise ValueError(f"layer {index} of the cache is a {kind}, whose memory moves as it grows: use a StaticCache")
    keys = getattr(layer, "keys", None)
    if keys is not None and keys.shape[0] != 1:
        raise ValueError(f"layer {index} of the cache holds a batch of {keys.shape[0]}: a slot is one conversation")
