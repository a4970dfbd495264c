"""Engines in a process of their own, which can be killed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmkv.integrations.transformers import Answer, ChatPool

Make = Callable[[], tuple[Any, Any]]


def serve(requests: Connection, makes: Mapping[str, Make], directory: Path, settings: dict[str, Any]) -> None:
    with ExitStack() as stack:
        engines = {}
        for name, make in makes.items():
            model, tokenizer = make()
            engines[name] = stack.enter_context(ChatPool(model, tokenizer, directory / name, **settings))
        requests.send(None)
        while True:
            name, conversation, messages, count = requests.recv()
            requests.send(engines[name].chat(conversation, messages, max_new_tokens=count))


class Engines:
    """A `ChatPool` for each of some models, in another process, which ends by being killed."""

    def __init__(self, makes: Mapping[str, Make], directory: Path, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, makes, directory, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._requests.recv()

    def begin(self, name: str, conversation: str, messages: list[dict[str, str]], count: int) -> None:
        """Begin a turn."""
        self._requests.send((name, conversation, messages, count))

    def chat(self, name: str, conversation: str, messages: list[dict[str, str]], count: int) -> Answer:
        self.begin(name, conversation, messages, count)
        answer: Answer = self._requests.recv()
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL
        self._requests.close()
