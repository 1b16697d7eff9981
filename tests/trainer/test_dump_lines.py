"""The lines of trajectory files: their form and their statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.rows import failed, tags
from trainer.dump.lines import Tokenizer, dump_lines, to_json
from trainer.dump.reading import DumpRow

QUESTION = [{"role": "user", "content": "2+3?"}]
ANSWER = {"role": "assistant", "content": "Die Lösung ist 5"}


class Digits:
    """A tokenizer of one character a token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def none() -> Tokenizer | None:
    raise AssertionError("no row needed a tokenizer")


def row(session: int = 0, score: float | None = 1.0, response: int = 3, **fields: Any) -> DumpRow:
    its = tags("u", session, score=score, response=response)
    its = {k: v for k, v in its.items() if v is not None}
    return DumpRow(f"u_{session}_0", its, {"messages": [*QUESTION, ANSWER], **fields})


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def parsed(line: dict[str, Any]) -> Any:
    return json.loads(to_json(line), parse_constant=refuse)


def test_ex_8_4_training_deviates_as_a_sample_and_evaluation_as_a_population() -> None:
    rows = [row(0, 1.0, 3), row(1, 0.0, 6)]
    lines = dump_lines(rows, "train", none)
    assert len(lines) == 3
    assert lines[0] == {
        "reward_mean": 0.5, "reward_std": pytest.approx(0.7071068),
        "reward_max": 1.0, "reward_min": 0.0,
        "response_len_mean": 4.5, "response_len_std": pytest.approx(2.1213203),
        "response_len_max": 6, "response_len_min": 3, "total_len": 2,
    }  # fmt: skip
    summary = dump_lines(rows, "eval", none)[0]
    assert (summary["reward_std"], summary["response_len_std"]) == (0.5, 1.5)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_rg_25_one_sample_deviates_by_0_and_parses_strictly(kind: Any) -> None:
    lines = [parsed(line) for line in dump_lines([row()], kind, none)]
    assert lines[0]["reward_std"] == lines[0]["response_len_std"] == 0.0
    assert lines[0]["total_len"] == 1


def test_no_sample_has_the_statistics_of_0() -> None:
    (summary,) = dump_lines([], "train", none)
    assert summary.pop("total_len") == 0
    assert set(summary.values()) == {0.0}


def test_rg_37_a_kept_row_without_a_reward_is_null_and_in_no_statistic() -> None:
    rows = [row(0, None, 3), row(1, 0.5, 6)]
    lines = dump_lines(rows, "train", none)
    assert parsed(lines[1])["reward"] is None
    assert (lines[0]["reward_mean"], lines[0]["reward_std"]) == (0.5, 0.0)
    assert (lines[0]["response_len_mean"], lines[0]["total_len"]) == (4.5, 2)
    (summary, line) = dump_lines([row(0, None)], "train", none)
    assert (line["reward"], summary["reward_max"]) == (None, 0.0)


def test_in_an_evaluation_a_missing_reward_is_0() -> None:
    lines = dump_lines([row(0, None), DumpRow("f", failed().tags)], "eval", none)
    assert [line["reward"] for line in lines[1:]] == [0.0, 0.0]
    assert lines[2]["error_msg"] == "boom"
    assert (lines[2]["response"], lines[2]["response_len"], lines[2]["prompt_len"]) == (None, 0, 0)


def test_a_line_has_the_members_of_8_6_in_their_order() -> None:
    one = row(
        reward={"score": 1.0, "judge": "exact"},
        extra={"agent_name": "calculator", "agent_judgers": ["exact"], "other": 1},
    )
    one.prompt = {"messages": QUESTION, "extra": {"row": {"answer": "5", "question": "2+3?"}}}
    one.tags = {**one.tags, "num_turns": 2, "task_name": "sums", "finish_reason": "stop"}
    line = dump_lines([one], "train", none)[1]
    assert (
        list(line)
        == (
            "rollout_id group_id task_name data_source status finish_reason error_msg prompt label "
            "response reward prompt_len response_len supervised_len reward_payload agent"
        ).split()
    )
    assert list(line["agent"]) == (
        "name selected status judgers finish_info tool_turns artifacts messages tools".split()
    )
    assert (line["rollout_id"], line["group_id"], line["task_name"]) == ("u_0_0", "u", "sums")
    assert (line["prompt"], line["label"]) == (QUESTION, "5")
    assert line["response"] == "Die Lösung ist 5"
    assert line["reward_payload"] == {"score": 1.0, "judge": "exact"}
    agent = line["agent"]
    assert (agent["name"], agent["judgers"], agent["selected"]) == ("calculator", ["exact"], None)
    assert agent["tool_turns"] == 2
    assert agent["messages"] == [*QUESTION, ANSWER]


def test_rg_21_prompt_len_is_the_prompts_and_supervised_len_is_said_too() -> None:
    one = row()
    one.tags = {**one.tags, "policy_len": 2}
    line = dump_lines([one], "train", none)[1]
    assert (line["prompt_len"], line["response_len"], line["supervised_len"]) == (3, 3, 2)


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ({"reward_model": {"ground_truth": "a"}, "answer": "b"}, "a"),
        ({"ground_truth": 7}, 7),
        ({"reward_model": "none", "solution": "x"}, "x"),
        ({"question": "?"}, None),
        (None, None),
    ],
)
def test_the_label_is_what_the_dataset_says_is_right(source: Any, label: Any) -> None:
    one = row()
    one.prompt = {"extra": {"row": source}}
    assert dump_lines([one], "train", none)[1]["label"] == label
    assert dump_lines([row()], "train", none)[1]["prompt"] == QUESTION  # of the conversation


def test_a_response_without_text_is_decoded() -> None:
    ids = torch.tensor([9, 9, 9, *map(ord, "5.")])
    one = DumpRow("k", tags(response=2), {"input_ids": ids})
    assert dump_lines([one], "train", Digits)[1]["response"] == "5."
    assert dump_lines([one], "train", lambda: None)[1]["response"] is None


def test_a_response_without_lengths_is_counted_again() -> None:
    one = row()
    lengthless = {k: v for k, v in one.tags.items() if k not in ("response_len", "policy_len")}
    one.tags = lengthless
    assert dump_lines([one], "train", Digits)[1]["response_len"] == len("Die Lösung ist 5")
    one.tags = {**lengthless, "policy_len": 2}
    assert dump_lines([one], "train", none)[1]["response_len"] == 2


def test_lines_are_compact_utf_8_and_strict() -> None:
    odd = {
        "nan": math.nan, "inf": [math.inf, -1.0], "array": np.array([1, 2]), "t": torch.ones(2),
        "np": np.float32(0.5), "bytes": b"abc", "tuple": (1, 2), "text": "Lösung\n\ud800", 3: None,
    }  # fmt: skip
    data = to_json({"odd": odd})
    assert data.count(b"\n") == 1
    assert "Lösung".encode() in data
    assert b'": ' not in data
    assert json.loads(data, parse_constant=refuse)["odd"] == {
        "nan": None, "inf": [None, -1.0], "array": [1, 2], "t": [1.0, 1.0], "np": 0.5,
        "bytes": "3 bytes", "tuple": [1, 2], "text": "Lösung\n\ud800", "3": None,
    }  # fmt: skip
