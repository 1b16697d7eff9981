"""`dataplane trace` on a live plane: the text, the same as data, and how it ends."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dataplane
from dataplane import Client
from tests.dataplane.cli.conftest import Operator, environment_of
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT

TRAIN = "train"


@pytest.fixture(scope="module")
def traced(here: dict[str, Any]) -> Iterator[Client]:
    """A plane with a group that was trained and cleared (7c1e), one whose length is wrong (bad),
    and one whose uid plays with terminals."""
    client = dataplane.init({**here, "label": "agentloop"}, name="traced")
    try:
        for uid, size in (("7c1e", 23), ("bad", 22), (HOSTILE_KEY, 23)):
            attempt = client.begin_group(uid, TRAIN, n=1)
            tags = {
                "uid": uid, "session_id": 0, "index": 0, "prompt_len": 9, "response_len": 14,
                "seq_len": 23, "policy_len": 10, "error_msg": HOSTILE_TEXT,
            }  # fmt: skip
            key = f"{uid}/0"
            client.kv_put(key, TRAIN, {"labels": torch.arange(size)}, tags, attempt=attempt)
            client.end_group(attempt, "finished")
            with client.stage("update_actor"):
                client.kv_batch_get([key], TRAIN)
        client.kv_clear(["7c1e", "7c1e/0"], TRAIN, retire=True)
        yield client
    finally:
        client.close(destroy=True)


@pytest.fixture
def typist(traced: Client, here: dict[str, Any]) -> Operator:
    return Operator(environment_of(here, traced))


def test_text_and_data_say_the_same(typist: Operator) -> None:
    text = typist.ask("trace", "7c1e").out
    told = typist.ask("trace", "group", "7c1e", "-o", "json").json
    assert yaml.safe_load(typist.ask("trace", "7c1e", "-o", "yaml").out) == told
    table = csv.DictReader(io.StringIO(typist.ask("trace", "7c1e", "-o", "csv").out))
    assert [row["field"] for row in table] == [row["field"] for row in told["rows"]]
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("uid 7c1e  partition train  status finished (1/1 sessions)")
    shown = [line for line in text.splitlines() if " put " in line]
    assert len(shown) == 1
    for cell in ("rollout", "labels", "agentloop", "int64(23)", "10"):
        assert cell in shown[0].split()
    (put,) = [row for row in told["rows"] if row["op"] == "put" and row["field"] == "labels"]
    assert (put["len"], put["mask_sum"], put["stage"], put["producer"]) == (
        23, 10, "rollout", "agentloop",
    )  # fmt: skip
    counts = [
        sum(each["status"] == status for each in told["findings"])
        for status in ("ok", "failed", "not judged")
    ]
    assert "checks: {} ok, {} failed, {} not judged".format(*counts) in text
    assert "fields never read: none" in text
    assert "keys open after clear: none" in text


def test_wide_terminals_and_other_orders(typist: Operator) -> None:
    typist.environment["COLUMNS"] = "140"
    text = typist.ask("trace", "7c1e", "--by", "stage", "--fields", "labels").out
    assert "PRODUCER" in text
    assert "CONSUMER" in text
    assert [line for line in text.splitlines() if line.startswith("stage ")] == [
        "stage rollout", "stage update_actor", "stage clear",
    ]  # fmt: skip
    assert text.index("stage rollout") < text.index("labels")


def test_a_broken_rule_ends_with_1_and_names_both_requests(typist: Operator) -> None:
    said = typist.ask("trace", "bad", "--check", ok=False)
    assert said.code == 1
    (line,) = [line for line in said.out.splitlines() if "FAILED" in line]
    assert (
        "1. lengths agree with tags: FAILED: field 'labels' of key 'bad/0' has 22 entries" in line
    )
    (finding,) = [
        each
        for each in typist.ask("trace", "bad", "-o", "json").json["findings"]
        if each["status"] == "failed"
    ]
    assert all(f"#{number} " in line for number in finding["records"])
    assert typist.ask("trace", "7c1e", "--check").code == 0
    assert typist.ask("trace", "--check", "7c1e").code == 0


@pytest.mark.parametrize("output", ["table", "csv"])
def test_hostile_texts_print_safely(typist: Operator, output: str) -> None:
    for words in (
        ["trace", "group", HOSTILE_KEY], ["trace", "key", f"{HOSTILE_KEY}/0"],
        ["trace", "tail", "--since", "0", "--count", "9"],
    ):  # fmt: skip
        out = typist.ask(*words, "-o", output).out
        assert all(letter.isprintable() for letter in out.replace("\n", ""))
    assert "[red]" in typist.ask("trace", HOSTILE_KEY).out
    told = typist.ask("trace", HOSTILE_KEY, "-o", "json").json
    assert told["uid"] == HOSTILE_KEY


def test_nothing_is_known_of_another_uid(typist: Operator) -> None:
    said = typist.ask("trace", "nobody", ok=False)
    assert said.code == 3
    assert "nothing is known of uid 'nobody'" in said.err


def test_exports_are_compared_without_a_plane(typist: Operator, tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    typist.ask("trace", "export", "7c1e", "--out", str(one))
    typist.ask("trace", "export", "bad", "--out", str(other))
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    assert rows == typist.ask("trace", "7c1e", "-o", "json").json["rows"]
    nowhere = Operator({**typist.environment, "DATAPLANE_ADDRESS": "/nowhere.sock"})
    assert nowhere.ask("trace", "diff", str(one), str(one)).out == "no difference\n"
    said = nowhere.ask("trace", "diff", str(one), str(other), "-o", "json", ok=False)
    assert said.code == 1
    assert ("len", 23, 22) in [(each["column"], each["left"], each["right"]) for each in said.json]
    other.write_text('{"not": "a row"}\n')
    assert nowhere.ask("trace", "diff", str(one), str(other), ok=False).code == 2


def test_an_export_for_a_trace_viewer(typist: Operator, tmp_path: Path) -> None:
    out = tmp_path / "7c1e.json"
    typist.ask("trace", "export", "7c1e", "--out", str(out), "--format", "chrome")
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "rollout", "update_actor", "clear",
    }  # fmt: skip


def test_tail_follows_what_happens(typist: Operator, traced: Client) -> None:
    with typist.start("trace", "tail", "--stage", "balance", "--count", "1", "-o", "json") as tail:
        try:
            number = 0
            while tail.poll() is None:
                number += 1
                with traced.stage("balance"):
                    traced.kv_put(f"pad{number}", TRAIN, tags={"is_padding": True})
            assert tail.stdout is not None
            assert json.loads(tail.stdout.readline())["stage"] == "balance"
            assert tail.returncode == 0
        finally:
            tail.kill()
