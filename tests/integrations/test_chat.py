"""Chats of small models of every kind: answers are those of a run that nothing interrupts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import mmkv
from mmkv.integrations.transformers import Answer, ChatPool, layout_of, slot_of
from tests.integrations.models import MODELS, Letters, Uninterrupted, make_model, said

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CHATS, TURNS, TOKENS, MAX_TOKENS = 3, 3, 12, 320
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def require_same_bytes(slot: mmkv.Slot, other: mmkv.Slot, tokens: int) -> None:
    """Not only the likeliest tokens: every bit that the model will go on from."""
    for kind, rows in (("planes", slice(tokens)), ("states", ...)):
        layers = zip(getattr(slot.memory, kind), getattr(other.memory, kind), strict=True)
        for index, (mine, theirs) in enumerate(layers):
            for name, buffer in mine.items():
                assert torch.equal(buffer.owner[rows], theirs[name].owner[rows]), (kind, index, name)


class Talk:
    """What users and a model say to each other."""

    def __init__(self) -> None:
        self.messages: dict[str, list[dict[str, str]]] = {}

    def turn(self, chats: ChatPool, number: int, turn: int, count: int = TOKENS) -> Answer:
        name = f"chat-{number}"
        messages = self.messages.setdefault(name, [])
        messages.append({"role": "user", "content": said(number, turn)})
        answer = chats.chat(name, messages, max_new_tokens=count)
        messages.append({"role": "assistant", "content": answer.text})
        return answer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_an_uninterrupted_run(name: str, dtype: str, device: str, pool_in_ram: Path) -> None:
    require(device)
    model = make_model(name, dtype, device)
    layout = layout_of(model)
    plain = Uninterrupted(model, MAX_TOKENS, stateful=layout.state_bytes > 0)
    talk, seen = Talk(), set()
    for turn in range(TURNS):
        # A restart between the turns; more chats than slots within them.
        with ChatPool(model, Letters(), pool_in_ram, slots=2, max_tokens=MAX_TOKENS) as chats:
            for number in range(CHATS):
                answer = talk.turn(chats, number, turn)
                prompt = Letters().apply_chat_template(talk.messages[f"chat-{number}"][:-1])["input_ids"]
                assert answer.token_ids == plain.answer(f"chat-{number}", prompt, TOKENS)
                seen |= set(answer.token_ids)
                assert answer.parked is not None
                if turn == 0:
                    assert answer.reused == 0
                else:
                    # All but the last token of the answer, which had no row yet, its end, and what the user said.
                    said_now = len(said(number, turn)) + 2
                    assert answer.reused == answer.prompt_tokens - said_now - 1
                    assert answer.taken is not None
                    assert answer.taken.tokens == answer.reused
                assert answer.parked.tokens == answer.prompt_tokens + TOKENS - 1
                if device == "cpu":
                    uninterrupted = slot_of(plain.caches[f"chat-{number}"], layout)
                    require_same_bytes(chats._seats[-1].slot, uninterrupted, answer.parked.tokens)
    assert len(seen) > 1


def test_a_conversation_that_stayed_in_its_slot_does_not_move(pool_in_ram: Path) -> None:
    talk = Talk()
    with ChatPool(make_model("gemma_windows"), Letters(), pool_in_ram, slots=2, max_tokens=MAX_TOKENS) as chats:
        talk.turn(chats, 0, 0)
        talk.turn(chats, 1, 0)
        answer = talk.turn(chats, 0, 1)
        assert answer.taken is None
        assert answer.reused > 0
        # The slot of chat 1 was used longest ago.
        talk.turn(chats, 2, 0)
        assert talk.turn(chats, 0, 2).taken is None
        assert talk.turn(chats, 1, 1).taken is not None


@pytest.mark.parametrize("name", ["llama", "qwen_hybrid"])
def test_the_same_prompt_is_answered_again(name: str, pool_in_ram: Path) -> None:
    messages = [{"role": "user", "content": said(0, 0)}]
    with ChatPool(make_model(name), Letters(), pool_in_ram, slots=2, max_tokens=MAX_TOKENS) as chats:
        first = chats.chat("chat", messages, max_new_tokens=TOKENS)
        again = chats.chat("chat", messages, max_new_tokens=TOKENS)
        other = chats.chat("another chat", messages, max_new_tokens=TOKENS)
    assert again.token_ids == other.token_ids == first.token_ids
    # The last token of a prompt goes through the model in any case.
    assert again.reused == other.reused == first.prompt_tokens - 1


@pytest.mark.parametrize("name", ["llama", "qwen_hybrid"])
def test_an_edited_conversation_keeps_what_it_may(name: str, pool_in_ram: Path) -> None:
    model = make_model(name)
    talk = Talk()
    with ChatPool(model, Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        first = talk.turn(chats, 0, 0)
        messages = talk.messages["chat-0"]
        messages[1]["content"] = first.text[:4] + "something else"
        edited = talk.turn(chats, 0, 1)
    kept = first.prompt_tokens + 4 if name == "llama" else first.prompt_tokens - 1
    assert edited.reused == kept
    plain = Uninterrupted(model, MAX_TOKENS, stateful=False)
    prompt = Letters().apply_chat_template(messages[:-1])["input_ids"]
    assert edited.token_ids == plain.answer("chat", prompt, TOKENS)


def test_long_prompts_are_read_in_chunks(pool_in_ram: Path) -> None:
    model = make_model("gemma_windows")
    messages = [{"role": "user", "content": said(1, 0) * 3}]
    with ChatPool(model, Letters(), pool_in_ram, max_tokens=MAX_TOKENS, chunk_tokens=50) as chats:
        answer = chats.chat("chat", messages, max_new_tokens=TOKENS)
    prompt = Letters().apply_chat_template(messages)["input_ids"]
    assert answer.prompt_tokens == len(prompt) > 150
    assert answer.token_ids == Uninterrupted(model, MAX_TOKENS, stateful=True).answer("chat", prompt, TOKENS)


def test_an_answer_ends_at_its_end_its_limit_and_the_slots(pool_in_ram: Path) -> None:
    model = make_model("llama")
    messages = [{"role": "user", "content": said(0, 0)}]
    seen: list[int] = []
    with ChatPool(model, Letters(), pool_in_ram, slots=1, max_tokens=60) as chats:
        whole = chats.chat("chat", messages, on_token=seen.append)
        assert whole.prompt_tokens + len(whole.token_ids) == 61
        assert seen == whole.token_ids
        assert whole.first_token_seconds < whole.seconds
        assert len(chats.chat("chat", messages, max_new_tokens=3).token_ids) == 3
    end = whole.token_ids[-1]
    model.generation_config.eos_token_id = [end]
    with ChatPool(model, Letters(), pool_in_ram, slots=1, max_tokens=60) as chats:
        answer = chats.chat("chat", messages)
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(end)]


def test_a_prompt_that_does_not_fit_is_refused(pool_in_ram: Path) -> None:
    with ChatPool(make_model("llama"), Letters(), pool_in_ram, slots=1, max_tokens=16) as chats:
        with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, and a slot holds 16"):
            chats.chat("chat", [{"role": "user", "content": said(0, 0)}])
        with pytest.raises(ValueError, match="the messages have no tokens"):
            chats.chat("chat", [])
        with pytest.raises(ValueError, match="max_new_tokens"):
            chats.chat("chat", [{"role": "user", "content": "hi"}], max_new_tokens=0)


def test_a_model_in_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call eval"):
        ChatPool(make_model("llama").train(), Letters(), tmp_path / "pool")


@pytest.mark.parametrize("given", [None, "llama", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(given: Any, tmp_path: Path) -> None:
    for call in (lambda: ChatPool(given, Letters(), tmp_path / "pool"), lambda: layout_of(given)):
        with pytest.raises(TypeError, match=rf"model must be a model of Transformers.*, not {repr(given)[:4]}"):
            call()


@pytest.mark.parametrize("given", [None, "llama"])
def test_what_is_no_tokenizer_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"tokenizer must be the model's tokenizer.*: {given!r} has no apply_chat"):
        ChatPool(make_model("llama"), given, tmp_path / "pool")


def test_bad_arguments_are_refused_before_anything_is_computed(
    pool_in_ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": said(0, 0)}]
    with ChatPool(make_model("llama"), Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        monkeypatch.setattr(chats, "_compute", lambda *_: pytest.fail("it was computed"))
        wrong: Any
        for wrong in ("hello", "", None, 5, ["hello"], [None], messages[0]):
            with pytest.raises(TypeError, match=r"messages must be a list of mappings, such as \[.*\], not "):
                chats.chat("chat", wrong)
        for wrong in (None, 5):
            with pytest.raises(TypeError, match=f"a conversation's id must be a string, not {wrong}"):
                chats.chat(wrong, messages)
        with pytest.raises(ValueError, match="a conversation's id has 1 to 512 characters"):
            chats.chat("", messages)
        with pytest.raises(TypeError, match="on_token must be a function of a token or None, not 5"):
            chats.chat("chat", messages, on_token=5)  # type: ignore[arg-type]


def test_a_turn_within_a_turn_is_refused(pool_in_ram: Path) -> None:
    talk, seen = Talk(), []
    messages = [{"role": "user", "content": said(0, 0)}]
    with ChatPool(make_model("llama"), Letters(), pool_in_ram, slots=2, max_tokens=MAX_TOKENS) as chats:

        def ask(token: int) -> None:
            with pytest.raises(mmkv.MmkvError, match="chat was called by the on_token of an answer"):
                talk.turn(chats, 1, 0)
            seen.append(token)

        answer = chats.chat("chat", messages, max_new_tokens=3, on_token=ask)
        assert answer.token_ids == seen
        assert talk.turn(chats, 2, 0).parked is not None


@pytest.mark.parametrize("name", ["llama", "qwen_hybrid"])
def test_a_take_that_fails_costs_a_reading_of_the_prompt(
    name: str, pool_in_ram: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(name)
    talk, plain = Talk(), Uninterrupted(model, MAX_TOKENS, stateful=layout_of(model).state_bytes > 0)
    with ChatPool(model, Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        for number in range(2):
            talk.turn(chats, number, 0)
        wait = mmkv.Transfer.wait

        def fail(self: mmkv.Transfer, layer: int, stream: Any = None) -> None:
            if layer == 1:
                raise mmkv.TransferError("the medium is gone")
            wait(self, layer, stream)

        with monkeypatch.context() as patched:
            patched.setattr(mmkv.Transfer, "wait", fail)
            answer = talk.turn(chats, 0, 1)
        assert answer.reused == 0
        assert answer.taken is None
        assert "its prompt is read again" in caplog.text
        # The seat that failed was replaced, and the next turn is as if nothing had happened.
        after = talk.turn(chats, 0, 2)
        assert after.reused > answer.prompt_tokens
    whole = talk.messages["chat-0"]
    for end, given in ((3, answer), (5, after)):
        plain.caches.clear()
        plain.held.clear()
        prompt = Letters().apply_chat_template(whole[:end])["input_ids"]
        assert given.token_ids == plain.answer("chat", prompt, TOKENS)


def test_a_full_pool_costs_a_reading_of_the_prompt(
    pool_in_ram: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise mmkv.PoolFull("no room")

    talk = Talk()
    with ChatPool(make_model("llama"), Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        monkeypatch.setattr(chats.pool, "park", full)
        assert talk.turn(chats, 0, 0).parked is None
        assert "'chat-0' cannot be parked" in caplog.text
        talk.turn(chats, 1, 0)
        answer = talk.turn(chats, 0, 1)
    assert (answer.reused, answer.taken) == (0, None)


def test_a_park_that_fails_later_is_told(
    pool_in_ram: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise mmkv.TransferError("the medium is gone")

    with ChatPool(make_model("qwen_hybrid"), Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        monkeypatch.setattr("mmkv.parking.Park.commit", fail)
        answer = Talk().turn(chats, 0, 0)
    assert answer.parked is None
    assert len(answer.token_ids) == TOKENS
    # That at the prompt's end, and that of the answer.
    assert caplog.text.count("park of 'chat-0' failed") == 2


def test_a_slot_in_which_a_turn_broke_off_is_given_up(pool_in_ram: Path) -> None:
    talk = Talk()
    with ChatPool(make_model("llama"), Letters(), pool_in_ram, slots=1, max_tokens=MAX_TOKENS) as chats:
        first = talk.turn(chats, 0, 0)

        def stop(_: int) -> None:
            raise KeyboardInterrupt

        messages = [*talk.messages["chat-0"], {"role": "user", "content": "and now?"}]
        with pytest.raises(KeyboardInterrupt):
            chats.chat("chat-0", messages, on_token=stop)
        answer = chats.chat("chat-0", messages, max_new_tokens=TOKENS)
    # Its former version is in the pool.
    assert answer.reused == first.prompt_tokens + TOKENS - 1
    assert answer.taken is not None
