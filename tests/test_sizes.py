"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmkv.sizes import as_count, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("384GiB", 384 << 30),
        ("384 gib", 384 << 30),
        ("1.5 TB", 1_500_000_000_000),
        ("2K", 2048),
        ("2kB", 2000),
        (" 7 ", 7),
        ("0.001 MB", 1000),
        ("1.999999999KiB", 2047),
    ],
)
def test_a_size_in_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "1 XB", "1,5GiB", "0", 0, -4, "9" * 19, 1 << 62])
def test_what_is_no_size_is_a_value_error_that_shows_it(text: int | str) -> None:
    with pytest.raises(ValueError, match="capacity must be") as caught:
        parse_bytes(text, "capacity")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [None, 1.5, True, b"1"])
def test_a_size_of_another_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="capacity must be"):
        parse_bytes(value, "capacity")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_count_is_any_integer(value: Any) -> None:
    assert as_count(value, "have", least=0) == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_a_count_of_another_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"have must be an integer, not"):
        as_count(value, "have", least=0)


def test_a_count_below_the_least_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 1, not 0"):
        as_count(0, "tokens", least=1)
