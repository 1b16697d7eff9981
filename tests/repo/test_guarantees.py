"""Every test that the guarantees page names exists."""

from __future__ import annotations

import re

import pytest

from tests.repo.tree import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.findall(r"^- (tests/\S+?\.py)(?:::(\w+))?$", PAGE, re.MULTILINE)


def test_every_promise_names_a_test() -> None:
    promises = re.split(r"^\*\*", PAGE, flags=re.MULTILINE)[1:]
    assert len(promises) >= 10
    assert [text[:60] for text in promises if "\n- tests/" not in text] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_named_test_exists(path: str, name: str) -> None:
    text = (ROOT / path).read_text()
    assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE)
