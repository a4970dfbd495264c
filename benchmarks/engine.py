"""A model of Transformers as an engine that a benchmark measures: its forward, and an attention over what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import mmkv
from benchmarks import smollm2
from mmkv.integrations.transformers import cache_argument, layout_of

__all__ = ["MODELS", "Engine", "load_engine"]

_SHAPES = {
    # SmolLM3-3B's: a context of 64k tokens, four heads are kept.
    "random-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128256,
    },
    # Llama-3.2-1B's.
    "random-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    },
    "random-tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096,
    },
}  # fmt: skip
MODELS = ("smollm2", "random", *_SHAPES)
_ATTENTION = "filled_rows"


class FilledRows:
    """Attention over the rows of a static cache that are filled, each token up to itself: no mask, no copy of heads.

    Transformers' own lets a static cache's every row take part, behind a mask, for which heads are repeated and fused
    kernels are out of the question.
    """

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """As Transformers calls it; the mask is not used."""
        key, value = key[:, :, : self.tokens], value[:, :, : self.tokens]
        new = query.shape[2]
        bias = causal_lower_right(new, self.tokens) if 1 < new < self.tokens else None
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=1 < new == self.tokens, scale=scaling, enable_gqa=True
        )  # fmt: skip
        return found.transpose(1, 2).contiguous(), None


class Engine:
    """A model, and the ways to let tokens go through it."""

    def __init__(self, name: str, model: Any, attention: FilledRows | None, chunk_tokens: int) -> None:
        self.name = name
        self.model = model
        self.layout: mmkv.Layout = layout_of(model)
        self.device: torch.device = model.device
        self.chunk_tokens = chunk_tokens
        self._attention = attention
        self._cache_argument = cache_argument(model)

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def attention(self) -> str:
        """Which attention is used."""
        return str(self.model.config.get_text_config(decoder=True)._attn_implementation)

    def synchronize(self) -> None:
        """Wait until all that was started on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random_ids(self, count: int) -> list[int]:
        """Tokens that nobody said."""
        seeded = torch.Generator().manual_seed(count)
        return torch.randint(0, self.vocabulary, (count,), generator=seeded).tolist()  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def read(self, cache: Any, ids: Sequence[int], start: int) -> int:
        """Let tokens go through the model behind the `start` that the cache holds; the likeliest one after them."""
        for at in range(0, len(ids), self.chunk_tokens):
            part = ids[at : at + self.chunk_tokens]
            if self._attention is not None:
                self._attention.tokens = start + at + len(part)
            with torch.inference_mode():
                tokens = torch.tensor([part], device=self.device)
                outputs = self.model(
                    input_ids=tokens, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
                )  # fmt: skip
        return int(outputs.logits[0, -1].argmax())


def load_engine(name: str, device: str, unpacked: Path) -> Engine:
    """A model by one of the names of `MODELS`; `unpacked` is where SmolLM2 is unpacked to."""
    on_cpu = device == "cpu"
    # Half the tokens at once on a CPU: a chunk's time there grows with its scores, which it keeps.
    chunk_tokens = 2048 if on_cpu else 8192
    if name == "smollm2":
        model, _ = smollm2.load(unpacked)
        return Engine(name, model.to(device), None, chunk_tokens)
    if name == "random":
        name = "random-tiny" if on_cpu else "random-3b"
    config = transformers.LlamaConfig(
        **_SHAPES[name],
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )
    attention = FilledRows()
    transformers.AttentionInterface.register(_ATTENTION, attention)
    torch.manual_seed(1)
    with torch.device(device):
        dtype = torch.float32 if on_cpu else torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.set_attn_implementation(_ATTENTION)
    # For the token that `layout_of` reads.
    attention.tokens = 1
    return Engine(name, model, attention, chunk_tokens)
