"""The command that runs TransferQueue's own tests: what it counts, and when it is content."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.interop import peer_suite
from tests.interop.child import Outcome, pytest_run
from tests.interop.peer_names import ELSEWHERE, GROUPS
from tests.interop.sides import environment

PASSED = Outcome("passed")


def everything() -> dict[str, Outcome]:
    return {
        f"{file}::{test}": PASSED
        for names in GROUPS.values()
        for file, tests in names.items()
        for test in tests
    }


def test_the_groups_have_as_many_tests_as_they_are_said_to_have() -> None:
    counts = {group: sum(map(len, names.values())) for group, names in GROUPS.items()}
    assert counts == {"live": 30, "containers": 121, "inside": 18}
    assert len(everything()) == 30 + 121 + 18, "a test is named twice"
    assert not everything().keys() & ELSEWHERE.keys()


def test_all_have_to_run_and_pass() -> None:
    outcomes = everything()
    assert peer_suite.passed(GROUPS, outcomes)
    name = next(iter(outcomes))
    for outcome in (Outcome("failed", "AssertionError: 1"), Outcome("skipped", "no GPU")):
        assert not peer_suite.passed(GROUPS, {**outcomes, name: outcome})
    del outcomes[name]
    assert not peer_suite.passed(GROUPS, outcomes)


def test_the_table_names_what_failed_and_why() -> None:
    outcomes = everything()
    name = next(iter(outcomes))
    outcomes[name] = Outcome("failed", "AssertionError: 1 == 2\nmore")
    lines = list(peer_suite.report(GROUPS, {**outcomes, "tests/test_new.py::test_a": PASSED}))
    assert "live: 29 of 30 passed" in lines
    failed = lines.index(f"    failed   {name.split('::', 1)[1]}")
    assert lines[failed + 1].split() == ["AssertionError:", "1", "==", "2"]
    assert [line for line in lines if line.startswith("not known")] == [
        "not known: tests/test_new.py::test_a (passed): "
    ]


def test_a_folder_without_the_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no checkout of TransferQueue"):
        peer_suite.run(tmp_path, GROUPS, "drop-in")


def test_a_run_imports_the_drop_in_whatever_lies_in_the_checkout(tmp_path: Path) -> None:
    shadow = tmp_path / "transfer_queue"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest, transfer_queue\n"
        "def test_origin():\n"
        "    assert transfer_queue.__version__.endswith('+dataplane')\n"
        "@pytest.mark.parametrize('n', [0, 1])\n"
        "def test_halves(n):\n"
        "    assert n == 0, 'odd'\n"
        "def test_skipped():\n"
        "    pytest.skip('not today')\n"
    )
    outcomes = pytest_run("drop-in", tmp_path, ["test_it.py"], environment("drop-in"))
    assert {name: found.outcome for name, found in outcomes.items()} == {
        "test_it.py::test_origin": "passed",
        "test_it.py::test_halves": "failed",
        "test_it.py::test_skipped": "skipped",
    }
    assert "odd" in outcomes["test_it.py::test_halves"].why
    assert "not today" in outcomes["test_it.py::test_skipped"].why


def test_a_run_that_imports_the_other_package_says_so(tmp_path: Path) -> None:
    (tmp_path / "transfer_queue.py").write_text("")
    variables = environment("peer")
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    with pytest.raises(RuntimeError, match="not the drop-in"):
        pytest_run("drop-in", tmp_path, ["test_it.py"], variables)
