"""Commands that look at a plane and change nothing, as text and as JSON, on a live one."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataplane import Client
from dataplane.cli.shown import visible
from tests.dataplane.cli.conftest import COMMAND, Operator
from tests.dataplane.cli.small_run import (
    ASIDE,
    HOSTILE_KEY,
    HOSTILE_TEXT,
    LETTERS,
    QUOTA_BYTES,
    TRAIN,
    VAL,
)
from tests.deadline import eventually

READING = [
    ["status"],
    ["partitions"],
    ["keys", TRAIN],
    ["show", TRAIN, "u1_0_0"],
    ["show", TRAIN, HOSTILE_KEY],
    ["show", TRAIN, "failed"],
    ["why", TRAIN, "--group-by", "uid", "--count", "4"],
    ["why"],
    ["stats", TRAIN],
    ["waiters"],
    ["top", "--once", "--interval", "0.1"],
    ["tail", TRAIN, "--since", "1h", "--count", "3"],
]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_text_fits_80_columns_and_cannot_play_with_the_terminal(
    operator: Operator, words: list[str]
) -> None:
    said = operator.ask(*words)
    lines = said.out.splitlines()
    assert lines
    assert all(line.isprintable() for line in lines)
    if words[0] not in ("why", "tail", "show"):  # whose lines are sentences and tags
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_machine_forms_are_documents(operator: Operator, words: list[str]) -> None:
    text = operator.ask(*words, "-o", "json").out
    assert text.isascii()
    documents = (
        [json.loads(line) for line in text.splitlines()]
        if words[0] == "tail"
        else [json.loads(text)]
    )
    assert documents[0]
    listed = list(yaml.safe_load_all(operator.ask(*words, "--output", "yaml").out))
    assert type(listed[0]) is type(documents[0])
    if words[0] == "top":
        said = operator.ask(*words, "-o", "csv", ok=False)
        assert said.code == 2
        return
    rows = list(csv.reader(io.StringIO(operator.ask(*words, "-o", "csv").out)))
    assert len({len(row) for row in rows}) == 1


def test_status(operator: Operator, plane: Client) -> None:
    found = operator.ask("status", "-o", "json").json
    assert (found["name"], found["plane_id"]) == ("train", plane.plane_id)
    assert found["waiting"] == {"rows": 1, "claims": 1, "room": 0, "partitions": 0}
    assert set(found["partitions"]) == {TRAIN, VAL, ASIDE}
    text = operator.ask("status").out
    assert f"train ({plane.plane_id})" in text
    assert "1 for rows, 1 for claims" in text


def test_a_text_of_a_million_letters_is_counted(operator: Operator) -> None:
    """What the size metric of others says is 0."""
    rows = {row["partition_id"]: row for row in operator.ask("partitions", "-o", "json").json}
    assert LETTERS <= rows[VAL]["payload_bytes"] <= LETTERS + 64
    assert "976.6 KiB" in operator.ask("partitions").out
    assert operator.ask("stats", VAL, "-o", "json").json["fields"]["text"]["bytes"] >= LETTERS
    assert operator.ask("show", VAL, "big", "-o", "json").json["fields"][0]["nbytes"] >= LETTERS
    top = operator.ask("top", "--once", "-o", "json", "--interval", "0.1").json
    assert {p["partition_id"]: p for p in top["partitions"]}[VAL]["payload_bytes"] >= LETTERS


def test_partitions(operator: Operator) -> None:
    rows = {row["partition_id"]: row for row in operator.ask("partitions", "-o", "json").json}
    assert rows[TRAIN]["groups"] == 2
    assert rows[TRAIN]["schema"]["input_ids"] == {"dtype": "int64", "rank": 1, "ragged_dim": 0}
    header, *lines = operator.ask("partitions").out.splitlines()
    assert header.split()[:4] == ["PARTITION", "KEYS", "VALUES", "TAGS"]
    assert [line.split()[0] for line in lines] == [ASIDE, TRAIN, VAL]
    assert rows[ASIDE]["quota"] == {"bytes": QUOTA_BYTES}
    assert "1.0 MiB" in lines[0]


# -- keys ------------------------------------------------------------------------------------


def test_keys_that_match_in_order(operator: Operator) -> None:
    said = operator.ask(
        "keys", TRAIN, "--where", "status=completed, seq_len>=96", "--sort", "-seq_len",
        "--limit", "3", "--columns", "seq_len,score", "-o", "json",
    )  # fmt: skip
    assert [row["key"] for row in said.json] == ["u1_3_0", "u1_2_0", "u2_2_0"]
    assert said.json[0]["tags"] == {"score": 0.75, "seq_len": 160}
    assert said.json[0]["fields"] == ["input_ids", "labels", "logprobs"]
    assert "3 keys at revision" in said.err
    assert "--limit cut it short" in said.err


def test_keys_as_csv_have_a_column_for_each_tag(operator: Operator) -> None:
    text = operator.ask("keys", TRAIN, "-w", "uid=u1,index=0", "-o", "csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["key"] for row in rows] == [f"u1_{session}_0" for session in range(4)]
    assert rows[3]["tag:seq_len"] == "160"


def test_a_json_where_is_one_too(operator: Operator) -> None:
    where = '{"status": {"in": ["failed", "aborted"]}}'
    rows = operator.ask("keys", TRAIN, "--where", where, "-o", "json").json
    assert {row["key"] for row in rows} == {"failed", HOSTILE_KEY}
    assert {row["tags"].get("error_msg") for row in rows} == {None, HOSTILE_TEXT}


def test_hostile_keys_and_tags_print_escaped(operator: Operator) -> None:
    text = operator.ask("keys", TRAIN, "--columns", "uid,error_msg").out
    joined = "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert "[red]\\u202egpj" in joined
    assert "\\x1b[2J" in text
    said = operator.ask("show", TRAIN, HOSTILE_KEY)
    assert said.out.splitlines()[0] == visible(HOSTILE_KEY)


def test_keys_since_a_revision(operator: Operator, plane: Client) -> None:
    plane.kv_put("old", "since", tags={"a": 1})
    plane.kv_put("gone", "since", tags={"a": 1})
    epoch, n = plane.kv_list("since").revision
    plane.kv_put("new", "since", tags={"a": 2})
    plane.kv_clear(["gone"], "since")
    rows = operator.ask("keys", "since", "--since", f"{epoch}:{n}", "-o", "json").json
    assert [(row["key"], row["cleared"]) for row in rows] == [("new", False), ("gone", True)]
    assert len(operator.ask("keys", "since", "--since", "1h", "-o", "json").json) >= 2
    said = operator.ask("keys", "since", "--since", "yesterday", ok=False)
    assert said.code == 2
    assert "90s, 10m, 2h, 1d" in said.err
    plane.kv_drop_partition("since")


# -- show ------------------------------------------------------------------------------------


def test_show_a_trajectory(operator: Operator) -> None:
    found = operator.ask("show", TRAIN, "u1_0_0", "-o", "json").json
    assert found["group"]["uid"] == "u1"
    assert found["tasks"]["judge"] == "committed"
    fields = {field["name"]: field for field in found["fields"]}
    assert fields["input_ids"]["shape"] == [64]
    assert (fields["input_ids"]["dtype"], fields["input_ids"]["nbytes"]) == ("int64", 512)
    assert "preview" not in found
    text = operator.ask("show", TRAIN, "u1_0_0").out
    assert "finished, closed, 4 of 4 sessions" in text
    assert "int64    [64]   512 B" in text


def test_show_values(operator: Operator) -> None:
    found = operator.ask("show", TRAIN, "u1_0_0", "--preview", "3", "-o", "json").json["preview"]
    assert found["values"]["input_ids"] == [0, 1, 2]
    assert found["values"]["labels"] == [-100, -100, -100]
    assert found["counts"]["input_ids"] == 64
    text = operator.ask("show", TRAIN, "u1_0_0", "--preview", "40").out
    assert "0 1 2 3 4 5" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "x" * 200 + "…" in "".join(
        line.strip() for line in operator.ask("show", VAL, "big", "--preview", "1").out.splitlines()
    )


def test_show_tokens_as_text(operator: Operator, tokenizer_folder: Path) -> None:
    words = ["show", TRAIN, "u1_0_0", "--tokenizer", str(tokenizer_folder)]
    found = operator.ask(*words, "-o", "json").json["preview"]
    assert found["texts"]["input_ids"].split() == [f"w{n}" for n in range(64)]
    assert found["texts"]["labels"].split() == [f"w{n}" for n in range(32, 64)]
    assert "labels as text" in operator.ask(*words).out


def test_a_folder_without_a_tokenizer(operator: Operator, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        said = operator.ask("show", TRAIN, "u1_0_0", "--tokenizer", str(folder), ok=False)
        assert said.code == 2
        assert "--tokenizer" in said.err


def test_show_a_key_that_is_not_there(operator: Operator) -> None:
    said = operator.ask("show", TRAIN, "nobody", "-o", "json", ok=False)
    assert said.code == 3
    assert said.error["error"]["type"] == "KeyNotFound"
    assert said.error["error"]["keys"] == ["nobody"]
    assert said.error["exit_code"] == 3


# -- why, stats, waiters ---------------------------------------------------------------------


def test_why_names_the_group_that_is_stuck(operator: Operator) -> None:
    words = ["why", TRAIN, "--where", "status=completed", "--group-by", "uid", "--count", "2"]
    found = operator.ask(*words, "-o", "json").json
    assert (found["matching"], found["total"]) == (1, 3)
    stuck = {group["key"]: group for group in found["stuck"]}
    assert (stuck["u2"]["sessions"], stuck["u2"]["n"], stuck["u2"]["alive"]) == (3, 4, True)
    assert stuck["u3"]["alive"] is False
    text = operator.ask(*words).out
    assert "'u2': running for" in text
    assert "3 of 4" in text


def test_stats(operator: Operator) -> None:
    found = operator.ask("stats", TRAIN, "-o", "json").json
    assert found["statuses"]["completed"] == 8
    assert found["lengths"]["input_ids"]["max"] == 160
    text = operator.ask("stats", TRAIN).out
    assert "lengths of input_ids, labels, logprobs" in text
    assert "█" in text
    assert "lengths of messages" not in operator.ask("stats", TRAIN, "--field", "labels").out
    said = operator.ask("stats", TRAIN, "--field", "nothing", ok=False)
    assert said.code == 3
    assert "'input_ids'" in said.err


def test_waiters(operator: Operator) -> None:
    rows = {row["kind"]: row for row in operator.ask("waiters", "-o", "json").json}
    assert (rows["rows"]["grouped"], rows["rows"]["count"]) == (True, 2)
    assert (rows["claim"]["task"], rows["claim"]["fields"]) == ("ref", ["old_logprobs"])
    text = operator.ask("waiters").out
    assert "2 groups" in text
    assert "8 rows for ref with old_logprobs" in " ".join(text.split())


# -- top -------------------------------------------------------------------------------------


def test_a_frame_of_top(operator: Operator) -> None:
    text = operator.ask("top", "--once", "--interval", "0.1").out
    for part in ("store    local", "PARTITION", "TASK", "WAITS FOR", "GROUP", "3 of 4", "(gone)"):
        assert part in text, part
    found = operator.ask("top", "--once", "--interval", "0.1", "-o", "json").json
    assert found["rates"]["changes"] >= 0
    assert {task["task"]: task["lag"] for task in found["tasks"]}["judge"] >= 7
    assert [group["key"] for group in found["groups"]] == ["u3", "u2"]
    assert {waiter["kind"] for waiter in found["waiters"]} == {"rows", "claim"}


def test_top_prints_a_line_for_each_frame(operator: Operator, plane: Client) -> None:
    child = operator.start("top", "-o", "json", "--interval", "0.1", "--count", "3")
    assert child.stdout is not None
    frames: list[Any] = []
    for line in child.stdout:
        frames.append(json.loads(line))
        plane.kv_put("counted", "top", tags={"frame": len(frames)})
    assert child.wait(20) == 0
    assert len(frames) == 3
    assert frames[0]["rates"] == {}
    assert frames[-1]["rates"]["changes"] > 0
    plane.kv_drop_partition("top")
    child.communicate()


def test_top_on_a_terminal_fits_it_and_ends_with_q(operator: Operator) -> None:
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = {name: v for name, v in operator.variables().items() if name != "COLUMNS"}
    child = subprocess.Popen(
        [*COMMAND, "top", "--interval", "60"],
        stdin=its, stdout=its, stderr=its, env={**variables, "TERM": "xterm"},
    )  # fmt: skip
    os.close(its)
    said = b""
    while b"GROUP" not in said:
        said += os.read(ours, 65536)
    os.write(ours, b"q")
    while True:
        try:
            said += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert child.wait(20) == 0
    os.close(ours)
    screen = said.decode().partition("\x1b[?1049l")[0]
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(part in text for part in ("PARTITION", "TASK", "WAITS FOR", "u3"))


@pytest.mark.parametrize("words", [["top", "--interval", "0.1"], ["tail", TRAIN, "--since", "1h"]])
def test_ctrl_c_ends_what_goes_on(operator: Operator, words: list[str]) -> None:
    child = operator.start(*words)
    assert child.stdout is not None
    assert child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 0, err
    assert err == ""


@pytest.mark.parametrize(
    "words", [["tail", TRAIN, "--since", "1h"], ["top", "--interval", "0.1"], ["keys", TRAIN]]
)
def test_a_reader_that_has_enough(operator: Operator, words: list[str]) -> None:
    child = operator.start(*words)
    assert child.stdout is not None
    if words[0] != "keys":
        assert child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    err = child.stderr.read()
    assert child.wait(20) == 0, err
    assert "Traceback" not in err
    assert "Exception" not in err
    child.stderr.close()


# -- tail ------------------------------------------------------------------------------------


def test_tail_follows_what_happens(operator: Operator, plane: Client) -> None:
    plane.kv_put("before", "followed", tags={"a": 0})
    child = operator.start("tail", "followed", "-o", "json", "--where", "a>=1", "--count", "3")
    eventually(lambda: plane.status()["waiting"]["rows"] >= 2, "it watches", within_s=30)
    plane.kv_put("k1", "followed", tags={"a": 1})
    plane.kv_put("k0", "followed", tags={"a": 0})
    plane.kv_put("k2", "followed", tags={"a": 2})
    plane.kv_clear(["k1"], "followed")
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {(line["change"], line["key"]) for line in lines} <= {
        ("put", "k1"), ("put", "k2"), ("clear", "k1"),
    }  # fmt: skip
    assert lines[-1]["revision"].startswith("1:")
    plane.kv_drop_partition("followed")


def test_tail_ends_when_nothing_happens(operator: Operator) -> None:
    began = time.monotonic()
    said = operator.ask("tail", VAL, "--timeout", "0.2")
    assert said.out == ""
    assert time.monotonic() - began < 20


def test_tail_of_a_partition_that_is_not_there(operator: Operator) -> None:
    said = operator.ask("tail", "trian", "--timeout", "1", ok=False)
    assert said.code == 3
    assert "trian" in said.err
