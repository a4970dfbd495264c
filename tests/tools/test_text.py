"""Sizes, ages and text for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkv_inspect.text import age_text, count_text, parse_age, size_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("chat-42", "chat-42"),
        ("日本語 ümlaut", "日本語 ümlaut"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("two\nlines\r\t\0\a\b\x7f", r"two\nlines\r\t\x00\x07\x08\x7f"),
        ("abc\u202etxt.exe\u2066\u200f", r"abc\u202etxt.exe\u2066\u200f"),
        ("zero\u200bwidth\ufeff\u2028", r"zero\u200bwidth\ufeff\u2028"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("\udc80", r"\udc80"),
        ("[red]x[/red] :smile:", "[red]x[/red] :smile:"),
    ],
)
def test_visible_shows_what_a_terminal_would_obey(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_visible_is_printable_and_keeps_what_was(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (19_584_000_000, "18.2 GiB"),
        (384 << 30, "384.0 GiB"),
        (1 << 70, "1024.0 EiB"),
    ],
)
def test_size_text(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0.4, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m1s"),
        (599, "9m59s"),
        (601, "10m"),
        (3600, "1h"),
        (3659, "1h"),
        (93_784, "1d2h"),
        (864_000, "10d"),
    ],
)
def test_age_text(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604_800), ("1d12h", 129_600), ("1.5h", 5400), (" 45S ", 45), ("2w", 1_209_600)]
)
def test_parse_age(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "7 days", "-7d", "7d!", "1e9d", "٣d", "7d\n8"])
def test_parse_age_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no span of time"):
        parse_age(text)


def test_one_thing_is_not_called_as_several_are() -> None:
    assert [count_text(count, "conversation") for count in (0, 1, 2000)] == [
        "0 conversations", "1 conversation", "2,000 conversations",
    ]  # fmt: skip
    assert [count_text(count, "miss", "misses") for count in (1, 2)] == ["1 miss", "2 misses"]
