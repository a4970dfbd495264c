"""Matches, shared blocks and forks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmkv
from tests.computed import (
    UNIFORM,
    assert_holds,
    assert_parked,
    assert_untouched,
    ids_of,
    make_slot,
    park,
)


def matched(pool: mmkv.Pool, ids: Any, namespace: str = "") -> int:
    with pool.match(ids, namespace=namespace) as match:
        return match.tokens


def test_the_longest_prefix_is_matched_and_taken(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 2000))
    park(pool, "short", ids[:600])
    park(pool, "long", ids[:1500])
    park(pool, "other", ids_of((2, 2000)))
    with pool.match(ids) as match:
        assert (match.conversation, match.tokens, match.tier) == ("long", 1500, "path")
        slot = make_slot(UNIFORM, 2000, fill=9)
        pool.take(match, slot).result(30)
        assert_holds(slot, ids[:1500], fill=9)


@pytest.mark.parametrize("common", [1, 100, 511, 512, 700])
def test_a_match_is_as_long_as_the_ids_agree(pool: mmkv.Pool, common: int) -> None:
    ids = ids_of((1, 1000))
    park(pool, "chat", ids)
    with pool.match(np.concatenate([ids[:common], ids_of((2, 50))])) as match:
        assert match.tokens == common


def test_no_match_has_no_tokens_and_takes_nothing(pool: mmkv.Pool) -> None:
    park(pool, "chat", ids_of((1, 600)))
    for prompt in (ids_of((2, 600)), []):
        with pool.match(prompt) as match:
            assert (match.conversation, match.tokens, match.tier) == (None, 0, None)
            slot = make_slot(UNIFORM, 10, fill=3)
            assert pool.take(match, slot).result(30).tokens == 0
            assert_untouched(slot, 3)
    assert (pool.stats().hits, pool.stats().misses) == (0, 2)


def test_a_conversation_that_begins_alike_shares_whole_blocks(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1100))
    other = np.concatenate([ids, ids_of((2, 500))])
    park(pool, "first", ids)
    used = pool.stats().used
    receipt = park(pool, "second", other)
    assert receipt.tokens_written == len(other) - 1024
    assert pool.stats().used - used == 2 * pool._space.geometry.block_bytes
    pool.drop("first")
    assert_parked(pool, "second", other)


def test_sharing_gives_the_bytes_of_who_parked_first_and_can_be_declined(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 600))
    park(pool, "first", ids, salt="first")
    park(pool, "shares", ids, salt="later")
    park(pool, "apart", ids, salt="later", share=False)
    slot = make_slot(UNIFORM, 600)
    pool.take("shares", slot, tokens=512).result(30)
    assert_holds(slot, ids[:512], salt="first", fill=0)
    assert_parked(pool, "apart", ids, salt="later")


def test_namespaces_neither_share_nor_match(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1100))
    park(pool, "a", ids, namespace="one", salt="one")
    assert matched(pool, ids) == 0
    assert matched(pool, ids, "two") == 0
    assert park(pool, "b", ids, namespace="two", salt="two").tokens_written == 1100
    assert_parked(pool, "a", ids, salt="one")
    assert_parked(pool, "b", ids, salt="two")
    assert pool.conversations(namespace="two") == ["b"]
    with pool.match(ids, namespace="one") as match:
        assert match.conversation == "a"


def test_a_conversation_stays_in_its_namespace(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 100))
    park(pool, "chat", ids, namespace="one")
    with pytest.raises(ValueError, match="'chat' is parked in namespace 'one', not 'two'"):
        park(pool, "chat", ids, namespace="two")
    assert_parked(pool, "chat", ids)


def test_a_fork_shares_every_block_and_goes_its_own_way(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids)
    used = pool.stats().used
    pool.fork("chat", "whole")
    pool.fork("chat", "part", tokens=700)
    assert pool.stats().used == used
    goes = {"chat": 5, "whole": 6, "part": 7}
    texts = {}
    for name, seed in goes.items():
        length = 700 if name == "part" else 1300
        texts[name] = np.concatenate([ids[:length], ids_of((seed, 150))])
        park(pool, name, texts[name])
    for name, text in texts.items():
        assert_parked(pool, name, text)


def test_a_fork_of_a_match_is_as_long_as_the_match(pool: mmkv.Pool) -> None:
    ids = ids_of((1, 1300))
    park(pool, "chat", ids, namespace="n")
    with pool.match(ids[:900], namespace="n") as match:
        pool.fork(match, "forked")
    assert pool.info("forked").namespace == "n"
    assert_parked(pool, "forked", ids[:900])


def test_a_fork_needs_a_free_name(pool: mmkv.Pool) -> None:
    park(pool, "a", ids_of((1, 100)))
    with pytest.raises(ValueError, match="'a' exists already"):
        pool.fork("a", "a")
    with pool.match(ids_of((2, 5))) as match, pytest.raises(ValueError, match="nothing to fork"):
        pool.fork(match, "b")
