"""What the system refuses is an error of mmkv that says what to do; above all where no file can be opened."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import medium as medium_module
from mmkv.errors import MmkvError, PoolFull, TransferTimeout
from mmkv.refused import lacks_files, refusal, refusals
from tests.computed import UNIFORM, assert_parked, ids_of, park


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Let the process open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests may have left holes among the numbers; that of the listing itself is free again.
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("how", ["owner", "creator", "reader", "two tiers"])
def test_an_opening_without_descriptors_says_so(tmp_path: Path, ram_path: Path, how: str) -> None:
    path = tmp_path / "pool"
    options: dict[str, Any] = {"layout": UNIFORM, "capacity": "4MiB"}
    if how == "two tiers":
        options |= {"hot": ram_path / "hot", "hot_capacity": "2MiB"}
    mmkv.Pool.open(path, **options).close()
    if how == "reader":
        options = {"readonly": True}
    errors: list[MmkvError] = []
    for count in range(0, 30, 1 if how == "owner" else 3):
        if how == "creator" and path.exists():
            shutil.rmtree(path)
        before = len(os.listdir("/proc/self/fd"))
        try:
            with files_left(count):
                mmkv.Pool.open(path, **options).close()
        except MmkvError as error:
            errors.append(error)
        assert len(os.listdir("/proc/self/fd")) == before
    assert 1 < len(errors) < 30
    assert {type(error) for error in errors} == {MmkvError}
    assert all("too many open files" in str(error) and "ulimit -n" in str(error) for error in errors)


def test_a_hot_tier_that_cannot_be_looked_at_is_not_given_up(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hot = tmp_path / "pool", ram_path / "hot"
    with mmkv.Pool.open(path, UNIFORM, capacity="4MiB", hot=hot, hot_capacity="2MiB") as pool:
        park(pool, "chat", ids_of((1, 600)))
    real = os.open

    def refused(file: Any, *arguments: Any) -> int:
        if str(file).endswith("hot.json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(file, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        with pytest.raises(MmkvError, match="too many open files"):
            mmkv.Pool.open(path)
    with mmkv.Pool.open(path) as pool:
        assert pool._hot is not None
        assert pool._hot.residents["blocks"].all_of(dirty=False)[0].size
        assert_parked(pool, "chat", ids_of((1, 600)))


def test_what_the_system_says_is_not_made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(self: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    medium_module.boot_id.cache_clear()
    boot = medium_module.boot_id()
    medium_module.boot_id.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refused)
        for call in (
            medium_module.boot_id,
            medium_module.available_ram,
            lambda: medium_module.medium_of(tmp_path),
        ):
            with pytest.raises(MmkvError, match="too many open files"):
                call()
    assert medium_module.boot_id() == boot


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, PoolFull, "cannot: No space left on device: free some space"),
        (errno.EDQUOT, PoolFull, "free some space"),
        (errno.EIO, MmkvError, "cannot: Input/output error"),
        (errno.ENFILE, MmkvError, "too many open files"),
    ],
)
def test_refusals(code: int, kind: type[MmkvError], text: str) -> None:
    error = refusal("cannot", OSError(code, os.strerror(code)))
    assert type(error) is kind
    assert text in str(error)
    with pytest.raises(kind, match=text) as raised, refusals("cannot"):
        raise OSError(code, os.strerror(code))
    assert isinstance(raised.value.__cause__, OSError)


def test_an_error_of_our_own_stays_what_it_is() -> None:
    ours = TransferTimeout("late")
    with pytest.raises(TransferTimeout) as raised, refusals("cannot"):
        raise ours
    assert raised.value is ours


def test_whether_files_can_be_opened() -> None:
    assert not lacks_files(4)
    with files_left(3):
        assert lacks_files(4)
        assert not lacks_files(3)
