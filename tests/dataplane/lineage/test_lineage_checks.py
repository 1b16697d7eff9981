"""Each rule: a group that keeps it, and one that breaks it, with the two requests that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataplane.lineage.rules import RULES
from tests.dataplane.lineage.story import TOKENS, UID, Story, key_of, tags_of, whole_group

Broken = tuple[Story, int, list[int]]
"""A story, the rule that it breaks, and the two requests that disagree."""

PADDING = {"uid": "pad9", "session_id": 0, "index": 0, "is_padding": True, "policy_len": 0}


def one_length() -> Broken:
    story, _ = whole_group()
    put = story.put({key_of(0): (None, {"old_logprobs": ("float32", [22])})})
    return story, 1, [2, put]


def lengths_changed_by_tags() -> Broken:
    story, _ = whole_group()
    tags = story.tag(key_of(0), seq_len=24)
    return story, 1, [2, tags]


def uid_changed() -> Broken:
    story, _ = whole_group()
    return story, 2, [2, story.tag(key_of(0), uid="other")]


def session_twice() -> Broken:
    story, _ = whole_group()
    twin = story.put({"twin": (tags_of(1), TOKENS)})
    story.entries.insert(4, story.entries.pop())  # before the end, where it may come
    _renumber(story)
    return story, 2, [3, twin - 1]


def session_beyond_n() -> Broken:
    story = Story()
    attempt = story.begin(n=1)
    return story, 2, [0, story.put({key_of(1): (tags_of(1), TOKENS)}, attempt=attempt)]


def too_many_supervised() -> Broken:
    story, _ = whole_group()
    return story, 3, [2, story.tag(key_of(0), policy_len=15)]


def spans_that_do_not_sum() -> Broken:
    story, _ = whole_group()
    return story, 3, [2, story.tag(key_of(0), policy_spans=[[11, 4], [12, 5]])]


def padding_in_metrics() -> Broken:
    story, _ = whole_group()
    put = story.put({"pad": (PADDING, TOKENS)})
    return story, 4, [put, story.get([key_of(0), "pad"], ["labels"], stage="metrics")]


def padding_that_counts() -> Broken:
    story, _ = whole_group()
    put = story.put({"pad": (PADDING, TOKENS)})
    return story, 4, [put, story.tag("pad", policy_len=3)]


def rows_swapped() -> Broken:
    story, _ = whole_group()
    story.note("put", 2, [key_of(0)], "labels", [b"0" * 8])
    story.note("put", 3, [key_of(1)], "labels", [b"1" * 8])
    got = story.get([key_of(0)], ["labels"])
    story.note("get", got, [key_of(0)], "labels", [b"1" * 8])
    return story, 5, [2, got]


def value_changed() -> Broken:
    story, _ = whole_group()
    story.note("put", 2, [key_of(0)], "labels", [b"0" * 8])
    got = story.get([key_of(0)], ["labels"])
    story.note("get", got, [key_of(0)], "labels", [b"x" * 8])
    return story, 8, [2, got]


def advantages_too_short() -> Broken:
    story, _ = whole_group()
    put = story.put({key_of(0): (None, {"advantages": ("float32", [13])})})
    return story, 9, [2, put]


def key_left_over() -> Broken:
    story, _ = whole_group()
    return story, 10, [3, story.clear(key_of(0), UID)]


def key_revived() -> Broken:
    story, _ = whole_group()
    clear = story.clear(key_of(0), key_of(1), UID)
    return story, 10, [clear, story.put({key_of(0): (tags_of(0), TOKENS)})]


def trajectory_after_the_end() -> Broken:
    story, _ = whole_group()
    late = tags_of(1, index=1)
    return story, 11, [4, story.put({f"{UID}_1_1": (late, TOKENS)})]


def prompt_that_is_a_trajectory() -> Broken:
    story, _ = whole_group()
    return story, 11, [1, story.tag(UID, session_id=0)]


def status_that_goes_back() -> Broken:
    story, _ = whole_group()
    return story, 12, [4, story.tag(UID, status="running")]


def status_that_nobody_knows() -> Broken:
    story = Story()
    story.tag(UID, is_prompt=True, status="pending", uid=UID)
    return story, 12, [0, story.tag(UID, status="halfway")]


def _renumber(story: Story) -> None:
    for number, entry in enumerate(story.entries):
        entry["number"] = entry["n"] = number


BROKEN = [
    one_length, lengths_changed_by_tags, uid_changed, session_twice, session_beyond_n,
    too_many_supervised, spans_that_do_not_sum, padding_in_metrics, padding_that_counts,
    rows_swapped, value_changed, advantages_too_short, key_left_over, key_revived,
    trajectory_after_the_end, prompt_that_is_a_trajectory, status_that_goes_back,
    status_that_nobody_knows,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.__name__)
def test_a_broken_rule_names_both_requests(broken: Callable[[], Broken]) -> None:
    story, rule, records = broken()
    failures = [each for each in story.failures() if each.rule == rule]
    assert failures, story.failures()
    assert records in [each.records for each in failures], failures
    assert all(f"#{number} " in failures[0].text for number in failures[0].records)
    assert not [each for each in story.failures() if each.rule != rule]


def test_every_rule_that_requests_can_judge_has_a_case() -> None:
    judged = {broken()[1] for broken in BROKEN}
    assert set(RULES) - judged == {6, 7, 13, 14, 15}


def test_a_whole_life_breaks_no_rule() -> None:
    story, _ = whole_group()
    story.put({"pad": (PADDING | {"seq_len": 23}, TOKENS)})
    story.get([key_of(0), key_of(1), "pad"], ["input_ids", "labels"], stage="update_actor")
    shorter: dict[str, Any] = {"advantages": ("float32", [14]), "returns": ("float32", [23])}
    story.put({key_of(0): (None, shorter), key_of(1): (None, shorter)})
    story.clear(UID)
    story.clear(key_of(0), key_of(1), "pad")
    trace = story.trace()
    assert trace.failed == []
    said = {each.rule: each.status for each in trace.findings}
    assert [rule for rule, status in said.items() if status == "ok"] == [1, 2, 3, 4, 9, 10, 11, 12]
    assert all(each.text for each in trace.findings if each.status == "not judged")


def test_a_group_that_is_reissued_breaks_no_rule() -> None:
    story, _ = whole_group()
    story.clear(where={"uid": UID})
    story.tag(UID, is_prompt=True, status="pending", uid=UID, n=2)
    attempt = story.begin()
    for session in range(2):
        story.put({key_of(session): (tags_of(session), TOKENS)}, attempt=attempt)
    story.end(attempt)
    assert story.failures() == []


def test_a_session_that_is_published_anew_while_its_group_is_open_breaks_no_rule() -> None:
    story = Story()
    attempt = story.begin()
    for _ in range(2):
        story.put({key_of(0): (tags_of(0), TOKENS)}, attempt=attempt)
        story.clear(key_of(0))
    story.put({key_of(0): (tags_of(0), TOKENS)}, attempt=attempt)
    story.end(attempt)
    assert story.failures() == []


def test_the_rules_are_those_of_the_page(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "trace.md").read_text()
    for rule, name in RULES.items():
        assert f"| {rule} | {name} |" in page
