"""Trajectories from outside: they become the rows of our own loops, or say what is wrong."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.trajectory.meta import write_train_meta
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.state import RolloutState, Status
from dataplane import InvalidRequest
from dataplane.fields import PROMPT_TAGS, TRAJECTORY_TAGS
from dataplane.gateway.trajectory.ingest import Ingested, IngestRules, ingest
from dataplane.protocol.values import tags_to, to_value
from dataplane.v1 import dataplane_pb2 as pb
from tests.agentloop.states import canonical_states, completed, tool_loop
from tests.dataplane.gateway.trajectories import IGN, message_of, right, spans

RULES = IngestRules(vocab_size=50_001, max_tokens=64)


def only(message: pb.Trajectory, **options: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Key, fields and tags of the one row that a trajectory makes."""
    found = ingest([message], RULES, **options)
    assert not found.refused, found.refused[0].reason
    (key,), (tags,) = found.keys, found.tags
    return key, {name: column[0] for name, column in found.fields.items()}, tags


def reason(message: pb.Trajectory, rules: IngestRules = RULES) -> str:
    """Why a trajectory is refused."""
    found = ingest([message], rules)
    assert (found.keys, found.fields, found.tags) == ([], {}, [])
    (refused,) = found.refused
    return refused.reason


def assert_same_row(message: pb.Trajectory, state: RolloutState) -> None:
    """The row is the one that our own loops publish, field by field and tag by tag."""
    key, fields, tags = only(message)
    assert key == state.key
    due = trajectory_fields(state)
    assert set(fields) == set(due)
    for name, value in due.items():
        if isinstance(value, np.ndarray):
            assert fields[name].dtype == value.dtype, name
            np.testing.assert_array_equal(fields[name], value, err_msg=name)
        else:
            assert fields[name] == value, name
    own = trajectory_tags(state)
    assert tags == own
    assert {name: type(value) for name, value in tags.items()} == {
        name: type(value) for name, value in own.items()
    }


# -- the rows of our own loops --------------------------------------------------------------------


@given(canonical_states())
def test_a_row_from_outside_is_the_row_of_our_own_loop(state: RolloutState) -> None:
    state.response_model_steps.sort()
    write_train_meta(state)
    state.logprob_kind = "raw"
    state.finish_reason = "length"
    state.extra = {"group_generate_time_s": 1.5, "why": [None, "x"]}
    assert_same_row(message_of(state), state)


@pytest.mark.parametrize("reward", [None, {"score": 0.5}])
def test_one_that_failed_leaves_its_tags_alone(reward: dict[str, float] | None) -> None:
    state = completed(index=3, session_id=2, task_name="calc", reward=reward)
    state.fail("the judge is gone")
    assert_same_row(message_of(state), state)
    _, fields, tags = only(message_of(state))
    assert fields == {}
    assert tags["error_msg"] == "the judge is gone"


@pytest.mark.parametrize("reward", [None, {"score": 0.5}])
def test_one_that_was_interrupted_keeps_what_it_has(reward: dict[str, float] | None) -> None:
    state = tool_loop()
    state.status, state.finish_reason, state.reward = Status.ABORTED, "abort", reward
    assert_same_row(message_of(state), state)


@pytest.mark.parametrize("reward", [None, {"score": 0.5}])
def test_one_that_was_interrupted_before_its_first_token(reward: dict[str, float] | None) -> None:
    state = completed(response_ids=[], status=Status.ABORTED, reward=reward)
    assert_same_row(message_of(state), state)


def test_the_tags_of_a_row_are_those_of_the_table() -> None:
    key, fields, tags = only(
        right(
            session_id=3,
            index=1,
            global_steps=9,
            task_name="calc",
            data_source="made",
            tags=tags_to({"mine": [1, {"a": None}], "note": "ü"}),
        ),
        attempt=12,
    )
    assert key == "u_3_1"
    assert tags == {
        "uid": "u", "session_id": 3, "index": 1, "status": "completed", "attempt": 12,
        "prompt_len": 2, "response_len": 4, "seq_len": 6, "policy_len": 3, "num_turns": 2,
        "min_global_steps": 7, "max_global_steps": 8, "policy_spans": [[7, 2], [8, 1]],
        "global_steps": 9, "score": 1.0, "finish_reason": "stop", "task_name": "calc",
        "data_source": "made", "ids_source": "engine", "logprob_kind": "processed",
        "position_layout": "1d", "has_rollout_logprobs": True, "has_routed_experts": False,
        "mine": [1, {"a": None}], "note": "ü",
    }  # fmt: skip
    assert set(tags) - {"mine", "note"} <= set(TRAJECTORY_TAGS)
    assert fields["response_model_steps"].tolist() == [7, 7, 7, 8]
    assert fields["reward"] == {"score": 1.0}
    assert {name: str(fields[name].dtype) for name in fields if name != "reward"} == {
        "input_ids": "int64", "labels": "int64", "logprobs": "float32",
        "response_model_steps": "int64",
    }  # fmt: skip


def test_what_is_not_known_is_left_out() -> None:
    _, fields, tags = only(
        right(logprobs=None, policy_spans=None, reward=None, finish_reason=None, ids_source=None)
    )
    assert set(fields) == {"input_ids", "labels"}
    assert tags == {
        "uid": "u", "session_id": 0, "index": 0, "status": "completed", "prompt_len": 2,
        "response_len": 4, "seq_len": 6, "policy_len": 3, "num_turns": 2, "position_layout": "1d",
        "has_rollout_logprobs": False, "has_routed_experts": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "due"),
    [
        ([(4, 4)], [[4, 3]]),
        ([(4, 1), (4, 3)], [[4, 3]]),
        ([(0, 2), (1, 1), (2, 1)], [[0, 2], [2, 1]]),
        ([(1, 2), (2, 1), (2, 1)], [[1, 2], [2, 1]]),
    ],
    ids=["one", "same twice", "one that trains nothing", "same after that"],
)
def test_spans_say_what_is_trained_of_each_version(
    runs: list[tuple[int, int]], due: list[list[int]]
) -> None:
    _, fields, tags = only(right(policy_spans=spans(*runs)))
    assert tags["policy_spans"] == due
    assert (tags["min_global_steps"], tags["max_global_steps"]) == (runs[0][0], runs[-1][0])
    assert fields["response_model_steps"].tolist() == [v for v, n in runs for _ in range(n)]


def test_a_response_that_trains_nothing_names_no_spans() -> None:
    _, _, tags = only(right(labels=[IGN] * 6, logprobs=[0] * 6))
    assert tags["policy_len"] == 0
    assert "policy_spans" not in tags
    assert (tags["min_global_steps"], tags["max_global_steps"]) == (7, 8)


def test_rounding_above_zero_is_put_back() -> None:
    _, fields, _ = only(right(logprobs=[0, 0, 1e-4, -0.25, 0, -9998]))
    assert fields["logprobs"].tolist() == [0, 0, 0, -0.25, 0, -9998]


def test_empty_objects_are_as_good_as_none() -> None:
    _, fields, _ = only(right(messages=to_value([]), extra=to_value({})))
    assert not {"messages", "extra"} & set(fields)
    _, fields, _ = only(right(messages=to_value([{"role": "user"}]), extra=to_value({"a": b"b"})))
    assert fields["messages"] == [{"role": "user"}]
    assert fields["extra"] == {"a": b"b"}


# -- what is wrong --------------------------------------------------------------------------------


def span(version: int, start: int, end: int) -> pb.PolicySpan:
    return pb.PolicySpan(version=version, start=start, end=end)


LONG = list(range(65))

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "uid empty": ({"uid": ""}, "uid is ''"),
    "uid bell": ({"uid": "a\x07"}, r"uid is 'a\\x07'"),
    "uid path": ({"uid": "../up"}, "'..' path component"),
    "uid long": ({"uid": "x" * 1100}, "1104 bytes; at most 1024"),
    "session": ({"session_id": -1}, "session_id is -1"),
    "index": ({"index": -2}, "index is -2"),
    "status": ({"status": 9}, "status is 9"),
    "finish": ({"finish_reason": 7}, "finish_reason is 7"),
    "ids source": ({"ids_source": 5}, "ids_source is 5"),
    "silent failure": ({"status": pb.TRAJECTORY_STATUS_FAILED}, "error is empty"),
    "turns": ({"num_turns": -1}, "num_turns is -1"),
    "steps": ({"global_steps": -1}, "global_steps is -1"),
    "too long": ({"input_ids": LONG, "labels": [IGN] * 65}, "65 tokens; at most 64"),
    "no token": ({"input_ids": None, "labels": None, "logprobs": None}, "input_ids has 0 tokens"),
    "one token": ({"input_ids": [1], "labels": [1], "prompt_len": 0}, "has 1 tokens"),
    "labels short": ({"labels": [IGN] * 5}, "labels has 5 entries for 6 tokens"),
    "labels none": ({"labels": None}, "labels has 0 entries for 6 tokens"),
    "logprobs long": ({"logprobs": [0.0] * 7}, "logprobs has 7 entries for 6 tokens"),
    "prompt 0": ({"prompt_len": 0}, "prompt_len is 0: of 6 tokens, 1 to 5 are the prompt"),
    "prompt all": ({"prompt_len": 6}, "prompt_len is 6"),
    "prompt below": ({"prompt_len": -3}, "prompt_len is -3"),
    "id below": ({"input_ids": [10, 11, 20, -1, 90, -2]}, r"input_ids\[3\] is -1"),
    "id beyond": (
        {"input_ids": [10, 50_001, 20, 21, 90, 22]},
        r"input_ids\[1\] is 50001, which is no token of a vocabulary of 50001",
    ),
    "other label": (
        {"labels": [IGN, IGN, 20, 22, IGN, 21]},
        r"labels\[3\] is 22: it is the token itself, 21,",
    ),
    "other ignored": ({"labels": [-1, IGN, 20, 21, IGN, 22]}, r"labels\[0\] is -1"),
    "label 0": ({"labels": [10, IGN, 20, 21, IGN, 22]}, r"labels\[0\] is 10: the prompt, of 2"),
    "label of the prompt": ({"labels": [IGN, 11, 20, 21, IGN, 22]}, r"labels\[1\] is 11"),
    "nan": ({"logprobs": [0, 0, -1, math.nan, 0, math.nan]}, r"logprobs\[3\] is nan"),
    "inf": ({"logprobs": [0, 0, -1, math.inf, 0, -1]}, r"logprobs\[3\] is inf"),
    "minus inf": ({"logprobs": [0, 0, -1, 0, 0, -math.inf]}, r"logprobs\[5\] is -inf"),
    "floor": ({"logprobs": [0, 0, -9999, -1, 0, -1]}, r"logprobs\[2\] is -9999"),
    "probability": ({"logprobs": [0, 0, 0.5, -1, 0, -1]}, r"logprobs\[2\] is 0.5"),
    "nan of a prompt": ({"logprobs": [math.nan, 0, -1, -1, 0, -1]}, r"logprobs\[0\] is nan"),
    "logprob of a tool": (
        {"logprobs": [0, 0, -1, -1, -0.5, -1]},
        r"logprobs\[4\] is -0.5: it is 0 where labels has -100",
    ),
    "span late": ({"policy_spans": [span(1, 1, 4)]}, r"policy_spans\[0\] is \[1, 4\)"),
    "span gap": ({"policy_spans": [span(1, 0, 2), span(1, 3, 4)]}, r"_spans\[1\] is \[3, 4\)"),
    "span empty": ({"policy_spans": [span(1, 0, 0), span(1, 0, 4)]}, r"policy_spans\[0\]"),
    "span long": ({"policy_spans": spans((1, 5))}, r"policy_spans\[0\] is \[0, 5\).* ends by 4"),
    "span short": ({"policy_spans": spans((1, 2), (1, 1))}, r"policy_spans\[1\] ends at 3"),
    "span older": ({"policy_spans": spans((2, 2), (1, 2))}, r"policy_spans\[1\] is of version 1"),
    "span below": ({"policy_spans": spans((-1, 4))}, r"policy_spans\[0\] is of version -1"),
    "reward": ({"reward": math.inf}, "reward is inf"),
    "kind": ({"logprob_kind": "cooked"}, "logprob_kind is 'cooked', none of raw, processed"),
    "our tag": ({"tags": tags_to({"score": 9})}, r"tags\['score'\] is a name that is kept"),
    "plane's tag": ({"tags": tags_to({"dataplane.lost": 1})}, r"tags\['dataplane.lost'\]"),
    "no tag": ({"tags": tags_to({"mine": b"\0"})}, "tag 'mine'"),
    "large tags": ({"tags": tags_to({"mine": "x" * 70_000})}, "at most 65536 a key"),
    "large error": ({"error": "x" * 70_000}, "at most 65536 a key"),
    "silent tag": ({"tags": pb.Tags(values={"mine": pb.Value()})}, "a Value says nothing"),
    "messages": ({"messages": to_value({"role": "user"})}, "messages is a dict"),
    "a message": ({"messages": to_value([{}, "hi"])}, r"messages\[1\] is a str"),
    "silent messages": ({"messages": pb.Value()}, "messages: a Value says nothing"),
    "extra": ({"extra": to_value([1])}, "extra is a list"),
    "time": ({"extra": to_value({"group_generate_time_s": "1"})}, "is a str, where seconds is due"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_trajectory_says_what_and_where(case: str) -> None:
    values, due = WRONG[case]
    said = reason(right(**values))
    assert re.search(due, said), said
    assert ingest([right()], RULES).keys == ["u_0_0"]


@pytest.mark.parametrize("name", sorted({*TRAJECTORY_TAGS, *PROMPT_TAGS}))
def test_no_tag_of_ours_is_set_from_outside(name: str) -> None:
    assert "is a name that is kept" in reason(right(tags=tags_to({name: 1})))


def test_an_interrupted_one_is_held_to_the_same_rules_as_far_as_it_came() -> None:
    aborted = pb.TRAJECTORY_STATUS_ABORTED
    assert "prompt_len is 6" in reason(right(status=aborted, prompt_len=6))
    assert "input_ids has 0 tokens" in reason(right(status=aborted, input_ids=None))
    assert only(right(status=aborted))[2]["status"] == "aborted"


def test_without_a_vocabulary_any_number_from_0_on_is_a_token() -> None:
    message = right(input_ids=[2**31 - 1] * 6, labels=[IGN] * 6, logprobs=None)
    assert ingest([message], IngestRules()).keys == ["u_0_0"]
    assert "is no token of a vocabulary" in reason(message)


def test_the_wrong_ones_are_told_apart_and_the_rest_is_one_batch() -> None:
    messages = [
        right(session_id=0),
        right(session_id=1, labels=[]),
        right(session_id=2),
        right(uid=""),
        right(session_id=2),
    ]
    found = ingest(messages, RULES)
    assert found.keys == ["u_0_0", "u_2_0"]
    assert found.indices == [0, 2]
    assert [len(column) for column in found.fields.values()] == [2] * 5
    assert [(one.index, one.key) for one in found.refused] == [(1, "u_1_0"), (3, ""), (4, "u_2_0")]
    assert "the key of trajectories[2], 'u_2_0'" in found.refused[2].reason
    with pytest.raises(InvalidRequest, match=r"trajectories\[1\]: labels has 0 .*; trajectories"):
        found.check_whole()
    ingest(messages[:1], RULES).check_whole()


def test_a_wrong_one_does_not_keep_the_key_from_a_right_one() -> None:
    assert ingest([right(labels=[]), right()], RULES).indices == [1]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"logprobs": None}, "logprobs"),
        ({"policy_spans": None}, "response_model_steps"),
        ({"reward": None}, "reward"),
        ({"messages": to_value([{"role": "user"}])}, "messages"),
        ({"status": pb.TRAJECTORY_STATUS_FAILED, "error": "no"}, "input_ids, labels, logprobs"),
    ],
)
def test_what_cannot_be_one_put_is_refused_as_a_whole(values: dict[str, Any], name: str) -> None:
    odd = right(session_id=1, **values)
    for messages in ([right(), odd], [odd, right()]):
        with pytest.raises(InvalidRequest, match=rf"\[0\] and trajectories\[1\] differ in {name}"):
            ingest(messages, RULES)
    assert len(ingest([right(uid="", **values), right()], RULES).keys) == 1


def test_nothing_makes_nothing() -> None:
    assert ingest([], RULES) == Ingested()


# -- any message ----------------------------------------------------------------------------------

SMALL = st.integers(-3, 8)
IDS = st.lists(st.integers(-1, 5), max_size=6)
NAMES = st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def any_messages(draw: st.DrawFn) -> pb.Trajectory:
    """Messages of any kind, and right ones that have gone wrong in one or two places."""
    odd: dict[str, st.SearchStrategy[Any]] = {
        "uid": st.text(max_size=3),
        "session_id": SMALL,
        "index": SMALL,
        "input_ids": IDS,
        "labels": st.lists(st.sampled_from([IGN, -1, 0, 1, 20, 21]), max_size=6),
        "logprobs": st.lists(st.floats(width=32), max_size=6),
        "prompt_len": SMALL,
        "policy_spans": st.lists(st.builds(span, SMALL, SMALL, SMALL), max_size=3),
        "reward": st.floats(),
        "finish_reason": SMALL,
        "status": SMALL,
        "error": st.text(max_size=3),
        "num_turns": SMALL,
        "global_steps": SMALL,
        "ids_source": SMALL,
        "logprob_kind": st.sampled_from(["", "raw", "other"]),
        "tags": st.dictionaries(st.sampled_from(["uid", "a", "dataplane.x"]), VALUES).map(tags_to),
        "messages": VALUES.map(to_value),
        "extra": VALUES.map(to_value),
    }
    chosen = draw(
        st.lists(st.sampled_from(sorted(odd)), max_size=3, unique=True) | st.just(list(odd))
    )
    return right(**{name: draw(odd[name]) for name in chosen})


@settings(max_examples=200)
@given(any_messages())
def test_any_message_is_a_canonical_row_or_has_a_reason(message: pb.Trajectory) -> None:
    found = ingest([message], RULES)
    if found.refused:
        assert found.refused[0].reason
        assert not found.keys
        return
    (tags,) = found.tags
    assert tags["uid"] == message.uid
    assert tags["status"] in ("completed", "failed", "aborted")
    if not found.fields:
        assert tags["status"] != "completed"
        return
    ids, labels = found.fields["input_ids"][0], found.fields["labels"][0]
    assert len(ids) == len(labels) == tags["seq_len"] == tags["prompt_len"] + tags["response_len"]
    assert set(labels[: tags["prompt_len"]].tolist()) == {IGN}
    assert all(label in (IGN, token) for token, label in zip(ids, labels, strict=True))
    assert tags["policy_len"] == int((labels[1:] != IGN).sum())
    if "logprobs" in found.fields:
        logprobs = found.fields["logprobs"][0]
        assert np.isfinite(logprobs).all()
        assert not logprobs[labels == IGN].any()
    if "response_model_steps" in found.fields:
        steps = found.fields["response_model_steps"][0]
        assert len(steps) == tags["response_len"]
        assert (steps[1:] >= steps[:-1]).all()
        assert sum(n for _, n in tags.get("policy_spans", [])) == tags["policy_len"]
