"""Scores to scalar advantages: worked numbers, degenerate groups, sessions and statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer.advantage.batch as batch_module
from tests.trainer.rows import scored, trajectory
from trainer.advantage import (
    ESTIMATORS,
    AdvantageConfig,
    Advantages,
    advantages,
    batch_statistics,
    cluster,
    per_token,
)
from trainer.errors import PlanError
from trainer.plan import pad_to_multiple
from trainer.trajectory import Trajectory

GRPO = AdvantageConfig()


def config(estimator: str, **more: Any) -> AdvantageConfig:
    return AdvantageConfig(estimator=estimator, **more)  # type: ignore[arg-type]


def of(
    scores: Sequence[float], sizes: Sequence[int] | None = None, chosen: AdvantageConfig = GRPO
) -> list[float]:
    """Advantages of one group with one session a score."""
    rows = [
        trajectory("u", i, score=score, response=sizes[i] if sizes else 3)
        for i, score in enumerate(scores)
    ]
    return advantages([rows], chosen).values


def near(expected: Sequence[float], tolerance: float = 1e-6) -> Any:
    return pytest.approx(list(expected), abs=tolerance, rel=0)


# -- worked numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 0, 0, 1], [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ([1, 0], [0.7071068, -0.7071068]),
        ([1, 2, 3, 4], [-1.1618950, -0.3872983, 0.3872983, 1.1618950]),
    ],
)
def test_ex_4_1_to_4_3_grpo(scores: list[float], expected: list[float]) -> None:
    assert of(scores) == near(expected)


@pytest.mark.parametrize("scores", [[1.0] * 3, [0.3] * 8, [0.7] * 16, [0.1] * 7, [5.0]])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_ex_4_4_rg_23_groups_without_a_signal_are_exactly_zero(
    scores: list[float], estimator: str, std: str
) -> None:
    assert of(scores, chosen=config(estimator, std=std)) == [0.0] * len(scores)


@pytest.mark.parametrize("scores", [[0.3] * 8, [0.7] * 16, [0.1] * 7])
def test_rg_23_equal_scores_that_came_through_float32_are_zero_too(scores: list[float]) -> None:
    rounded = [float(np.float32(score)) for score in scores]
    assert of([*rounded[:-1], scores[-1]]) == [0.0] * len(scores)


def test_ex_4_5_dr_grpo() -> None:
    chosen = config("dr_grpo", max_length=8)
    assert of([1, 0], [2, 4], chosen) == near([0.1767767, -0.3535534])


def test_dr_grpo_without_a_deviation_is_the_mean_alone() -> None:
    chosen = config("dr_grpo", max_length=8, std="none")
    assert of([1, 0], [2, 4], chosen) == near([0.125, -0.25])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 0, 0, 1], [0.6666667, -0.6666667, -0.6666667, 0.6666667]),
        ([1, 2, 3, 6], [-2.6666667, -1.3333333, 0, 4]),
        ([0.5], [0.5]),
    ],
)
def test_ex_4_6_and_4_7_rloo(scores: list[float], expected: list[float]) -> None:
    assert of(scores, chosen=config("rloo")) == near(expected)


def test_ex_4_8_opo() -> None:
    assert of([1, 0, 1], [2, 4, 6], config("opo")) == near([0.3333333, -0.6666667, 0.3333333])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 0, 0, 0], [0.999998, -0.3333327, -0.3333327, -0.3333327]),
        ([1, 1, 0, 0], [0.4472124, 0.4472124, -0.4472124, -0.4472124]),
        ([1, 1, 1, 1], [0.0] * 4),
        ([1, 1, 1, 0], [0.0] * 4),
    ],
)
def test_ex_4_9_to_4_11_pass_at_k(scores: list[float], expected: list[float]) -> None:
    assert of(scores, chosen=config("pass_at_k", k=2)) == near(expected)


def test_pass_at_k_without_a_success_is_zero() -> None:
    assert of([0, -1, 0, 0], chosen=config("pass_at_k", k=2)) == [0.0] * 4


def test_pass_at_k_of_more_than_there_are_is_an_error() -> None:
    with pytest.raises(PlanError, match="k 4 needs groups of 4 sessions, and one has 3"):
        of([1, 0, 0], chosen=config("pass_at_k"))


def test_opo_without_any_token_has_no_baseline() -> None:
    assert of([1, 0.5], [0, 0], config("opo")) == [1.0, 0.5]
    assert of([0.5], [0], config("opo")) == [0.5]


def test_ex_4_12_rg_15_a_session_is_counted_once() -> None:
    of_sessions = [("s1", 0, 1), ("s1", 1, 1), ("s1", 2, 1), ("s2", 0, 0), ("s3", 0, 1)]
    members = [trajectory(session=s, index=i, score=score) for s, i, score in of_sessions]
    result = advantages([members], GRPO)
    assert result.session_scores == [1.0, 0.0, 1.0]
    assert result.values == near([0.5773503, 0.5773503, 0.5773503, -1.1547006, 0.5773503])
    metrics = batch_statistics(members, result)
    assert metrics["rewards/mean"] == pytest.approx(0.6666667, abs=1e-6)
    assert metrics["training_samples"] == 5


def test_ex_4_13_rg_14_a_missing_score(monkeypatch: pytest.MonkeyPatch) -> None:
    members = scored(None)
    with pytest.raises(ValueError, match=r"'u_0_0': its score is missing.*task_adv_weight"):
        advantages([members], GRPO)
    calls: list[object] = []
    watched = {name: lambda *a: calls.append(a) for name in ESTIMATORS}
    monkeypatch.setattr(batch_module, "ESTIMATORS", watched)
    result = advantages([members], replace(GRPO, task_adv_weight=0.0))
    assert (result, calls) == (Advantages([0.0], []), [])
    metrics = batch_statistics(members, result)
    assert (metrics["training_samples"], metrics["rewards/mean"]) == (1, 0.0)


def test_a_weight_of_zero_still_reports_the_rewards_that_there_are() -> None:
    result = advantages([scored(1.0, None)], replace(GRPO, task_adv_weight=0.0))
    assert result == Advantages([0.0, 0.0], [1.0])
    assert advantages([scored(1.0)], config(None)) == Advantages([0.0], [1.0])  # type: ignore[arg-type]


def test_the_weight_is_applied_by_the_loss_and_not_here() -> None:
    assert of([1, 0], chosen=replace(GRPO, task_adv_weight=0.25)) == near([0.7071068, -0.7071068])


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="'u_1_0': its score is"):
        of([1.0, score])


def test_ex_4_14_statistics() -> None:
    rows = [
        trajectory(session=0, prompt=3, response=3, policy_len=3),
        trajectory(session=1, prompt=2, response=6, policy_len=4),
    ]
    metrics = batch_statistics(rows, Advantages([1.5, -0.5], [1.0, 0.0]))
    expected = {
        "advantages/mean": 0.3571429,
        "advantages/min": -0.5,
        "advantages/max": 1.5,
        "training_tokens": 12,
        "prompt_len/mean": 2.5,
        "response_len/mean": 3.5,
        "response_len/std": 0.7071068,
        "response_len/min": 3,
        "response_len/max": 4,
        "rewards/mean": 0.5,
        "raw_rewards/mean": 0.5,
        "batch_size": 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "tool_turns/mean" not in metrics


# -- sessions -----------------------------------------------------------------------------------


def v4_rows() -> list[Trajectory]:
    masks = {(0, 0): 2, (0, 1): 2, (1, 0): 3, (2, 0): 2}
    scores = {0: 1.0, 1: 0.0, 2: 0.5}
    return [trajectory("u", s, i, policy_len=n, score=scores[s]) for (s, i), n in masks.items()]


def test_v4_grpo_over_sessions() -> None:
    values = advantages([v4_rows()], replace(GRPO, session="last")).values
    assert values == near([1, 1, -1, 0], 1e-5)
    masks = [[1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 1, 1]]
    spread = [per_token(a, np.array(m)).tolist() for a, m in zip(values, masks, strict=True)]
    expected = [[1, 0, 1], [1, 1, 0], [-1, -1, -1], [0, 0, 0]]
    for row, due in zip(spread, expected, strict=True):
        assert row == near(due, 1e-5)


def test_a_session_whose_last_trajectory_supervises_nothing_gets_nothing() -> None:
    rows = v4_rows()
    rows[1] = replace(rows[1], policy_len=0)
    assert advantages([rows], replace(GRPO, session="last")).values == near([0, 0, -1, 0], 1e-5)
    assert advantages([rows], GRPO).values == near([1, 1, -1, 0], 1e-5)


def test_the_last_trajectory_of_a_session_may_stand_for_it() -> None:
    rows = [trajectory("u", 0, 1, score=1.0), trajectory("u", 0, 0, score=0.0)]
    rows += [trajectory("u", 1, 0, score=0.0)]
    assert cluster(rows).scores == [1.0, 0.0]
    assert cluster(rows[1::-1] + rows[2:]).scores == [0.0, 0.0]
    assert cluster(rows[1::-1] + rows[2:], representative="last").scores == [1.0, 0.0]


def test_the_length_of_a_session_is_its_representatives() -> None:
    rows = [
        trajectory("u", 0, 0, score=1.0, response=2),
        trajectory("u", 0, 1, score=1.0, response=9),
    ]
    rows += [trajectory("u", 1, 0, score=0.0, response=4)]
    assert advantages([rows], config("dr_grpo", max_length=8)).values == near(
        [0.1767767, 0.1767767, -0.3535534]
    )
    last = config("dr_grpo", max_length=9, session="last")
    assert advantages([rows], last).values[0] == pytest.approx(0.7071068, abs=1e-6)
    policy = [replace(row, policy_len=1) for row in rows]
    short = config("dr_grpo", max_length=1, lengths="policy")
    assert advantages([policy], short).values[2] == pytest.approx(-0.7071068, abs=1e-6)


def test_groups_do_not_see_each_other() -> None:
    groups = [scored(1, 0, uid="a"), scored(3, 3, uid="b"), [], scored(2, 1, uid="c")]
    result = advantages(groups, GRPO)
    assert result.values == near([0.7071068, -0.7071068, 0, 0, 0.7071068, -0.7071068])
    assert result.session_scores == [1, 0, 3, 3, 2, 1]


# -- scenario 7 and the faults beside it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("std", "expected"),
    [("sample", [1.5, -0.5, -0.5, -0.5]), ("population", [1.7321, -0.5774, -0.5774, -0.5774])],
)
def test_scenario_7_sample_and_population_deviation(std: str, expected: list[float]) -> None:
    tolerance = 1e-5 if std == "sample" else 1e-4
    assert of([1, 0, 0, 0], chosen=config("grpo", std=std)) == near(expected, tolerance)


def test_scenario_7_a_padding_copy_changes_nothing() -> None:
    rows = scored(1, 0, 0, 0)
    copy = trajectory("u", 4, score=1.0, is_padding=True)
    result = advantages([[*rows, copy]], GRPO)
    assert result.values == near([1.5, -0.5, -0.5, -0.5, 0.0], 1e-5)
    assert result.session_scores == [1, 0, 0, 0]
    # What comes out where the copy is taken for a row: the detector.
    assert of([1, 0, 0, 0, 1]) == near([1.0954, -0.7303, -0.7303, -0.7303, 1.0954], 1e-4)


def test_scenario_7_seven_equal_rewards_in_float32() -> None:
    assert of([float(np.float32(0.7))] * 7) == [0.0] * 7


def test_omni_602_filler_rows_contribute_exactly_nothing() -> None:
    assert pad_to_multiple(7, 4) == 1
    groups = [scored(1, 0, 0, 1, uid="a"), scored(2, 0, 1, uid="b")]
    filler = trajectory("pad", 0, prompt=127, response=1, policy_len=0, is_padding=True)
    for chosen in (GRPO, config("reinforce_plus_plus"), config("rloo")):
        plain = advantages(groups, chosen)
        padded = advantages([*groups, [filler]], chosen)
        assert padded.values == [*plain.values, 0.0]
        flat = [row for group in groups for row in group]
        assert batch_statistics([*flat, filler], padded) == batch_statistics(flat, plain)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", 0.0),
        ("dr_grpo", 0.0),
        ("rloo", 1.0),
        ("opo", 0.0),
        ("reinforce_plus_plus", 0.0),
        ("reinforce_plus_plus_baseline", 0.0),
    ],
)
def test_verl_7581_a_group_of_one_has_a_documented_value(estimator: str, expected: float) -> None:
    assert of([1.0], chosen=config(estimator)) == [expected]
    beside = [scored(1.0, uid="a"), scored(1.0, uid="b")]
    assert advantages(beside, config(estimator)).values == [expected] * 2


def test_verl_6675_a_batch_without_a_response_has_finite_statistics() -> None:
    rows = [trajectory(session=i, response=0, score=float(i)) for i in range(2)]
    for chosen in (GRPO, config("opo"), config("reinforce_plus_plus"), config("dr_grpo")):
        result = advantages([rows], chosen)
        metrics = batch_statistics(rows, result)
        assert all(math.isfinite(value) for value in [*result.values, *metrics.values()])
        assert metrics["advantages/mean"] == metrics["advantages/max"] == 0.0


def test_rg_25_one_sample_has_no_deviation_and_the_line_is_strict_json() -> None:
    rows = scored(1.0)
    metrics = batch_statistics(rows, advantages([rows], GRPO))
    assert metrics["response_len/std"] == 0.0
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_statistics_of_nothing_are_zero() -> None:
    metrics = batch_statistics([], Advantages([], []))
    assert set(metrics.values()) == {0}
    json.dumps(metrics, allow_nan=False)


def test_raw_rewards_are_the_producers_and_turns_are_counted_where_there_are_any() -> None:
    rows = [trajectory(num_turns=2), trajectory(session=1)]
    metrics = batch_statistics(rows, Advantages([0.0, 0.0], [1.0]), raw_rewards=(2.0, 4))
    assert (metrics["raw_rewards/mean"], metrics["tool_turns/mean"]) == (0.5, 2.0)


# -- reinforce++ --------------------------------------------------------------------------------


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    """Against the definition itself: every token's return, whitened with Bessel's correction."""
    sizes, scores = [2, 1, 5], [1.0, 0.0, 0.25]
    rows = [trajectory("u", i, score=scores[i], response=n) for i, n in enumerate(sizes)]
    returns = np.repeat(scores, sizes)
    due = (np.array(scores) - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    result = advantages([rows[:1], rows[1:]], config("reinforce_plus_plus"))
    assert result.values == near(due.tolist())
    weighted = sum(a * n for a, n in zip(result.values, sizes, strict=True))
    assert weighted == pytest.approx(0, abs=1e-9)


def test_reinforce_plus_plus_baseline_takes_the_groups_mean_first() -> None:
    groups = [scored(1, 0, uid="a"), scored(9, 7, uid="b")]
    centered = np.repeat([0.5, -0.5, 1.0, -1.0], 3)
    due = centered / np.sqrt(centered.var(ddof=1) + 1e-8)
    result = advantages(groups, config("reinforce_plus_plus_baseline"))
    assert result.values == near(due[::3].tolist())


def test_reinforce_plus_plus_without_a_signal_is_zero() -> None:
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert advantages([scored(*[0.1] * 7)], config(name)).values == [0.0] * 7
        assert advantages([scored(1, response=1)], config(name)).values == [0.0]


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"estimator": "ppo"}, "estimator is one of"),
        ({"std": "biased"}, "std is one of"),
        ({"lengths": "all"}, "lengths is one of"),
        ({"session": "best"}, "session is one of"),
        ({"k": 0}, "k is a number from 1 on"),
        ({"max_length": 1.5}, "max_length is a number from 1 on"),
        ({"task_adv_weight": -1.0}, "task_adv_weight is a number from 0 on"),
        ({"task_adv_weight": math.nan}, "task_adv_weight is a number from 0 on"),
        ({"eps": 0.0}, "eps is a number above 0"),
        ({"gamma": 1.5}, "gamma is from 0 to 1"),
        ({"lam": -0.5}, "lam is from 0 to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdvantageConfig(**settings)


def test_gae_needs_values_and_is_no_matter_of_the_controller() -> None:
    chosen = config("gae")
    with pytest.raises(PlanError, match=r"'gae' needs the field 'values'.*has input_ids"):
        chosen.check_fields(["input_ids"])
    chosen.check_fields(["input_ids", "values"])
    GRPO.check_fields([])
    with pytest.raises(PlanError, match="'gae' differs by token"):
        advantages([scored(1)], chosen)
    assert advantages([scored(None)], replace(chosen, task_adv_weight=0.0)).values == [0.0]


# -- properties ---------------------------------------------------------------------------------

SCORES = st.lists(
    st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3)), min_size=1, max_size=12
)


@given(SCORES, st.sampled_from(["grpo", "rloo", "reinforce_plus_plus"]), st.randoms())
def test_advantages_sum_to_nothing_and_follow_their_rows(
    scores: list[float], estimator: str, rng: Any
) -> None:
    if len(scores) == 1 and estimator == "rloo":
        return
    values = of(scores, chosen=config(estimator))
    assert sum(values) == pytest.approx(0, abs=1e-6 * (1 + max(map(abs, scores))))
    order = list(range(len(scores)))
    rng.shuffle(order)
    shuffled = of([scores[i] for i in order], chosen=config(estimator))
    assert shuffled == pytest.approx([values[i] for i in order], abs=1e-6)


@given(SCORES, st.floats(-10, 10), st.sampled_from(["grpo", "rloo", "opo", "reinforce_plus_plus"]))
def test_a_higher_score_never_gets_less(scores: list[float], shift: float, estimator: str) -> None:
    values = of([s + shift for s in scores], chosen=config(estimator))
    pairs = sorted(zip([s + shift for s in scores], values, strict=True))
    assert all(a[1] <= b[1] + 1e-9 for a, b in pairwise(pairs))


@given(SCORES, st.integers(1, 4), st.sampled_from(sorted(ESTIMATORS)))
def test_more_rows_of_a_session_change_nothing_for_the_others(
    scores: list[float], copies: int, estimator: str
) -> None:
    chosen = config(estimator, k=1) if estimator == "pass_at_k" else config(estimator)
    rows = scored(*scores)
    fan = [replace(rows[0], key=f"c{i}", index=i + 1) for i in range(copies)]
    values = advantages([rows], chosen).values
    assert advantages([[*rows, *fan]], chosen).values == [*values, *[values[0]] * copies]
