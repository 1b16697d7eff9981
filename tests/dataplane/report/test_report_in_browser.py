"""Reports in a real browser: they ask for nothing, fit, and are readable, whatever is in them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dataplane.report.write import write_report
from tests.dataplane.report.browser import Seen, browser, page_in
from tests.dataplane.report.made_up import HOSTILE, plane_of, write_run

SECTIONS = [
    "Timeline of groups", "Reward", "Time of a step", "Lengths", "Padding", "Staleness",
    "Lag of tasks", "Bytes", "Waiting requests", "Rows a second", "Who waited for what",
]  # fmt: skip

SIZES = {"nothing": (0, 0), "one step": (4, 1), "a run": (300, 60), "a long run": (2000, 5000)}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with browser() as address:
        yield address


def _check(seen: Seen, page: Path, width: int) -> None:
    layout = seen.layout
    assert seen.complaints == []
    assert seen.requests == [page.resolve().as_uri()]
    assert layout["wide"] <= layout["seen"] == width
    assert [title for title, *_ in layout["sections"]] == SECTIONS
    assert all(wide > 200 and tall > 50 for _, wide, tall in layout["sections"])
    assert layout["overlaps"] == []
    assert layout["scripts"] == layout["ids"] == 0


@pytest.mark.parametrize("size", SIZES)
async def test_a_report_asks_for_nothing_and_fits(address: str, tmp_path: Path, size: str) -> None:
    groups, steps = SIZES[size]
    run = write_run(tmp_path / "run", steps)
    page = write_report(tmp_path / "report.html", run=run, plane=plane_of(groups))
    assert page.stat().st_size < 3_000_000
    papers: set[str] = set()
    for width, scheme in ((1400, "light"), (1400, "dark"), (800, "light")):
        seen = await page_in(address, page, width=width, scheme=scheme, picture=True)
        _check(seen, page, width)
        papers.add(seen.layout["paper"])
        keep = os.environ.get("REPORT_PICTURES")
        if keep:
            name = f"{size.replace(' ', '-')}-{width}-{scheme}.png"
            (Path(keep) / name).write_bytes(seen.picture)
        assert seen.picture.startswith(b"\x89PNG")
    assert len(papers) == 2, "the two schemes look different"


async def test_what_is_in_the_data_is_shown_and_never_run(address: str, tmp_path: Path) -> None:
    page = write_report(tmp_path / "report.html", plane=plane_of(40, name=HOSTILE))
    seen = await page_in(address, page, width=1400)
    _check(seen, page, 1400)
    assert "<script>" in seen.layout["text"]
    assert "\\x1b[31m\\u202e" in seen.layout["text"]
    assert "\u202e" not in seen.layout["text"]


async def test_the_browser_would_say_what_is_wrong(address: str, tmp_path: Path) -> None:
    """The checks above see what they look for."""
    page = tmp_path / "wrong.html"
    page.write_text(
        "<!DOCTYPE html><img src='http://198.51.100.1/a.png'><div style='width:3000px'>x</div>"
        "<svg viewBox='0 0 99 99'><title>t</title><text x=9 y=9>one</text><text x=9 y=9>two</text>"
        "</svg><script>console.error('no')</script>"
    )
    seen = await page_in(address, page, width=800)
    assert seen.layout["wide"] > seen.layout["seen"]
    assert seen.layout["overlaps"]
    assert "http://198.51.100.1/a.png" in seen.requests
    assert any("no" in complaint for complaint in seen.complaints)
