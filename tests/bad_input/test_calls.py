"""Arguments that make no sense: an error that says what is wrong and what to do, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmkv
from tests.bad_input.whole import CAPACITY, IDS
from tests.computed import (
    HYBRID,
    UNIFORM,
    assert_parked,
    assert_untouched,
    computed,
    make_slot,
    park,
    rows,
)


@pytest.mark.parametrize("name", ["", "n" * 513])
def test_a_conversation_id_has_1_to_512_characters(pool: mmkv.Pool, name: str) -> None:
    slot = computed(UNIFORM, IDS)
    for call in (lambda: pool.park(name, slot, IDS), lambda: pool.fork("chat", name)):
        with pytest.raises(ValueError, match=f"a conversation's id has 1 to 512 characters, not {len(name)}: "):
            call()


@pytest.mark.parametrize("name", [None, 5, b"chat", ["chat"]])
def test_a_conversation_id_is_a_string(pool: mmkv.Pool, name: Any) -> None:
    slot = computed(UNIFORM, IDS)
    for call in (lambda: pool.park(name, slot, IDS), lambda: pool.take(name, slot), lambda: pool.drop(name)):
        with pytest.raises(TypeError, match="a conversation's id"):
            call()


def test_a_conversation_id_is_valid_unicode(pool: mmkv.Pool) -> None:
    with pytest.raises(ValueError, match="no valid Unicode"):
        pool.park("\ud800", computed(UNIFORM, IDS), IDS)


@pytest.mark.parametrize("name", ["../../x", "/etc", "a/b", "\x1b[31m", "\0", "%s", "n" * 512])
def test_an_id_full_of_slashes_and_escapes_is_as_good_as_any(pool: mmkv.Pool, name: str) -> None:
    park(pool, name, IDS)
    assert_parked(pool, name, IDS)
    pool.drop(name)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([], ValueError, "one token at least"),
        ([1.5], TypeError, "must be integers, not float64"),
        ("text", TypeError, "not str"),
        ([[1]], ValueError, "one-dimensional"),
        ([2**64], ValueError, "64 bits"),
        (range(2001), ValueError, "the slot holds 2000 tokens, fewer than the 2001"),
    ],
)
def test_ids_that_are_none_or_too_many(pool: mmkv.Pool, ids: Any, error: type[Exception], text: str) -> None:
    slot = make_slot(UNIFORM, 2000)
    with pytest.raises(error, match=text):
        pool.park("other", slot, ids)
    with pytest.raises(error, match=text):
        pool.swap(slot, leaving="other", leaving_ids=ids, arriving="chat")
    assert_untouched(slot)
    assert pool.conversations() == ["chat"]


def test_a_slot_that_is_too_small(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 999, fill=3)
    with pytest.raises(ValueError, match="the slot holds 999 tokens, fewer than the 1000"):
        pool.take("chat", slot)
    assert_untouched(slot, 3)


@pytest.mark.parametrize(
    "layout", [HYBRID, mmkv.Layout(UNIFORM.layers, "another model"), mmkv.Layout(UNIFORM.layers[:2], "uniform")]
)
def test_a_slot_of_another_layout_or_model(pool: mmkv.Pool, layout: mmkv.Layout) -> None:
    slot = make_slot(layout, 2000, fill=3)
    for call in (
        lambda: pool.take("chat", slot),
        lambda: pool.park("chat", slot, IDS),
        lambda: pool.swap(slot, leaving="a", leaving_ids=IDS, arriving="chat"),
    ):
        with pytest.raises(mmkv.LayoutMismatch, match="is not that of the pool at"):
            call()
    assert_untouched(slot, 3)


@pytest.mark.parametrize("slot", [None, [], np.zeros(5), "slot"])
def test_what_is_no_slot(pool: mmkv.Pool, slot: Any) -> None:
    with pytest.raises(TypeError, match="slot must be a"):
        pool.park("other", slot, IDS)
    with pytest.raises(TypeError, match="slot must be a"):
        pool.take("chat", slot)


def test_a_read_only_slot_can_be_parked_and_not_taken_into(pool: mmkv.Pool) -> None:
    slot = computed(UNIFORM, IDS)
    for *_, array in rows(slot):
        array.base.flags.writeable = False
    arrays = [{name: array.view() for name, array in layer.items()} for layer in slot.arrays]
    for layer in arrays:
        for array in layer.values():
            array.flags.writeable = False
    frozen = mmkv.Slot(UNIFORM, arrays)
    with pytest.raises(ValueError, match="layer 0, plane 'k': the array is read-only"):
        pool.take("chat", frozen)
    assert pool.park("other", frozen, IDS, share=False).result(30).tokens_written == 1000


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tokens": 0}, ValueError, "tokens must be at least 1, not 0"),
        ({"tokens": 1001}, ValueError, "tokens is 1001, but 'chat' has 1000"),
        ({"tokens": 1.0}, TypeError, "tokens must be an integer, not 1.0"),
        ({"tokens": True}, TypeError, "tokens must be an integer"),
        ({"have": -1}, ValueError, "have must be at least 0, not -1"),
        ({"have": 1001}, ValueError, "have is 1001, more than the 1000"),
        ({"have": 5, "tokens": 4}, ValueError, "have is 5, more than the 4"),
        ({"have": "5"}, TypeError, "have must be an integer"),
    ],
)
def test_counts_that_make_no_sense(pool: mmkv.Pool, options: dict[str, Any], error: type[Exception], text: str) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with pytest.raises(error, match=text):
        pool.take("chat", slot, **options)
    assert_untouched(slot, 3)


@pytest.mark.parametrize("namespace", [None, 5, b"n"])
def test_a_namespace_is_a_string(pool: mmkv.Pool, namespace: Any) -> None:
    with pytest.raises(TypeError, match="namespace must be a string"):
        pool.match(IDS, namespace=namespace)
    with pytest.raises(TypeError, match="namespace must be a string"):
        pool.park("other", computed(UNIFORM, IDS), IDS, namespace=namespace)


def test_a_match_after_its_lease(pool: mmkv.Pool) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with pool.match(IDS) as match:
        pass
    for call in (lambda: pool.take(match, slot), lambda: pool.fork(match, "b")):
        with pytest.raises(ValueError, match="its lease is over; use it inside its with block, or match again"):
            call()
    match.close()
    assert pool.stats().leases == 0
    assert_untouched(slot, 3)


def test_a_match_of_another_pool(pool: mmkv.Pool, tmp_path: Path) -> None:
    slot = make_slot(UNIFORM, 1000, fill=3)
    with mmkv.Pool.open(tmp_path / "second", UNIFORM, capacity=CAPACITY) as other:
        park(other, "b", IDS)
        with other.match(IDS) as match, pytest.raises(ValueError, match="made by another pool"):
            pool.take(match, slot)
    assert_untouched(slot, 3)


def test_a_match_that_nobody_closed_gives_its_lease_back(pool: mmkv.Pool) -> None:
    match: mmkv.Match | None = pool.match(IDS)
    assert pool.stats().leases == 1
    with pytest.warns(ResourceWarning, match="was not closed"):
        match = None
    assert match is None
    pool._release_orphans()
    assert pool.stats().leases == 0


def test_use_after_close(pool_dir: Path) -> None:
    pool = mmkv.Pool.open(pool_dir, UNIFORM, capacity=CAPACITY)
    park(pool, "chat", IDS)
    match = pool.match(IDS)
    pool.close()
    pool.close()
    slot = make_slot(UNIFORM, 1000, fill=3)
    calls: list[Callable[[], Any]] = [
        lambda: pool.park("chat", slot, IDS),
        lambda: pool.take("chat", slot),
        lambda: pool.take(match, slot),
        lambda: pool.swap(slot, leaving="b", leaving_ids=IDS, arriving="chat"),
        lambda: pool.match(IDS),
        lambda: pool.fork("chat", "b"),
        lambda: pool.drop("chat"),
        lambda: pool.pin("chat"),
        lambda: pool.unpin("chat"),
        lambda: pool.info("chat"),
        lambda: pool.resize("8MiB"),
        pool.flush,
        pool.stats,
        pool.conversations,
        lambda: len(pool),
        lambda: "chat" in pool,
    ]
    for call in calls:
        with pytest.raises(mmkv.PoolClosed, match=r"cannot be used: it was closed"):
            call()
    match.close()
    assert_untouched(slot, 3)
    assert "closed" in repr(pool)
