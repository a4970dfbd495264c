"""An engine loop that keeps more conversations than it has slots for, and keeps them across restarts."""

from __future__ import annotations

import logging
import os
import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmkv
from mmkv.integrations.caches import cache_argument, layout_of, new_cache, require_model, seek, slot_of
from mmkv.integrations.streaming import by_layer, device_of, streams_of
from mmkv.names import conversation_id
from mmkv.sizes import as_count

__all__ = ["Answer", "ChatPool"]

_log = logging.getLogger("mmkv")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn gave, and what it cost.

    Attributes
    ----------
    text : str
        The answer.
    token_ids : list of int
        Its tokens, without the one that ended it.
    prompt_tokens : int
        Tokens of the prompt.
    reused : int
        Those of them that the model did not read again.
    taken, parked : Receipt or None
        What moved into the slot before the answer, and out of it afterwards; `None` where nothing had to move, or
        where it failed, which the log tells.
    first_token_seconds, seconds : float
        From the call to the first token, and to the end of the park.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    reused: int
    taken: mmkv.Receipt | None
    parked: mmkv.Receipt | None
    first_token_seconds: float
    seconds: float


class _Seat:
    """One slot: a cache, whose conversation it is, and the ids whose rows it holds."""

    def __init__(self, model: Any, layout: mmkv.Layout, max_tokens: int) -> None:
        self.cache = new_cache(model, layout, max_tokens)
        self.slot = slot_of(self.cache, layout)
        self.conversation = ""
        self.ids: list[int] = []

    def seek(self, ids: list[int]) -> None:
        """Let the cache hold these ids, whose rows are there or on their way."""
        seek(self.cache, len(ids))
        self.ids = ids


class ChatPool:
    """A model that answers in any number of conversations, of which some are in slots and all are in a pool.

    One answer at a time, by the likeliest tokens. What a turn added is parked at its end, so that a slot can be given
    to another conversation at no cost, and a new process goes on where the last one was killed. A pool that fails
    costs a reading of the prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that generates, in evaluation mode.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer, with a chat template.
    pool_dir : path
        The pool's directory, made where it is missing.
    slots : int
        How many conversations are in the model's memory at once.
    max_tokens : int
        The most tokens of a conversation, answers included.
    capacity : int or str, optional
        The most bytes that a new pool takes; by default sixteen slots.
    chunk_tokens : int
        How many tokens of a prompt the model reads at once.
    layout : Layout, optional
        The model's layout, if it is known; by default `layout_of(model)`.
    options
        More arguments of `mmkv.Pool.open`, such as `hot`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pool_dir: str | os.PathLike[str],
        slots: int = 4,
        *,
        max_tokens: int = 4096,
        capacity: int | str | None = None,
        chunk_tokens: int = 4096,
        layout: mmkv.Layout | None = None,
        **options: Any,
    ) -> None:
        require_model(model)
        _require_tokenizer(tokenizer)
        if model.training:
            raise ValueError(f"{type(model).__name__} is in training mode: call eval() on it first")
        self.model = model
        self.tokenizer = tokenizer
        self.layout = layout_of(model) if layout is None else layout
        self._chunk = as_count(chunk_tokens, "chunk_tokens", least=1)
        self._max_tokens = as_count(max_tokens, "max_tokens", least=2)
        self._slots = as_count(slots, "slots", least=1)
        # The least recently used first; one that is at work is not among them.
        self._seats = [_Seat(model, self.layout, self._max_tokens) for _ in range(self._slots)]
        self._cache_argument = cache_argument(model)
        self._stops = _stops(model, tokenizer)
        self._lock = threading.Lock()
        self._answering: int | None = None
        if capacity is None and not (Path(pool_dir) / "pool.json").exists():
            slot_bytes = self._max_tokens * (self.layout.token_bytes + 8) + 4 * self.layout.state_bytes
            capacity = 16 * slot_bytes + (64 << 20)
        self.pool = mmkv.Pool.open(pool_dir, self.layout, capacity=capacity, **options)

    def __enter__(self) -> ChatPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pool; what was parked is there when it is opened again."""
        self.pool.close()

    def chat(
        self,
        conversation: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        on_token: Callable[[int], None] | None = None,
    ) -> Answer:
        """Answer the last of some messages.

        Parameters
        ----------
        conversation : str
            Under which id the conversation is parked.
        messages : sequence of mapping
            All of it so far, as chat templates take them: `{"role": "user", "content": ...}`. However much of it is
            parked, under whatever id, is not read again.
        max_new_tokens : int
            The most tokens of the answer.
        on_token : callable, optional
            Called with each token as soon as it may be shown. It may not call `chat`.

        Raises
        ------
        ValueError, TypeError
            The prompt is empty, or leaves no room for an answer; another argument is wrong.
        MmkvError
            It was called by its own `on_token`.
        """
        started = time.perf_counter()
        name = conversation_id(conversation)
        if on_token is not None and not callable(on_token):
            raise TypeError(f"on_token must be a function of a token or None, not {on_token!r}")
        prompt = self.prompt_ids(messages)
        if not prompt:
            raise ValueError("the messages have no tokens: there is nothing to answer")
        room = self._max_tokens - len(prompt) + 1
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and a slot holds {self._max_tokens}: give a larger max_tokens"
            )
        limit = min(as_count(max_new_tokens, "max_new_tokens", least=1), room)
        with self._turn():
            seat = self._seat(name)
            taken: mmkv.Receipt | None = None
            try:
                token, reused, taken = self._read(seat, prompt)
            except mmkv.MmkvError:
                _log.warning("%r cannot be taken, so its prompt is read again", name, exc_info=True)
                # The transfer that failed may still be at the former memory.
                seat, reused = self._new_seat(), 0
                seat.conversation = name
                token = self._finish(seat, prompt, None)
            first_token_seconds = time.perf_counter() - started
            answer: list[int] = []
            while token not in self._stops:
                answer.append(token)
                if on_token is not None:
                    on_token(token)
                if len(answer) == limit:
                    break
                token = self._compute(seat, [token])
            # The last token has not been through the model: it has no row yet.
            parked = _receipt(self._begin_park(seat))
            self._seats.append(seat)
            return Answer(
                text=self.tokenizer.decode(answer, skip_special_tokens=True),
                token_ids=answer,
                prompt_tokens=len(prompt),
                reused=reused,
                taken=taken,
                parked=parked,
                first_token_seconds=first_token_seconds,
                seconds=time.perf_counter() - started,
            )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One answer at a time."""
        me = threading.get_ident()
        if self._answering == me:
            raise mmkv.MmkvError(
                "chat was called by the on_token of an answer that is under way: call it when that one has returned"
            )
        with self._lock:
            self._answering = me
            try:
                yield
            finally:
                self._answering = None

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of messages and of the answer's beginning, by the tokenizer's chat template."""
        _require_messages(messages)
        encoded = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return [int(token) for token in encoded["input_ids"]]

    def _new_seat(self) -> _Seat:
        return _Seat(self.model, self.layout, self._max_tokens)

    def _seat(self, conversation: str) -> _Seat:
        """The slot that holds a conversation, else the one that was used longest ago.

        It comes back to the others when the turn is over, and never if that fails.
        """
        own = [seat for seat in self._seats if seat.conversation == conversation]
        free = self._seats if len(self._seats) == self._slots else [self._new_seat()]
        seat = (own or free)[0]
        self._seats = [other for other in self._seats if other is not seat]
        seat.conversation = conversation
        return seat

    def _read(self, seat: _Seat, prompt: list[int]) -> tuple[int, int, mmkv.Receipt | None]:
        """Let a slot hold a prompt. Returns the token that follows, how many were there already, and what moved."""
        # The last token goes through the model in any case, for what follows it.
        reusable = prompt[:-1]
        common = _common(seat.ids, reusable)
        # States are those of all the ids that the slot holds, and of no fewer.
        held = common if not self.layout.state_bytes or common == len(seat.ids) else 0
        take: mmkv.Transfer | None = None
        with self.pool.match(reusable) as match:
            reused = max(match.tokens, held)
            seat.seek(prompt[:reused])
            if match.tokens > held:
                have = min(common, reused)
                take = self.pool.take(match, seat.slot, have=have, stream=streams_of(seat.slot))
        token = self._finish(seat, prompt, take)
        return token, reused, None if take is None else take.result()

    def _finish(self, seat: _Seat, prompt: list[int], take: mmkv.Transfer | None) -> int:
        """Compute what a slot lacks of a prompt, and give the token that follows."""
        new = prompt[len(seat.ids) :]
        # A checkpoint before the prompt's last token lets it be answered again, and go on otherwise.
        last = new[-1:] if self.layout.state_bytes and len(new) > 1 else []
        token = self._compute(seat, new[: len(new) - len(last)], take)
        if take is not None:
            # Before a token that depends on it is shown, and before a row that depends on it is parked.
            take.result()
        if last:
            # Goes on beside what follows, which appends rows; states are copied aside.
            self._begin_park(seat, boundary=True)
            token = self._compute(seat, last)
        return token

    def _compute(self, seat: _Seat, ids: list[int], take: mmkv.Transfer | None = None) -> int:
        """Let ids go through the model; the likeliest token after them. Each layer waits for its part of a take."""
        device = device_of(self.model.get_input_embeddings())
        for start in range(0, len(ids), self._chunk):
            chunk = ids[start : start + self._chunk]
            waiting = nullcontext() if take is None or start else by_layer(self.model, take, len(self.layout.layers))
            with torch.inference_mode(), waiting:
                tokens = torch.tensor([chunk], device=device)
                cache = {self._cache_argument: seat.cache}
                logits = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache).logits
            seat.ids.extend(chunk)
        return int(logits[0, -1].argmax())

    def _begin_park(self, seat: _Seat, *, boundary: bool = False) -> mmkv.Transfer | None:
        """Begin to park what a slot holds. What fails costs a reading of the prompt when its turn comes."""
        try:
            stream = streams_of(seat.slot)
            transfer = self.pool.park(seat.conversation, seat.slot, seat.ids, boundary=boundary, stream=stream)
        except mmkv.MmkvError:
            _log.warning("%r cannot be parked", seat.conversation, exc_info=True)
            return None
        transfer.add_done_callback(_tell)
        return transfer


def _require_tokenizer(tokenizer: object) -> None:
    for method in ("apply_chat_template", "decode"):
        if not callable(getattr(tokenizer, method, None)):
            raise TypeError(
                f"tokenizer must be the model's tokenizer, such as AutoTokenizer.from_pretrained(...) gives: "
                f"{tokenizer!r} has no {method}()"
            )


def _require_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(
            "messages must be a list of mappings, such as [{'role': 'user', 'content': 'Hello'}], not "
            f"{reprlib.repr(messages)}"
        )


def _tell(transfer: mmkv.Transfer) -> None:
    """Log why a transfer failed."""
    if transfer.exception() is not None:
        _log.warning("%s failed", transfer.what, exc_info=transfer.exception())


def _receipt(transfer: mmkv.Transfer | None) -> mmkv.Receipt | None:
    """Wait for a park; `None` if it failed, which is in the log."""
    if transfer is None:
        return None
    try:
        return transfer.result()
    except mmkv.MmkvError:
        return None


def _common(held: list[int], ids: list[int]) -> int:
    """How many leading ids two lists have in common."""
    length = min(len(held), len(ids))
    differing = np.flatnonzero(np.array(held[:length]) != np.array(ids[:length]))
    return int(differing[0]) if len(differing) else length


def _stops(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    found = [getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(
        token for ids in found for token in (ids if isinstance(ids, list) else [ids]) if token is not None
    )  # fmt: skip
