"""Metrics of an evaluation, from tags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.rows import failed, prompt, tags
from trainer.evaluate import evaluation_metrics, mean_score


def rows(*prompts: list[float | None], **more: Any) -> list[dict[str, Any]]:
    """A session for each score of each prompt."""
    return [
        {k: v for k, v in tags(f"u{p}", s, score=score, **more).items() if v is not None}
        for p, scores in enumerate(prompts)
        for s, score in enumerate(scores)
    ]


def test_ex_8_3() -> None:
    assert evaluation_metrics(rows([1, 0], [0, 0])) == {
        "accuracy": 0.25,
        "eval_group_count": 2,
        "eval_attempt_count": 4,
        "eval_inferred_k": 2,
        "pass@1": 0.5,
        "pass@2": 0.5,
        "avg_pass@2": 0.25,
    }


def test_an_empty_evaluation_has_an_accuracy_of_0() -> None:
    assert evaluation_metrics([]) == {"accuracy": 0.0}
    assert evaluation_metrics([dict(prompt("u").tags)]) == {"accuracy": 0.0}
    assert mean_score([]) == 0.0


def test_single_attempts_have_no_pass_at_k() -> None:
    assert evaluation_metrics(rows([1], [0], [0.5], [-1])) == {"accuracy": 0.5}


def test_pass_at_k_goes_up_to_what_prompts_have_and_leaves_out_those_with_less() -> None:
    found = evaluation_metrics(rows([0, 0, 0, 1, 1], [1, 1, 0, 0], [1], [0, 1, 0, 0]))
    assert found["eval_inferred_k"] == 4  # 14 attempts of 4 prompts are 3.5
    assert found["pass@1"] == 2 / 4
    assert found["pass@2"] == 2 / 3
    assert found["pass@4"] == 3 / 3
    assert found["avg_pass@4"] == pytest.approx((1 / 4 + 2 / 4 + 1 / 4) / 3)
    assert "pass@8" not in found


def test_avg_pass_is_at_the_usual_k_alone() -> None:
    found = evaluation_metrics(rows([1, 0, 1], [0, 0, 0]))
    assert {name for name in found if "@" in name} == {"pass@1", "pass@2", "avg_pass@3"}
    assert found["avg_pass@3"] == pytest.approx(1 / 3)


def test_a_missing_reward_is_0_and_hides_no_other_attempt() -> None:
    made = rows([1, None], [0, 0])
    assert evaluation_metrics(made) == evaluation_metrics(rows([1, 0], [0, 0]))
    assert mean_score(made) == 0.25
    assert evaluation_metrics([*rows([1]), dict(failed("u0", 1).tags)])["accuracy"] == 0.5


@pytest.mark.parametrize("order", [1, -1])
def test_attempts_are_sessions_in_their_order_however_they_arrive(order: int) -> None:
    made = rows([1, 0, 0, 0])
    made += [tags("u1", 1, score=0.0), tags("u1", 0, score=0.0)]
    made += [tags("u1", 0, 1, score=1.0)]  # a session's later trajectory is its attempt
    found = evaluation_metrics(made[::order])
    assert found["eval_attempt_count"] == 6
    assert found["pass@1"] == 1.0
    assert found["avg_pass@3"] == pytest.approx(1 / 3)


def test_turns_are_counted_where_they_are_known() -> None:
    made = [*rows([1], num_turns=2), tags("a", num_turns=5), tags("b")]
    found = evaluation_metrics(made)
    assert {name: v for name, v in found.items() if name.startswith("tool_turns")} == {
        "tool_turns/mean": 3.5,
        "tool_turns/min": 2,
        "tool_turns/max": 5,
    }


def test_more_than_one_source_is_said_of_each() -> None:
    made = [
        *rows([1, 0], data_source="gsm8k"),
        tags("m", 0, score=1.0, data_source="math"),
        tags("n", 0, score=0.0),
    ]
    found = evaluation_metrics(made)
    assert found["gsm8k/pass@2"] == 1.0
    assert found["gsm8k/accuracy"] == 0.5
    assert found["math/accuracy"] == 1.0
    assert found["unknown/accuracy"] == 0.0
    assert all(name.startswith(("gsm8k/", "math/", "unknown/")) for name in found)
    assert mean_score(made) == 0.5
    assert evaluation_metrics(rows([1], data_source="gsm8k")) == {"accuracy": 1.0}


def test_filler_rows_and_prompts_are_no_attempts() -> None:
    made = [*rows([1]), tags("pad", is_padding=True), dict(prompt("u0").tags)]
    assert evaluation_metrics(made) == {"accuracy": 1.0}


def test_a_row_that_says_not_whose_it_is_is_refused() -> None:
    with pytest.raises(ValueError, match="session_id None"):
        evaluation_metrics([{"uid": "u", "status": "completed"}])
