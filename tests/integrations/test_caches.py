"""Layouts and slots of Transformers' caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import mmkv
from mmkv.integrations.transformers import (
    by_layer,
    cache_argument,
    decoder_layers,
    layout_of,
    model_string,
    new_cache,
    seek,
    slot_of,
    streams_of,
)
from tests.integrations.models import MODELS, llama, make_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


def run(model: Any, cache: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([ids], device=model.device), **{cache_argument(model): cache}).logits[0, -1]


def test_every_head_is_a_plane_of_its_own() -> None:
    layout = layout_of(make_model("llama", "bfloat16"))
    assert len(layout.layers) == 3
    # Four heads ask, two are kept.
    rows = mmkv.Plane("bfloat16", (16,))
    assert dict(layout.layers[0].planes) == {"k0": rows, "k1": rows, "v0": rows, "v1": rows}
    assert layout.token_bytes == 3 * 2 * 2 * 16 * 2
    assert layout.state_bytes == 0


def test_windows_are_states_with_their_cursor() -> None:
    first, _, third, _ = layout_of(make_model("gemma_windows")).layers
    window = mmkv.State("float32", (2, 24, 16))
    assert dict(first.state) == {"k": window, "v": window, "cursor": mmkv.State("int64", ())}
    assert not first.planes
    assert not third.state
    assert len(third.planes) == 4


def test_hybrids_have_states_where_they_recur_and_planes_where_they_attend() -> None:
    *recurring, attending = layout_of(make_model("qwen_hybrid", "bfloat16")).layers
    for layer in recurring:
        assert not layer.planes
        assert layer.state["conv0"] == mmkv.State("bfloat16", (128, 4))
        assert layer.state["recurrent0"].shape == (4, 16, 16)
    assert set(attending.planes) == {"k0", "k1", "v0", "v1"}
    both = layout_of(make_model("falcon_hybrid")).layers[0]
    assert set(both.planes) == {"k0", "k1", "v0", "v1"}
    assert set(both.state) == {"conv0", "recurrent0"}
    convolutions = layout_of(make_model("lfm_convolutions")).layers
    assert [set(layer.state) for layer in convolutions] == [{"conv0"}, set(), {"conv0"}]


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_is_the_caches_own_memory(name: str) -> None:
    model = make_model(name)
    layout = layout_of(model)
    cache = new_cache(model, layout, 64)
    before = slot_of(cache, layout)
    run(model, cache, list(range(40)))
    run(model, cache, [40])
    run(model, cache, [41, 42, 43])
    after = slot_of(cache, layout)
    for kind in ("planes", "states"):
        for mine, theirs in zip(getattr(before.memory, kind), getattr(after.memory, kind), strict=True):
            assert {name: buffer.address for name, buffer in mine.items()} == {
                name: buffer.address for name, buffer in theirs.items()
            }
    assert before.max_tokens in (64, None)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_new_cache_computes_what_a_fresh_one_does(name: str) -> None:
    model = make_model(name)
    cache = new_cache(model, layout_of(model), 64)
    for ids in (list(range(30)), list(range(3)), list(range(60))):
        fresh = transformers.StaticCache(config=model.config, max_cache_len=64)
        # What an earlier conversation left behind makes no difference.
        seek(cache, 0)
        assert torch.equal(run(model, cache, ids), run(model, fresh, ids))
        assert torch.equal(run(model, cache, [7]), run(model, fresh, [7]))


def test_a_cache_that_was_run_once_is_a_slot_too() -> None:
    model = make_model("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    layout = layout_of(model)
    with pytest.raises(ValueError, match="layer 0, plane 'k0': its array is missing"):
        slot_of(cache, layout)
    run(model, cache, [1, 2, 3])
    assert slot_of(cache, layout).max_tokens == 32


def test_caches_that_are_no_slots_are_refused() -> None:
    model = make_model("llama")
    layout = layout_of(model)
    with pytest.raises(ValueError, match=r"layer 0 of the cache is a DynamicLayer.*use a StaticCache"):
        slot_of(transformers.DynamicCache(config=model.config), layout)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 0 of the cache holds a batch of 2"):
        slot_of(cache, layout)
    other = transformers.StaticCache(config=model.config, max_cache_len=32)
    other.early_initialization(1, 2, 16, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 0, plane 'k0': the array is of bfloat16, not of float32"):
        slot_of(other, layout)
    with pytest.raises(ValueError, match="tokens"):
        seek(cache, -1)


def test_a_window_that_is_wider_than_the_slot_is_kept_whole() -> None:
    model = make_model("gemma_windows")
    layout = layout_of(model)
    assert slot_of(new_cache(model, layout, 10), layout).max_tokens == 24


class Strange:
    """A layer's cache that nobody knows."""


def test_a_cache_of_an_unknown_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    forward = type(model).forward

    def strange(self: Any, *arguments: Any, **keywords: Any) -> Any:
        outputs = forward(self, *arguments, **keywords)
        keywords[cache_argument(model)].layers[1] = Strange()
        return outputs

    strange.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", strange)
    with pytest.raises(ValueError, match="layer 1 keeps its cache in a Strange, of which"):
        layout_of(model)


def test_an_encoder_is_refused() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        layout_of(transformers.T5ForConditionalGeneration(config).eval())


def test_the_model_string_changes_with_all_that_rows_depend_on() -> None:
    model = make_model("llama")
    first = model_string(model)
    assert model_string(make_model("llama")) == first
    assert '"name":"LlamaForCausalLM"' in first
    others = [
        model_string(model, name="a model"),
        model_string(model, revision="main"),
        model_string(make_model("llama", "bfloat16")),
        model_string(llama(attn_implementation="eager")),
        model_string(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        model_string(llama(rms_norm_eps=1e-3)),
        model_string(llama()),
    ]
    assert len({first, *others}) == len(others) + 1
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 3] += 1
    assert model_string(model) != first


def test_a_directory_counts_by_its_name(tmp_path: Path) -> None:
    model = llama()
    found = []
    for place in ("here", "there"):
        (tmp_path / place / "my-model").mkdir(parents=True)
        model.config._name_or_path = str(tmp_path / place / "my-model")
        found.append(model_string(model))
    assert found[0] == found[1]
    assert '"name":"my-model"' in found[0]


def test_a_pool_of_another_model_is_refused(tmp_path: Path) -> None:
    mmkv.Pool.open(tmp_path / "pool", layout_of(make_model("llama")), capacity="64MiB").close()
    with pytest.raises(mmkv.LayoutMismatch, match="bfloat16"):
        mmkv.Pool.open(tmp_path / "pool", layout_of(make_model("llama", "bfloat16")))


def test_each_layer_waits_for_its_own_part(tmp_path: Path) -> None:
    model = make_model("gemma_windows")
    layout = layout_of(model)
    cache = new_cache(model, layout, 64)
    slot = slot_of(cache, layout)
    events: list[tuple[str, int]] = []

    class Take(mmkv.Transfer):
        def __init__(self) -> None:
            pass

        def wait(self, layer: int, stream: Any = None) -> None:
            assert stream is None
            events.append(("wait", layer))

    handles = [
        layer.register_forward_hook(lambda *_, index=index: events.append(("computed", index)))
        for index, layer in enumerate(decoder_layers(model, 4))
    ]
    noted: list[int] = []
    with by_layer(model, Take(), 4, note=noted.append):
        run(model, cache, [1, 2, 3])
    assert events == [(what, layer) for layer in range(4) for what in ("wait", "computed")]
    assert noted == [0, 1, 2, 3]
    # Nothing is left behind.
    events.clear()
    run(model, cache, [4])
    assert [what for what, _ in events] == ["computed"] * 4
    for handle in handles:
        handle.remove()
    assert slot.max_tokens == 64


def test_on_a_device_the_layers_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    devices = dict(zip(decoder_layers(model, 3), ("cuda:0", "cuda:0", "cuda:1"), strict=True))
    monkeypatch.setattr("mmkv.integrations.streaming.device_of", lambda module: torch.device(devices[module]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    waited: list[tuple[int, Any]] = []

    class Take(mmkv.Transfer):
        def __init__(self) -> None:
            pass

        def wait(self, layer: int, stream: Any = None) -> None:
            waited.append((layer, stream))

    with by_layer(model, Take(), 3):
        run(model, new_cache_on_host(model), [1, 2, 3])
    assert waited == [(0, "stream of cuda:0"), (1, "stream of cuda:0"), (2, "stream of cuda:1")]


def new_cache_on_host(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16)


def test_a_decoder_without_such_layers_is_named() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of 9 decoder layers"):
        decoder_layers(make_model("llama"), 9)


def test_weights_that_are_kept_elsewhere_count_as_well(ram_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model("llama")
    layout = layout_of(model)
    offloaded = accelerate.cpu_offload(make_model("llama"), torch.device("cpu"))
    assert next(offloaded.parameters()).device.type == "meta"
    assert layout_of(offloaded) == layout
    cache = new_cache(offloaded, layout, 64)
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        found = offloaded(ids, **{cache_argument(offloaded): cache}).logits[0, -1]
    assert torch.equal(found, run(model, new_cache(model, layout, 64), [1, 2, 3]))


@pytest.mark.gpu
def test_layers_may_lie_on_several_devices(ram_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    last = torch.cuda.device_count() - 1
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": last, "lm_head": last}
    places |= {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": last}
    model = accelerate.dispatch_model(make_model("llama"), places, main_device=0, force_hooks=True)
    layout = layout_of(model)
    assert layout == layout_of(make_model("llama"))
    cache = new_cache(model, layout, 64)
    ids = torch.arange(20)[None].to(0)

    def compute(cache: Any, ids: Any) -> Any:
        with torch.inference_mode():
            return model(ids, **{cache_argument(model): cache}).logits[0, -1]

    expected = compute(cache, ids)
    slot = slot_of(cache, layout)
    with mmkv.Pool.open(ram_path / "pool", layout, capacity="64MiB") as pool:
        pool.park("chat", slot, list(range(19)), stream=streams_of(slot)).result()
        again = new_cache(model, layout, 64)
        seek(again, 19)
        other = slot_of(again, layout)
        take = pool.take("chat", other, stream=streams_of(other))
        with by_layer(model, take, 3):
            found = compute(again, ids[:, 19:])
        take.result()
    assert torch.allclose(found, expected, atol=1e-3)
