"""Small models of every kind, with random weights, and an engine that is interrupted by nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import transformers

from mmkv.integrations.transformers import cache_argument

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(**settings: Any) -> Any:
    config = transformers.LlamaConfig(**GROUPED | NO_TOKENS | {"num_hidden_layers": 3} | settings)
    return transformers.LlamaForCausalLM(config)


def qwen_hybrid() -> Any:
    """Three layers of a gated delta rule, then one that attends."""
    config = transformers.Qwen3NextConfig(
        **GROUPED | NO_TOKENS,
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        # Experts add up in no fixed order on a GPU.
        mlp_only_layers=[0, 1, 2, 3],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM(config)


def gemma_windows() -> Any:
    """Windows of 24 tokens, and one layer that sees everything."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **GROUPED | NO_TOKENS, num_hidden_layers=4, sliding_window=24, layer_types=kinds, tie_word_embeddings=False
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def mistral_windows() -> Any:
    """Nothing but windows."""
    config = transformers.MistralConfig(**GROUPED | NO_TOKENS, num_hidden_layers=2, sliding_window=24)
    return transformers.MistralForCausalLM(config)


def falcon_hybrid() -> Any:
    """Layers that attend and recur at once."""
    config = transformers.FalconH1Config(
        **GROUPED | NO_TOKENS,
        num_hidden_layers=2,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
    )
    return transformers.FalconH1ForCausalLM(config)


def lfm_convolutions() -> Any:
    config = transformers.Lfm2Config(
        **{**SMALL, "num_key_value_heads": 2} | NO_TOKENS,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
    )
    return transformers.Lfm2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (llama, qwen_hybrid, gemma_windows, mistral_windows, falcon_hybrid, lfm_convolutions)
}


def make_model(name: str, dtype: str = "float32", device: str = "cpu") -> Any:
    """A model with the same weights each time."""
    torch.manual_seed(7)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from zero, so that answers differ from each other.
            parameter.mul_(4)
    return model.to(getattr(torch, dtype)).to(device).eval()


class Letters:
    """A tokenizer whose tokens are characters: what was said is tokenized as it was generated."""

    eos_token_id = None

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> dict[str, list[int]]:
        # The first token is the chat's own, so that chats have no prefix in common.
        return {"input_ids": [ord(letter) for message in messages for letter in message["content"] + "\n"]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class Uninterrupted:
    """Transformers alone: a cache for each conversation, which stays where it is."""

    def __init__(self, model: Any, max_tokens: int, *, stateful: bool, stops: Collection[int] = ()) -> None:
        self.model = model
        self.stops = stops
        self.max_tokens = max_tokens
        self.stateful = stateful
        self.caches: dict[str, Any] = {}
        self.held: dict[str, list[int]] = {}

    def compute(self, conversation: str, ids: list[int]) -> int:
        if conversation not in self.caches:
            config = self.model.config
            self.caches[conversation] = transformers.StaticCache(config=config, max_cache_len=self.max_tokens)
        tokens = torch.tensor([ids], device=self.model.device)
        cache = {cache_argument(self.model): self.caches[conversation]}
        with torch.inference_mode():
            logits = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache).logits
        self.held[conversation] = self.held.get(conversation, []) + ids
        return int(logits[0, -1].argmax())

    def answer(self, conversation: str, prompt: list[int], count: int) -> list[int]:
        held = self.held.get(conversation, [])
        if prompt[: len(held)] != held:
            # What was said is tokenized otherwise than it was generated.
            held = self.held[conversation] = []
            del self.caches[conversation]
        new = prompt[len(held) :]
        if self.stateful and len(new) > 1:
            self.compute(conversation, new[:-1])
            new = new[-1:]
        answer: list[int] = []
        token = self.compute(conversation, new)
        while token not in self.stops:
            answer.append(token)
            if len(answer) == count:
                break
            token = self.compute(conversation, [token])
        return answer


def said(chat: int, turn: int) -> str:
    """What a user says: the first letter is the chat's own."""
    return chr(ord("A") + chat) + f" turn {turn} of chat {chat}: " + "tell me more about it, please. " * (1 + chat % 2)
