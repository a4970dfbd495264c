"""Transfers: what who waits sees, whatever order the store's news come in."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import mmkv
from mmkv.transfer import Receipt, Transfer


class Rig:
    """A transfer of three layers without a store; its parts note what they were called for."""

    def __init__(
        self, *, parts: int = 1, deadline: float | None = None, finish: Callable[[], None] | None = None
    ) -> None:
        self.calls: list[str] = []
        self._finish = finish
        self.transfer = Transfer(
            "park of 'a'",
            3,
            parts=parts,
            deadline=deadline,
            finish=self._finished,
            release=lambda _: self.calls.append("release"),
            tokens=9,
            tokens_written=4,
        )
        self.transfer.begin()

    def _finished(self) -> None:
        self.calls.append("finish")
        if self._finish is not None:
            self._finish()

    def land(self, *layers: int) -> None:
        for layer in layers:
            self.transfer.moved("posix", 100)
            self.transfer.landed(layer)


def later(call: Callable[[], Any], seconds: float = 0.05) -> None:
    threading.Timer(seconds, call).start()


def test_a_receipt_tells_what_moved() -> None:
    rig = Rig()
    rig.land(0, 1, 2)
    rig.transfer.moved("mapped", 50)
    rig.transfer.released()
    receipt = rig.transfer.result(0)
    assert (receipt.tokens, receipt.tokens_written, receipt.bytes, receipt.path) == (9, 4, 350, "mapped+posix")
    assert 0 < receipt.seconds < 10
    assert receipt.gbps == receipt.bytes / receipt.seconds / 1e9
    assert rig.calls == ["finish", "release"]


def test_a_receipt_of_nothing_is_of_no_path() -> None:
    rig = Rig()
    rig.transfer.released()
    assert rig.transfer.result(0).path == "none"
    assert Receipt(0, 0, 0, 0.0, "none").gbps == 0


def test_a_layer_is_waited_for_until_it_landed() -> None:
    rig = Rig()
    assert not rig.transfer.done(1)
    later(lambda: rig.land(1))
    rig.transfer.wait(1)
    assert rig.transfer.done(1)
    assert not rig.transfer.done(0)
    assert not rig.transfer.done()


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=f"layer {layer} is not one of the 3"):
        rig.transfer.wait(layer)
    with pytest.raises(ValueError, match=f"layer {layer} is not one of the 3"):
        rig.transfer.done(layer)


def test_layers_are_given_in_order_whatever_order_they_land_in() -> None:
    rig = Rig()
    rig.land(2, 0)
    later(lambda: rig.land(1))
    assert list(rig.transfer) == [0, 1, 2]


def test_a_layer_that_landed_tells_of_a_failure_all_the_same() -> None:
    rig = Rig()
    rig.land(0)
    rig.transfer.failed(OSError("broken"))
    with pytest.raises(mmkv.TransferError, match="park of 'a' failed: broken"):
        rig.transfer.wait(0)


def test_who_waits_for_a_layer_hears_of_the_failure() -> None:
    rig = Rig()
    later(lambda: rig.transfer.failed(mmkv.TransferError("layer 2, 'k': broken", layer=2, plane="k")))
    with pytest.raises(mmkv.TransferError) as caught:
        rig.transfer.wait(1)
    assert (caught.value.layer, caught.value.plane) == (2, "k")


def test_the_first_failure_counts_and_nothing_lands_after_it() -> None:
    rig = Rig()
    rig.transfer.failed(mmkv.PoolFull("first"))
    rig.transfer.failed(OSError("second"))
    rig.land(0)
    rig.transfer.released()
    with pytest.raises(mmkv.PoolFull, match="first"):
        rig.transfer.result(0)
    assert not rig.transfer.done(0)
    assert rig.calls == ["release"], "what failed is not committed"


def test_a_result_comes_only_when_every_part_let_go() -> None:
    rig = Rig(parts=2)
    rig.land(0, 1, 2)
    rig.transfer.released()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.01 s; it goes on"):
        rig.transfer.result(0.01)
    rig.transfer.released()
    assert rig.transfer.result(0).tokens == 9


def test_a_commit_that_fails_fails_the_transfer() -> None:
    def fail() -> None:
        raise mmkv.PoolFull("no room for the catalog")

    rig = Rig(finish=fail)
    rig.transfer.released()
    with pytest.raises(mmkv.PoolFull, match="no room for the catalog"):
        rig.transfer.result(0)
    assert rig.calls == ["finish", "release"]


def test_a_cancelled_transfer_ends_when_the_hardware_let_go() -> None:
    rig = Rig()
    assert not rig.transfer.stopped
    assert rig.transfer.cancel()
    assert rig.transfer.stopped
    with pytest.raises(TimeoutError):
        rig.transfer.result(0.01)
    rig.transfer.released()
    with pytest.raises(mmkv.TransferCancelled, match="park of 'a' was cancelled"):
        rig.transfer.result(0)
    assert rig.calls == ["release"]


def test_what_ended_cannot_be_cancelled() -> None:
    rig = Rig()
    rig.transfer.released()
    assert not rig.transfer.cancel()
    rig.transfer.result(0)


def test_what_is_being_committed_cannot_be_cancelled() -> None:
    answers: list[bool] = []
    rig = Rig(finish=lambda: answers.append(rig.transfer.cancel()))
    rig.transfer.released()
    assert answers == [False]
    rig.transfer.result(0)


def test_a_deadline_ends_the_wait_and_names_the_layer_that_hangs() -> None:
    rig = Rig(deadline=0.02)
    rig.land(0)
    assert not rig.transfer.expire()
    time.sleep(0.03)
    assert rig.transfer.expire()
    with pytest.raises(mmkv.TransferTimeout, match=r"not done after 0\.02 s: layer 1 did not land") as caught:
        rig.transfer.result(0)
    assert caught.value.layer == 1
    assert isinstance(caught.value, TimeoutError)
    assert rig.transfer.quarantined
    assert rig.calls == [], "the hardware may still be at it"
    rig.transfer.released()
    assert not rig.transfer.quarantined
    assert rig.calls == ["release"], "what comes too late is not committed"


def test_a_failure_before_the_deadline_is_told_with_it() -> None:
    rig = Rig(deadline=0.0001)
    rig.transfer.failed(OSError("broken"))
    time.sleep(0.001)
    rig.transfer.expire()
    with pytest.raises(mmkv.TransferTimeout, match="before that, park of 'a' failed: broken"):
        rig.transfer.result(0)


def test_a_commit_under_way_has_no_deadline() -> None:
    expired: list[bool] = []

    def finish() -> None:
        time.sleep(0.01)
        expired.append(rig.transfer.expire())

    rig = Rig(deadline=0.001, finish=finish)
    rig.transfer.released()
    assert expired == [False]
    rig.transfer.result(0)


def test_await_gives_the_receipt_and_the_failure() -> None:
    async def receipt() -> Receipt:
        rig = Rig()
        later(rig.transfer.released)
        return await rig.transfer

    async def failure() -> None:
        rig = Rig()
        rig.transfer.failed(OSError("broken"))
        later(rig.transfer.released)
        await rig.transfer

    assert asyncio.run(receipt()).tokens == 9
    with pytest.raises(mmkv.TransferError, match="broken"):
        asyncio.run(failure())


def test_who_gives_up_awaiting_does_no_harm() -> None:
    rig = Rig()
    ended: list[Transfer] = []

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rig.transfer, 0.01)

    asyncio.run(impatient())
    rig.transfer.add_done_callback(ended.append)
    rig.transfer.released()
    assert rig.transfer.result(0).tokens == 9
    assert ended == [rig.transfer]


def test_a_callback_that_fails_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    ended: list[Transfer] = []
    rig.transfer.add_done_callback(lambda _: 1 / 0)
    rig.transfer.add_done_callback(ended.append)
    rig.transfer.released()
    assert rig.transfer.result(0).tokens == 9
    rig.transfer.add_done_callback(ended.append)
    assert ended == [rig.transfer] * 2
    assert "a callback of park of 'a' failed" in caplog.text


def test_a_transfer_belongs_to_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    # As if a thread that the child does not have held it.
    with rig.transfer._changed:
        for call in (rig.transfer.result, rig.transfer.done, rig.transfer.cancel, lambda: rig.transfer.wait(0)):
            thread = threading.Thread(target=_expect_closed, args=(call,))
            thread.start()
            thread.join(5)
            assert not thread.is_alive()


def _expect_closed(call: Callable[[], Any]) -> None:
    with pytest.raises(mmkv.PoolClosed, match="a forked child has no pool"):
        call()


def test_a_transfer_shows_how_far_it_is() -> None:
    rig = Rig()
    rig.land(0)
    assert repr(rig.transfer) == "Transfer(\"park of 'a'\", layers=1/3, under way)"
    rig.transfer.released()
    assert repr(rig.transfer) == "Transfer(\"park of 'a'\", layers=3/3, done)"
