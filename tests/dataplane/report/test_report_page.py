"""The page without a browser: what is in it, how large it is, what is escaped."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from dataplane.errors import InvalidRequest
from dataplane.report.chart import histogram, ticks
from dataplane.report.lives import Lives
from dataplane.report.markup import Markup, tag
from dataplane.report.page import page
from dataplane.report.record import as_json, from_json
from dataplane.report.timeline import MAX_BARS, spans
from dataplane.report.write import keep_record, write_report
from tests.dataplane.report.made_up import BEGIN_S, HOSTILE, plane_of, write_run


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_text_of_the_data_is_never_markup() -> None:
    elements = _Elements()
    elements.feed(page(None, plane_of(50, name=HOSTILE), made_at_s=BEGIN_S))
    assert "script" not in elements.names
    assert not {name for name in elements.attributes if name.startswith("on")}
    assert not elements.attributes & {"href", "src", "xlink:href", "action"}


def test_attributes_are_escaped_and_markup_is_not() -> None:
    assert tag("b", "<i>", title='"x"') == '<b title="&quot;x&quot;">&lt;i&gt;</b>'
    assert tag("b", Markup("<i></i>")) == "<b><i></i></b>"


def test_a_record_comes_back_as_it_was_written() -> None:
    record = plane_of(30)
    assert from_json(as_json(record)) == record


def test_a_page_of_what_was_written_down_is_the_page_of_what_was_known() -> None:
    record = plane_of(30)
    assert page(None, from_json(as_json(record)), made_at_s=BEGIN_S) == page(
        None, record, made_at_s=BEGIN_S
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "dataplane-report"}', "null", "[" * 100_000, b"\xff\xfe{"],
    ids=lambda text: f"{text[:20]!r}",
)
def test_what_is_no_record_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="no record of a plane"):
        from_json(text)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("at_s", "1e999", "at_s|finite"),
        ("at_s", "NaN", "finite"),
        ("uptime_s", "{}", "uptime_s"),
        ("capacity_bytes", "1" + "0" * 30, "too large"),
        ("groups", "5", "groups"),
        ("groups", '[{"uid": 3}]', r"groups\.0"),
        ("lengths", '{"a": {"b": ["x"]}}', r"lengths\.a\.b\.0"),
        ("samples", '{"times_s": [1], "columns": {"keys": [1, 2]}}', "2 points"),
        ("samples", '{"times_s": [1], "lags": [["p", "t", []]]}', "0 points"),
        ("status", '{"keys": {}}', "keys"),
        ("status", '{"keys": "<b>"}', "keys"),
        ("status", '{"groups": 3}', "groups"),
        ("status", '{"groups": {"finished": 1.5}}', "groups"),
        ("format_version", "2", "version 2"),
    ],
)
def test_a_record_with_a_wrong_value_is_refused_by_its_name(
    name: str, value: str, said: str
) -> None:
    document = {each: json.dumps(of) for each, of in json.loads(as_json(plane_of(3))).items()}
    document[name] = value
    text = "{" + ",".join(f'"{each}": {of}' for each, of in document.items()) + "}"
    with pytest.raises(InvalidRequest, match=f"no record of a plane.*{said}"):
        from_json(text)


def test_the_record_in_a_runs_folder_is_taken(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    keep_record(plane_of(5, name="kept-plane"), run)
    text = write_report(tmp_path / "r.html", run=run).read_text()
    assert "kept-plane" in text
    assert "Timeline of groups" in text


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no run folder"):
        write_report(tmp_path / "r.html", run=tmp_path / "absent")


def test_of_very_many_groups_the_newest_are_drawn() -> None:
    text = page(None, plane_of(2000), made_at_s=BEGIN_S)
    assert text.count("<g>") <= MAX_BARS
    assert "groups are not drawn" in text
    assert "open-1999" in text


def test_a_groups_bar_ends_where_the_group_did() -> None:
    record = plane_of(50)
    for group in record.groups:
        parts = spans(group, record.at_s)
        assert parts[0][1] == group.begun_s
        assert all(before[2] == after[1] for before, after in pairwise(parts))
        assert parts[-1][2] <= record.at_s


def test_lives_are_put_together_from_entries() -> None:
    def put(key: str, n: int) -> list[object]:
        return [key, {"prompt_len": 3, "response_len": n, "seq_len": 3 + n}, []]

    lives = Lives()
    lives.add([
        {"op": "begin", "at": 1.0, "partition": "train", "uid": "u", "attempt": 7, "sessions": 2},
        {"op": "put", "at": 2.0, "partition": "train", "attempt": 7, "rows": [put("u_0", 4)]},
        {"op": "put", "at": 3.0, "partition": "train", "attempt": 7, "rows": [put("u_1", 5)]},
        {"op": "end", "at": 4.0, "attempt": 7, "status": "finished"},
        {"op": "claim", "at": 5.0, "partition": "train", "rows": [["u_0", 1, None], ["u_1", 1, 0]]},
        {"op": "put", "at": 5.5, "partition": "train", "must_exist": True, "rows": [put("u_1", 9)]},
        {"op": "commit", "at": 6.0, "partition": "train", "keys": ["u_0", "u_1"]},
        {"op": "clear", "at": 7.0, "partition": "train", "keys": ["u_0"]},
        {"op": "get", "at": 7.5, "partition": "train", "keys": ["u_1"]},
        {"op": "clear", "at": 8.0, "partition": "train", "keys": ["u", "u_1"]},
    ])  # fmt: skip
    ((life,), left_out) = lives.groups()
    assert left_out == 0
    assert (life.uid, life.status, life.rows, life.begun_s) == ("u", "finished", 2, 1.0)
    assert (life.first_row_s, life.ended_s, life.claimed_s) == (2.0, 4.0, 5.0)
    assert (life.committed_s, life.cleared_s) == (6.0, 8.0)
    assert lives.lengths()["train"]["response_len"] == [4, 5]


def test_axes_have_few_round_numbers() -> None:
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0, 5000, 4, base=2) == [0, 2048, 4096]
    for high in (1e-9, 0.7, 3, 17, 1234.5, 8e12):
        assert 1 <= len(ticks(0, high, 5)) <= 6
    assert ticks(3, 3) == [3]


def test_a_histogram_counts_every_value_once() -> None:
    values = [1, 1, 2, 900, 901, 905]
    columns = histogram(values)
    assert sum(parts[0] for _, _, parts in columns) == len(values)
    assert all(low < high for low, high, _ in columns)
