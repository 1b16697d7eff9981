"""What people read: nothing can play with the terminal, sizes and spans have units."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.cli.shown import (
    age_text,
    bar,
    bytes_text,
    count_text,
    histogram,
    rate_text,
    share_text,
    short,
    sparkline,
    value_text,
    visible,
)
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT


@given(st.text() | st.sampled_from([HOSTILE_KEY, HOSTILE_TEXT]))
def test_what_is_shown_is_one_printable_line(text: str) -> None:
    assert visible(text).isprintable()


def test_what_does_not_print_is_written_out() -> None:
    assert visible("a\x1b[31m\n\u202eb\U000e0001") == "a\\x1b[31m\\x0a\\u202eb\\U000e0001"
    assert visible("ü 漢 [red]") == "ü 漢 [red]"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_000_000, "976.6 KiB"),
        (1 << 20, "1.0 MiB"), ((1 << 20) - 1, "1.0 MiB"), (64 << 30, "64.0 GiB"),
        (3 << 60, "3072.0 PiB"), (None, "-"), (-2048, "-2.0 KiB"),
    ],
)  # fmt: skip
def test_sizes(size: int | None, said: str) -> None:
    assert bytes_text(size) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 ms"), (0.0404, "40 ms"), (0.1, "0.1 s"), (1.52, "1.5 s"), (2.0, "2 s"),
        (12.3, "12 s"), (99, "99 s"), (100, "1.7 min"), (720, "12 min"), (3600, "1 h"),
        (11520, "3.2 h"), (8 * 86400, "8 d"), (None, "-"), (-1, "0 ms"),
    ],
)  # fmt: skip
def test_spans(seconds: float | None, said: str) -> None:
    assert age_text(seconds) == said


def test_numbers() -> None:
    assert (count_text(12345), count_text(None)) == ("12,345", "-")
    assert (share_text(1, 4), share_text(0, 0)) == ("25 %", "-")
    assert (rate_text(0), rate_text(0.52), rate_text(1250.4), rate_text(None)) == (
        "0/s", "0.5/s", "1,250/s", "-",
    )  # fmt: skip


def test_values() -> None:
    assert [value_text(value) for value in (None, True, 3, 0.1 + 0.2, [1, "x"], {"a": None})] == [
        "-", "yes", "3", "0.3", '[1, "x"]', '{"a": null}',
    ]  # fmt: skip
    assert value_text(float("nan")) == "nan"
    assert value_text(HOSTILE_TEXT).isprintable()


def test_short_keeps_both_ends() -> None:
    assert short("abcdefghij", 5) == "ab…ij"
    assert short("abc", 3) == "abc"


def test_bars() -> None:
    assert [bar(share, 4) for share in (0, 0.5, 1, 2)] == ["    ", "██  ", "████", "████"]
    assert len(bar(0.33, 10)) == 10
    assert sparkline([0, 1, 2, 8]) == "▁▂▃█"
    assert sparkline([0, 0]) == "▁▁"


def test_a_histogram_fits_its_width() -> None:
    lines = histogram([(0, 9, 1), (10, 19, 1200), (20, 1_000_000, 600)], 60)
    assert max(map(len, lines)) <= 60
    assert re.fullmatch(r"0 to 9\s+1  ▏", lines[0].strip())
    assert lines[1].count("█") > lines[2].count("█") > 0
    assert histogram([], 60) == []
