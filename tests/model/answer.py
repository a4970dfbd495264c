"""A small engine: SmolLM2 answers a prompt, its KV cache parked in the middle of the answer.

`begin` computes the answer once without interruption, then anew, parks in the middle, and goes on until it is killed.
`finish` takes what was parked and computes the rest. Each prints JSON documents, one a line.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import mmkv
from benchmarks import smollm2
from mmkv.integrations.transformers import cache_argument, layout_of, new_cache, seek, slot_of

# A text of more than one block of tokens.
PROMPT = (Path(__file__).parents[2] / "LICENSE").read_text()[:2700] + "\n\nSay in plain words what this text allows."
MAX_TOKENS = 640
ANSWER_TOKENS = 20
PARKED_AFTER = 8


class Engine:
    """The model, and one slot: a static cache whose heads are planes."""

    def __init__(self, unpacked: Path) -> None:
        self.model, self.tokenizer = smollm2.load(unpacked)
        self.layout = layout_of(self.model, name=smollm2.NAME)
        self.cache = new_cache(self.model, self.layout, MAX_TOKENS)
        self.slot = slot_of(self.cache, self.layout)
        self.computed = 0

    def next_token(self, ids: list[int]) -> int:
        """The likeliest token after `ids`, which follow what the cache holds."""
        cache = {cache_argument(self.model): self.cache}
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **cache).logits
        self.computed += len(ids)
        return int(logits[0, -1].argmax())


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def begin(unpacked: Path, pool_path: Path) -> None:
    engine = Engine(unpacked)
    messages = [{"role": "user", "content": PROMPT}]
    text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt: list[int] = engine.tokenizer(text, add_special_tokens=False).input_ids

    whole = [engine.next_token(prompt)]
    while len(whole) < ANSWER_TOKENS:
        whole.append(engine.next_token(whole[-1:]))
    say(prompt=prompt, whole=whole, text=engine.tokenizer.decode(whole))

    seek(engine.cache, 0)
    pool = mmkv.Pool.open(pool_path, engine.layout, capacity="256MiB")
    answer = [engine.next_token(prompt)]
    pool.park("chat", engine.slot, prompt, boundary=True).result()
    for count in itertools.count(1):
        if count == PARKED_AFTER:
            # The last token has not been through the model: its row does not exist yet.
            receipt = pool.park("chat", engine.slot, prompt + answer[:-1]).result()
            say(
                answer=answer,
                tokens=receipt.tokens,
                tokens_written=receipt.tokens_written,
                text=engine.tokenizer.decode(answer),
            )
        answer.append(engine.next_token(answer[-1:]))
        if count > 2 * PARKED_AFTER:
            sys.exit("nobody killed this process")


def finish(unpacked: Path, pool_path: Path, ids: list[int], count: int) -> None:
    engine = Engine(unpacked)
    with mmkv.Pool.open(pool_path, engine.layout) as pool, pool.match(ids) as match:
        seek(engine.cache, match.tokens)
        receipt = pool.take(match, engine.slot).result()
    rest = [engine.next_token(ids[match.tokens :])]
    while len(rest) < count:
        rest.append(engine.next_token(rest[-1:]))
    say(rest=rest, tokens=receipt.tokens, computed=engine.computed)


if __name__ == "__main__":
    model, directory = map(Path, sys.argv[2:4])
    if sys.argv[1] == "begin":
        begin(model, directory)
    else:
        finish(model, directory, json.loads(sys.argv[4]), int(sys.argv[5]))
