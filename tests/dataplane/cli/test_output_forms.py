"""The four forms of printing: exact for programs, safe for people."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
import yaml

from dataplane.cli.output import Column, Output, Stream, plain_of, print_record, print_rows
from dataplane.cli.shown import bytes_text
from dataplane.types import Revision
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.small_run import HOSTILE_KEY, HOSTILE_TEXT

COLUMNS = (Column("key"), Column("bytes", show=bytes_text, right=True), Column("tags"))
ROWS = [
    {"more": float("nan"), "bytes": 2048, "key": HOSTILE_KEY, "tags": {"b": 1, "a": [True, None]}},
    {"key": HOSTILE_TEXT, "bytes": np.int64(3), "tags": {}},
]


@dataclass
class Report:
    revision: Revision
    sizes: tuple[int, ...]


def said(capsys: pytest.CaptureFixture[str], output: Output) -> str:
    print_rows(ROWS, COLUMNS, output)
    return capsys.readouterr().out


def test_json_is_exact_in_a_fixed_order_and_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, Output.JSON)
    first, second = json.loads(text)
    assert list(first) == ["key", "bytes", "tags", "more"]
    assert (first["key"], second["key"]) == (HOSTILE_KEY, HOSTILE_TEXT)
    assert list(first["tags"]) == ["b", "a"]
    assert first["more"] is None
    assert second["bytes"] == 3
    assert text.isascii()
    assert "\x1b" not in text


def test_yaml_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, Output.YAML)
    assert yaml.safe_load(text) == plain_of([{**ROWS[0]}, {**ROWS[1]}])
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_csv_has_a_header_and_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, Output.CSV)
    assert len(text.splitlines()) == 3
    header, first, second = csv.reader(io.StringIO(text))
    assert header == ["key", "bytes", "tags", "more"]
    assert first[1:] == ["2048", '{"b": 1, "a": [true, null]}', ""]
    assert second[1:] == ["3", "{}", ""]
    assert all(line.isprintable() for line in text.splitlines())


def test_a_table_is_safe_and_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, Output.TABLE).splitlines()
    assert lines[0].split() == ["KEY", "BYTES", "TAGS"]
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    text = "".join(line.strip() for line in lines)
    assert "[red]" in text  # not taken for markup
    assert "2.0 KiB" in text


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([], COLUMNS, Output.TABLE, empty="no key matches")
    print_rows([], COLUMNS, Output.JSON)
    print_rows([], COLUMNS, Output.CSV)
    assert capsys.readouterr().out == "no key matches\n[]\nkey,bytes,tags\n"


def test_a_record_in_each_form(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"name": HOSTILE_TEXT, "report": Report(Revision(1, 2), (3,)), "none": None}
    print_record(record, Output.JSON)
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "name": HOSTILE_TEXT,
        "report": {"revision": [1, 2], "sizes": [3]},
        "none": None,
    }
    print_record(record, Output.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == found
    print_record(record, Output.CSV)
    assert capsys.readouterr().out.splitlines()[0] == "name,report,none"
    print_record(record, Output.TABLE)
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_a_stream_prints_a_line_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Stream(COLUMNS, Output.JSON)
    for row in ROWS:
        lines.print(row)
        assert json.loads(capsys.readouterr().out)["key"] == row["key"]
    lines = Stream(COLUMNS, Output.CSV)
    for row in ROWS:
        lines.print(row)
    assert capsys.readouterr().out.splitlines()[0] == "key,bytes,tags"
    lines = Stream(COLUMNS, Output.YAML)
    for row in ROWS:
        lines.print(row)
    assert len(list(yaml.safe_load_all(capsys.readouterr().out))) == 2
    Stream(COLUMNS, Output.TABLE).print(ROWS[1], f"put {HOSTILE_TEXT}")
    assert capsys.readouterr().out.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "words",
    [
        ("keys", "train", "--bogus", "-o", "json"),
        ("keys", "-o", "json"),
        ("keyz", "train", "--output=json"),
        ("check", "perf", "--count", "x", "-ojson"),
        ("checkpoint", "save", "--output", "json"),
        ("trace", "u1", "--by", "nothing", "-o", "json"),
    ],
    ids=" ".join,
)
def test_a_line_that_cannot_be_read_is_refused_in_json_too(words: tuple[str, ...]) -> None:
    said = Operator({"DATAPLANE_RUNTIME_DIR": "/nonexistent"}).ask(*words, ok=False)
    assert said.code == 2
    assert said.out == ""
    assert said.error["error"]["type"] == "InvalidRequest"
    assert said.error["error"]["message"]
    assert len(said.err.splitlines()) == 1


def test_people_are_told_how_a_command_is_used() -> None:
    said = Operator({"DATAPLANE_RUNTIME_DIR": "/nonexistent"}).ask("keys", "--bogus", ok=False)
    assert said.code == 2
    assert said.err.startswith("Usage: dataplane keys ")
    assert "No such option: --bogus" in said.err
