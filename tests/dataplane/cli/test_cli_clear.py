"""`dataplane clear`: what is shown is what is cleared, and nothing is without a word."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client, StaleWrite
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT
from tests.dataplane.cli.terminal import asked
from tests.deadline import eventually

_numbers = itertools.count(1)


@pytest.fixture
def rows(plane: Client) -> Iterator[str]:
    """A partition with six rows: four failed, one completed, one without a status."""
    partition = f"rows-{next(_numbers)}"
    for i, status in enumerate(["failed"] * 4 + ["completed"]):
        plane.kv_put(f"k{i}", partition, {"x": torch.arange(10)}, {"status": status, "i": i})
    plane.kv_put("bare", partition, {"x": torch.arange(10)}, {"i": 5})
    yield partition
    plane.kv_drop_partition(partition)


def keys_of(plane: Client, partition: str) -> list[str]:
    return sorted(plane.kv_list(partition).keys)


EVERY = ["bare", "k0", "k1", "k2", "k3", "k4"]


def test_a_dry_run_shows_rows_and_bytes_by_status_and_changes_nothing(
    plane: Client, operator: Operator, rows: str
) -> None:
    before = plane.kv_list(rows).revision
    said = operator.ask("clear", rows, "--all", "--dry-run", "-o", "json").json
    assert (said["rows"], said["payload_bytes"]) == (6, 480)
    assert {status: of["rows"] for status, of in said["statuses"].items()} == {
        "failed": 4,
        "completed": 1,
        "": 1,
    }
    assert sum(of["bytes"] for of in said["statuses"].values()) == 480 + said["tag_bytes"]
    assert (said["dry_run"], said["cleared"]) == (True, 0)
    text = operator.ask("clear", rows, "--all", "--dry-run").out
    assert "6 rows" in text
    assert "failed" in text
    assert "4 rows" in text
    assert "nothing was cleared" in text
    assert keys_of(plane, rows) == EVERY
    assert plane.kv_list(rows).revision == before


def test_without_a_terminal_and_without_yes_it_refuses(
    plane: Client, operator: Operator, rows: str
) -> None:
    said = operator.run("clear", rows, "--status", "failed", ok=False)
    assert said.code == 2
    assert "4 rows" in said.err
    assert "--yes" in said.err
    said = operator.run("clear", rows, "--all", "-o", "json", ok=False)
    assert said.error["error"]["type"] == "InvalidRequest"
    assert keys_of(plane, rows) == EVERY


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--status", "failed"], ["bare", "k4"]),
        (["--status", "failed", "--status", "completed"], ["bare"]),
        (["--where", "i>=3"], ["k0", "k1", "k2"]),
        (["--where", "i>=3", "--status", "failed"], ["bare", "k0", "k1", "k2", "k4"]),
        (["--where", '{"status": {"exists": false}}'], ["k0", "k1", "k2", "k3", "k4"]),
        (["k1", "k1", "nope", "bare"], ["k0", "k2", "k3", "k4"]),
        (["--all"], []),
        (["--older-than", "0s"], []),
        (["--older-than", "1d"], EVERY),
        (["--where", "i=99"], EVERY),
        (["nope"], EVERY),
    ],
    ids=str,
)
def test_what_is_chosen_is_cleared(
    plane: Client, operator: Operator, rows: str, words: list[str], left: list[str]
) -> None:
    if "0s" in words:
        # The plane remembers a moment every half second.
        eventually(lambda: _is_old(plane, rows), "the rows are in the past")
    said = operator.ask("clear", rows, *words, "--yes", "-o", "json").json
    assert keys_of(plane, rows) == left
    assert said["rows"] == said["cleared"] == len(EVERY) - len(left)


def _is_old(plane: Client, partition: str) -> bool:
    plane.kv_put("tick", "ticks", tags={"n": 1})
    before = plane.revision_before(0.0)
    return before is not None and before >= plane.kv_list(partition).revision


def test_only_rows_that_did_not_change_for_so_long_are_cleared(
    plane: Client, operator: Operator, rows: str
) -> None:
    eventually(lambda: _is_old(plane, rows), "the rows are in the past")
    cut = plane.revision_before(0.0)
    assert cut is not None
    plane.kv_put("k0", rows, tags={"again": True})
    said = operator.ask("clear", rows, "--older-than", "1ms", "--dry-run", "-o", "json").json
    assert said["revision"][1] >= cut.n
    reports = [report for report in plane.inspect(EVERY, rows) if report is not None]
    assert said["rows"] == sum(report.revision.n <= said["revision"][1] for report in reports)


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_yes_clears(plane: Client, operator: Operator, rows: str, answer: str) -> None:
    with asked(operator, "clear", rows, "--status", "failed") as question:
        said = question.answer(answer)
    assert said.code == 0, said.err
    assert "cleared 4 rows" in said.out
    assert keys_of(plane, rows) == ["bare", "k4"]


@pytest.mark.parametrize("answer", ["n\n", "\n", "yesterday\n", "\x04"])
def test_anything_else_clears_nothing(
    plane: Client, operator: Operator, rows: str, answer: str
) -> None:
    with asked(operator, "clear", rows, "--status", "failed") as question:
        said = question.answer(answer)
    assert said.code == 0, said.err
    assert "cleared 0 rows" in said.out
    assert keys_of(plane, rows) == EVERY


def test_ctrl_c_at_the_question_clears_nothing(
    plane: Client, operator: Operator, rows: str
) -> None:
    with asked(operator, "clear", rows, "--all") as question:
        question._process.send_signal(2)
        said = question.answer("")
    assert said.code == 130
    assert keys_of(plane, rows) == EVERY


@pytest.mark.parametrize("words", [["--status", "failed"], ["k0", "k1", "k2", "k3"]], ids=str)
def test_a_row_that_is_written_between_the_question_and_the_answer_stays(
    plane: Client, operator: Operator, rows: str, words: list[str]
) -> None:
    with asked(operator, "clear", rows, *words) as question:
        plane.kv_put("k1", rows, tags={"note": "I am needed"})
        plane.kv_clear(["k2"], rows)
        plane.kv_put("late", rows, tags={"status": "failed"})
        said = question.answer("y\n")
    assert said.code == 0, said.err
    assert "cleared 2 rows" in said.out
    assert "2 rows changed or went meanwhile" in said.out
    assert keys_of(plane, rows) == ["bare", "k1", "k4", "late"]


def test_which_rows_is_said_in_one_way(operator: Operator, rows: str) -> None:
    for words in (
        [], ["k0", "--all"], ["--orphans", "--all"], ["k0", "--orphans"], ["--older-than", "soon"],
        ["--where", "status="],
    ):  # fmt: skip
        said = operator.ask("clear", rows, *words, "--yes", ok=False)
        assert said.code == 2, words
    assert operator.ask("clear", "nowhere", "--all", "--yes", ok=False).code == 3
    assert operator.ask("clear", "nowhere", "k", "--yes", ok=False).code == 3


@pytest.fixture
def group_left(plane: Client, here: dict[str, Any]) -> Iterator[str]:
    """A partition with a group whose producer left, one whose producer is here, one that ended."""
    partition = f"groups-{next(_numbers)}"
    gone = dataplane.connect("train", config=here)
    for client, uid, ends in ((gone, "left", False), (plane, "open", False), (gone, "done", True)):
        attempt = client.begin_group(uid, partition, n=2)
        tags = {"uid": uid, "status": "completed"}
        client.kv_put(f"{uid}_0_0", partition, {"x": torch.arange(3)}, tags, attempt=attempt)
        if ends:
            client.end_group(attempt, "finished")
    gone.close()
    eventually(lambda: not _report(plane, partition, "left").producer.alive, "its producer is gone")
    yield partition
    plane.kv_drop_partition(partition)


def _report(plane: Client, partition: str, key: str) -> Any:
    (report,) = plane.inspect([key], partition)
    return report


def test_orphans_are_the_open_groups_whose_producer_is_gone(
    plane: Client, operator: Operator, group_left: str
) -> None:
    said = operator.ask("clear", group_left, "--orphans", "--dry-run")
    assert "2 rows" in said.out
    assert "their producers have no connection" in said.out
    attempt = _report(plane, group_left, "left").group["attempt"]
    found = operator.ask("clear", group_left, "--orphans", "--yes", "-o", "json").json
    assert (found["rows"], found["cleared"], found["groups_open"]) == (2, 2, 1)
    assert keys_of(plane, group_left) == ["done", "done_0_0", "open", "open_0_0"]
    with pytest.raises(StaleWrite):
        plane.kv_put("left_1_0", group_left, tags={"uid": "left"}, attempt=attempt)
    again = operator.ask("clear", group_left, "--orphans", "--yes")
    assert "no such row" in again.out


def test_open_groups_are_said_and_closed_only_when_asked(
    plane: Client, operator: Operator, group_left: str
) -> None:
    shown = operator.ask("clear", group_left, "--where", "uid=open", "--dry-run").out
    assert "unless --retire closes them" in shown
    attempt = _report(plane, group_left, "open").group["attempt"]
    operator.ask("clear", group_left, "open_0_0", "--yes")
    plane.kv_put("open_1_0", group_left, tags={"uid": "open"}, attempt=attempt)
    operator.ask("clear", group_left, "--where", "uid=open", "--retire", "--yes")
    with pytest.raises(StaleWrite):
        plane.kv_put("open_0_0", group_left, tags={"uid": "open"}, attempt=attempt)


def test_hostile_keys_statuses_and_partitions_print_safely(
    plane: Client, operator: Operator
) -> None:
    partition = "p [red]\u202egpj.exe\u202c"
    plane.kv_put(HOSTILE_KEY, partition, tags={"status": HOSTILE_TEXT})
    for words in (["--all", "--dry-run"], [HOSTILE_KEY, "--dry-run"], [HOSTILE_KEY, "--yes"]):
        said = operator.ask("clear", partition, *words)
        assert all(line.isprintable() for line in (said.out + said.err).splitlines())
    assert keys_of(plane, partition) == []
