"""Rows of a trace: tags at each request are the fold of those before it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.lineage.diff import differences
from dataplane.lineage.export import chrome, row_from_data, rows_as_data, spans
from tests.dataplane.lineage.story import TOKENS, UID, Story, key_of, tags_of, whole_group

KEYS = ("a", "b")
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("tag"), st.sampled_from(KEYS),
            st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3), min_size=1),
        ),
        st.tuples(st.just("clear"), st.sets(st.sampled_from(KEYS), min_size=1), st.none()),
        st.tuples(st.just("where"), st.sampled_from("xyz"), st.integers(0, 3)),
    ),
    max_size=30,
)  # fmt: skip


@given(STEPS)
def test_tags_are_folded_as_the_store_merges_them(steps: list[tuple[str, Any, Any]]) -> None:
    story = Story()
    now: dict[str, dict[str, Any]] = {}
    gens: dict[str, int] = dict.fromkeys(KEYS, 0)
    expected: list[tuple[str, str, Any, int]] = []
    for what, of, value in steps:
        if what == "tag":
            gens[of] += of not in now
            now.setdefault(of, {}).update(value)
            story.tag(of, policy_len=sum(now[of].values()), **value)
            expected.append(("tag", of, sum(now[of].values()), gens[of]))
            continue
        if what == "clear":
            gone = sorted(key for key in of if key in now)
            if not gone:
                continue  # the store journals no clear that changes nothing
            story.clear(*gone)
        else:
            gone = [key for key in KEYS if key in now and now[key].get(of) == value]
            story.clear(where={of: value})
        for key in gone:
            expected.append(("clear", key, sum(now.pop(key).values()), gens[key]))
    rows = story.trace(uid=None, key="a").rows
    got = [(row.op, row.key, row.mask_sum, row.gen) for row in rows]
    assert sorted(got) == sorted(expected)


def test_columns_of_a_whole_group() -> None:
    story, _ = whole_group()
    story.get([key_of(0), key_of(1)], ["input_ids"], stage="update_actor", client="c2")
    trace = story.trace()
    (row,) = [r for r in trace.rows if r.key == key_of(1) and r.field == "labels"]
    assert (row.stage, row.op, row.status) == ("rollout", "put", "ok")
    assert (row.uid, row.session_id, row.index) == (UID, 1, 0)
    assert (row.dtype, row.shape, row.layout) == ("int64", [23], "jagged(0)")
    assert (row.len, row.valid_len, row.mask_sum, row.bytes) == (23, 23, 10, 184)
    assert (row.global_steps, row.min_global_steps, row.max_global_steps) == (12, 11, 12)
    assert (row.producer, row.consumer, row.gen) == ("agentloop", "", 1)
    (read,) = [r for r in trace.rows if r.op == "get" and r.key == key_of(1)]
    assert (read.producer, read.consumer, read.shape) == ("agentloop", "w4:9", [23])
    (written,) = [r for r in trace.rows if r.key == key_of(1) and r.field == "input_ids"
                  and r.op == "put"]  # fmt: skip
    assert written.consumer == "w4:9"
    assert trace.status == "finished"
    assert trace.sessions == (2, 2)
    assert trace.never_read == ["labels"]
    json.dumps(asdict(trace))


@pytest.mark.parametrize(
    ("said", "fields", "stages"),
    [
        ("", ["input_ids", "labels", "rm_scores"], ["rollout"] * 3),
        ("", ["old_logprobs", "ref_logprobs"], ["old_log_prob", "ref_log_prob"]),
        ("", ["values"], ["values"]),
        ("", ["advantages", "returns"], ["advantage", "advantage"]),
        ("", ["rm_scores"], ["reward"]),
        ("", ["unheard_of"], [""]),
        ("mine", ["advantages"], ["mine"]),
        ("update_actor", ["old_logprobs"], ["old_log_prob"]),
    ],
)
def test_a_stage_that_nobody_said_is_told_by_fields(
    said: str, fields: list[str], stages: list[str]
) -> None:
    story = Story()
    story.put({"k": (None, {name: ("float32", [3]) for name in fields})}, stage=said)
    assert [row.stage for row in story.trace(None, "k").rows] == stages


def test_a_group_that_begins_anew_drops_the_rows_of_its_older_attempt() -> None:
    story, _ = whole_group()
    story.begin()
    trace = story.trace()
    dropped = [row for row in trace.rows if row.op == "clear"]
    assert [row.key for row in dropped] == [key_of(0), key_of(1)]
    assert trace.status == "running"
    assert not trace.failed


def test_what_came_before_what_is_remembered_is_not_made_up() -> None:
    story = Story()
    story.gone = 40
    story.present = [["train", "k", 9, {"uid": UID, "session_id": 1, "index": 0}, []]]
    story.get(["k"], ["input_ids"])
    (row,) = story.trace().rows
    assert (row.uid, row.session_id, row.shape, row.producer) == (UID, 1, None, "")
    assert story.trace().gone == 40


def test_rows_from_a_request_on() -> None:
    from dataplane.lineage.assemble import assemble

    story, _ = whole_group()
    rows = assemble(story.answer(), None, UID, None, since=4).rows
    assert [row.number for row in rows] == [4]
    assert rows[0].uid == UID


def test_an_export_is_read_again_as_it_was() -> None:
    story, _ = whole_group()
    story.refuse(key_of(0), "put", "StaleWrite")
    rows = story.trace().rows
    lines = [json.dumps(row) for row in rows_as_data(rows)]
    assert [row_from_data(json.loads(line), 1) for line in lines] == rows


def test_spans_follow_each_key_through_its_stages() -> None:
    story, _ = whole_group()
    story.get([key_of(0)], ["input_ids"], stage="update_actor")
    story.clear(key_of(0), key_of(1), UID)
    told = list(spans(story.trace()))
    mine = [(span.stage, span.start, span.end) for span in told if span.key == key_of(0)]
    assert mine == [
        ("rollout", 1001.0, 1002.0), ("update_actor", 1002.0, 1005.0), ("clear", 1005.0, 1006.0),
    ]  # fmt: skip
    assert all(span.uid == UID and span.start <= span.end for span in told)
    events = chrome(story.trace())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == len(told)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        UID, key_of(0), key_of(1),
    }  # fmt: skip


def test_a_difference_names_session_stage_and_column() -> None:
    one, _ = whole_group()
    other = Story()
    other.tag(UID, is_prompt=True, status="pending", uid=UID, global_steps=12, n=2)
    attempt = other.begin()
    longer = {"input_ids": ("int64", [23]), "labels": ("int32", [23])}
    other.put({key_of(0): (tags_of(0), TOKENS)}, attempt=attempt)
    other.put({key_of(1): (tags_of(1, policy_len=9), longer)}, attempt=attempt)
    other.end(attempt)
    assert differences(one.trace().rows, one.trace().rows) == []
    found = differences(one.trace().rows, other.trace().rows)
    assert {
        (each.session_id, each.field, each.column, each.left, each.right) for each in found
    } == {
        (1, "labels", "dtype", "int64", "int32"),
        (1, "*tags*", "mask_sum", 10, 9),
        (1, "input_ids", "mask_sum", 10, 9),
        (1, "labels", "mask_sum", 10, 9),
    }
