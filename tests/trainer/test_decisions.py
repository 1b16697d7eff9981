"""What follows training at each step: EX-8.6's colocated run and the intervals of section 8.2."""

from __future__ import annotations

import pytest

from trainer.loop.decisions import due, hand_over, model_step_of


def test_ex_8_6_colocated_interval_2_total_5() -> None:
    said = [hand_over(step, 5, 2, evaluation_due=False) for step in range(1, 6)]
    assert said == [
        "switch_to_rollout",
        "sync_weight",
        "switch_to_rollout",
        "sync_weight",
        "final_offload",
    ]


def test_the_last_step_hands_over_where_it_is_evaluated() -> None:
    assert hand_over(4, 4, 2, evaluation_due=True) == "sync_weight"
    assert hand_over(5, 5, 1, evaluation_due=True) == "sync_weight"


def test_steps_1_to_6_are_generated_by_the_versions_of_section_8_2() -> None:
    assert [model_step_of(step - 1, 2) for step in range(1, 7)] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("step", "interval", "last", "expected"),
    [
        (4, 2, False, True),
        (5, 2, False, False),
        (5, 2, True, True),
        (5, None, True, False),
        (5, -1, True, False),
    ],
)
def test_what_is_due(step: int, interval: int | None, last: bool, expected: bool) -> None:
    assert due(step, interval, last=last) is expected
