"""Importance correction and mismatch metrics, with the specification's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import PlanError
from trainer.loss import (
    Correction,
    ImportanceConfig,
    Tally,
    check_logprob_kinds,
    correct,
    entropy_metrics,
    mismatch_metrics,
)
from trainer.loss.importance import IMPORTANCE_NAMES
from trainer.loss.mismatch import MISMATCH_NAMES

MASK = torch.tensor([[0, 1, 1, 1, 1, 0, 0]]).bool()
OLD = torch.tensor([[0, -1, -2, -0.5, -0.1, 0, 0]])
ROLLOUT = torch.tensor([[0, -1.2, -1, -0.5, -0.4, 0, 0]])
ENDS = torch.tensor([0, 3, 5, 7], dtype=torch.int32)


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


def corrected(**settings: Any) -> Correction:
    config = ImportanceConfig(**{"threshold": (1.3, 0.5), **settings})
    return correct(OLD, ROLLOUT, MASK, ENDS, config)


def test_ex_6_8_mismatch() -> None:
    found = mismatch_metrics(OLD, ROLLOUT, MASK)
    assert found is not None
    assert tuple(found) == MISMATCH_NAMES
    assert found == near(
        {
            "mismatch_kl": 0.125,
            "mismatch_k3_kl": 0.1097853,
            "mismatch_training_log_ppl": 0.9,
            "mismatch_training_ppl": 2.4596031,
            "mismatch_rollout_log_ppl": 0.775,
            "mismatch_rollout_ppl": 2.1705922,
            "mismatch_log_ppl_diff": 0.125,
            "mismatch_log_ppl_abs_diff": 0.125,
            "mismatch_log_ppl_diff_max": 0.125,
            "mismatch_log_ppl_diff_min": 0.125,
            "mismatch_ppl_ratio": 1.1331484,
            "mismatch_logprob_abs_diff": 0.375,
        }
    )


@pytest.mark.parametrize(
    ("old", "rollout", "k1", "k3", "ours", "theirs", "ratio", "distance"),
    [
        ([-1.0], [-1.5], -0.5, 0.1487213, math.e, 4.4816891, 0.6065307, 0.5),
        ([-0.5, -1.5], [-0.5, -1.5], 0.0, 0.0, math.e, math.e, 1.0, 0.0),
        ([-0.2, -1.0], [-0.6, -0.6], 0.0, 0.0810723, 1.8221188, 1.8221188, 1.0, 0.4),
    ],
)
def test_mismatch_of_a_few_tokens(
    old: list[float], rollout: list[float], k1: float, k3: float,
    ours: float, theirs: float, ratio: float, distance: float,
) -> None:  # fmt: skip
    """Differences that cancel out in the mean are still seen by k3 and by their size."""
    now, before = torch.tensor([old]), torch.tensor([rollout])
    found = mismatch_metrics(now, before, torch.ones_like(now).bool())
    assert found is not None
    names = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "ppl_ratio", "logprob_abs_diff")
    due = (k1, k3, ours, theirs, ratio, distance)
    assert [found[f"mismatch_{name}"] for name in names] == near(list(due))


def test_mismatch_of_no_token_is_left_out() -> None:
    assert mismatch_metrics(OLD, ROLLOUT, torch.zeros_like(MASK)) is None


def test_a_perplexity_beyond_all_bounds_is_infinite_and_no_crash() -> None:
    found = mismatch_metrics(OLD * 1000, ROLLOUT, MASK)
    assert found is not None
    assert found["mismatch_training_ppl"] == math.inf


@pytest.mark.parametrize(
    ("settings", "weights", "kept"),
    [
        ({}, [0, 1.221403, 0.5, 1, 1.3, 0, 0], [0, 1, 1, 1, 1, 0, 0]),
        ({"mode": "mask"}, [0, 1.221403, 0.367879, 1, 1.349859, 0, 0], [0, 1, 0, 1, 0, 0, 0]),
        ({"mode": "both"}, [0, 1.221403, 0.5, 1, 1.3, 0, 0], [0, 1, 0, 1, 0, 0, 0]),
        ({"level": "sequence"}, [0, 0.5, 0.5, 1.3, 1.3, 0, 0], [0, 1, 1, 1, 1, 0, 0]),
        (
            {"level": "geometric", "mode": "mask", "threshold": (1.1, 0.9)},
            [0, 0.67032, 0.67032, 1.161834, 1.161834, 0, 0],
            [0] * 7,
        ),
        ({"veto": (2.0, 0.5)}, [0, 1.221403, 0.5, 1, 1.3, 0, 0], [0, 0, 0, 1, 1, 0, 0]),
        # A veto looks at tokens whatever the level: 0.3679 and 1.3499 are the wildest of each.
        (
            {"level": "geometric", "veto": (1.34, 0.3)},
            [0, 0.67032, 0.67032, 1.161834, 1.161834, 0, 0],
            [0, 1, 1, 0, 0, 0, 0],
        ),
        (
            {"mode": "both", "mask_threshold": (2.0, 0.1)},
            [0, 1.221403, 0.5, 1, 1.3, 0, 0],
            [0, 1, 1, 1, 1, 0, 0],
        ),
    ],
)
def test_ex_6_8_weights(settings: Any, weights: list[float], kept: list[int]) -> None:
    found = corrected(**settings)
    assert found.weights[0].tolist() == near(weights)
    assert found.mask[0].int().tolist() == kept


def test_metrics_of_a_correction() -> None:
    """Weights 1.221403, 0.5, 1, 1.3 in two sequences; the raw ratios are .367879 and 1.349859."""
    found = corrected(mode="both", veto=(2.0, 0.5)).metrics
    assert found is not None
    assert tuple(found) == IMPORTANCE_NAMES
    mean = (1.221403 + 0.5 + 1 + 1.3) / 4
    square = (1.221403**2 + 0.25 + 1 + 1.69) / 4
    assert {name.removeprefix("rollout_is_"): value for name, value in found.items()} == near(
        {
            "mean": mean,
            "std": math.sqrt(square - mean**2),
            "min": 0.5,
            "max": 1.3,
            "eff_sample_size": mean**2 / square,
            "veto_fraction": 0.5,
            "catastrophic_token_fraction": 0.25,
            "ratio_fraction_high": 0.25,
            "ratio_fraction_low": 0.25,
            "masked_fraction": 0.75,
            "seq_mean": (0.8607014 + 1.15) / 2,
            "seq_std": (1.15 - 0.8607014) / 2,
            "seq_max": 1.15,
            "seq_min": 0.8607014,
            "seq_max_deviation": 0.15,
        }
    )


def test_a_pack_without_a_supervised_token_is_corrected_to_nothing() -> None:
    config = ImportanceConfig(threshold=(1.3, 0.5), level="geometric", mode="both", veto=(2, 0.5))
    found = correct(OLD, ROLLOUT, torch.zeros_like(MASK), ENDS, config)
    assert found.metrics is None
    assert not found.weights.any()
    assert not found.mask.any()


@given(
    st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=2, max_size=20),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask", "both"]),
    st.booleans(),
)
def test_correction_only_takes_labels_away_and_keeps_to_its_bounds(
    tokens: list[tuple[float, float, bool]], level: Any, mode: Any, veto: bool
) -> None:
    old, rollout, mask = (torch.tensor([list(column)]) for column in zip(*tokens, strict=True))
    ends = torch.tensor([0, len(tokens) // 2, len(tokens)], dtype=torch.int32)
    config = ImportanceConfig(
        threshold=(1.5, 0.5), level=level, mode=mode, veto=(5.0, 0.2) if veto else None
    )
    found = correct(old, rollout, mask, ends, config)
    assert bool((found.mask <= mask).all())
    assert not found.weights[~mask].any()
    if mode != "mask":
        inside = found.weights[mask]
        assert bool(((inside >= 0.5 - 1e-6) & (inside <= 1.5 + 1e-6)).all())
    if mode == "truncate" and not veto:
        assert torch.equal(found.mask, mask)


def test_equal_log_probs_correct_nothing() -> None:
    config = ImportanceConfig(threshold=(2.0, 0.5), level="sequence", mode="both", veto=(2.0, 0.5))
    found = correct(OLD, OLD, MASK, ENDS, config)
    assert torch.equal(found.weights, MASK.float())
    assert torch.equal(found.mask, MASK)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": (0.5, 1.3)}, r"threshold is \(upper, lower\)"),
        ({"veto": (0.5, 2.0)}, r"veto is \(upper, lower\)"),
        ({"mask_threshold": (1.0, 1.0)}, "mask_threshold"),
        ({"level": "word"}, "level 'word'"),
        ({"mode": "drop"}, "mode 'drop'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        corrected(**settings)


def test_log_probs_of_another_distribution_are_refused() -> None:
    check_logprob_kinds(["raw", "raw"])
    check_logprob_kinds(["processed"], accepted=("processed",))
    with pytest.raises(PlanError, match="kind raw, and rows have None, processed"):
        check_logprob_kinds(["raw", "processed", None])


# -- over packs and ranks --------------------------------------------------------------------

NAMES = ("kl", "ratio_max", "ratio_min")


def tally(*packs: tuple[float, float, float] | None) -> Tally:
    found = Tally(NAMES)
    for pack in packs:
        found.add(None if pack is None else dict(zip(NAMES, pack, strict=True)))
    return found


def test_packs_are_merged_by_the_name_of_a_metric() -> None:
    found = tally((1.0, 2.0, 0.5), None, (3.0, 1.5, 0.25))
    assert found.result() == {"kl": 2.0, "ratio_max": 2.0, "ratio_min": 0.25}


def test_rg_40_ranks_reduce_the_same_vectors_whatever_their_packs_are() -> None:
    ranks = [tally((1.0, 2.0, 0.5), (3.0, 1.5, 0.25)), tally(None), tally((5.0, 1.0, 0.75))]
    vectors = [rank.vectors() for rank in ranks]
    assert {tuple(len(part) for part in rank) for rank in vectors} == {(2, 1, 1)}
    sums, largest, smallest = (list(column) for column in zip(*vectors, strict=True))
    reduced = (
        torch.stack(sums).sum(0),
        torch.stack(largest).amax(0),
        torch.stack(smallest).amin(0),
    )
    for rank in ranks:
        assert rank.result(reduced) == {"kl": 3.0, "ratio_max": 2.0, "ratio_min": 0.25}


def test_no_pack_anywhere_is_zero() -> None:
    assert tally(None, None).result() == dict.fromkeys(NAMES, 0.0)


def test_every_metric_is_merged_by_its_own_rule() -> None:
    found = Tally((*MISMATCH_NAMES, *IMPORTANCE_NAMES))
    first = mismatch_metrics(OLD, ROLLOUT, MASK)
    second = mismatch_metrics(ROLLOUT, OLD, MASK)
    important = corrected().metrics
    for one in (first, second):
        assert one is not None
        assert important is not None
        found.add({**one, **important})
    merged = found.result()
    assert merged["mismatch_log_ppl_diff"] == near(0.0)
    assert merged["mismatch_log_ppl_diff_max"] == near(0.125)
    assert merged["mismatch_log_ppl_diff_min"] == near(-0.125)


def test_ex_6_1_entropy_of_what_was_sampled() -> None:
    logprobs = [0, 0, -0.1, -0.2, -0.3, 0, -0.1, -0.2, 0, 0, -0.3, -0.4, 0, 0, 0, 0]
    mask = torch.tensor([logprobs]) != 0
    sums = entropy_metrics(mask, logprobs=torch.tensor([logprobs]))
    assert sums == near({"entropy_tokens": 7.0, "rollout_entropy": 1.6})
    assert sums["rollout_entropy"] / sums["entropy_tokens"] == near(0.2285714)
    none = entropy_metrics(torch.zeros(1, 2).bool(), torch.ones(1, 2))
    assert none == {"entropy_tokens": 0.0, "train_entropy": 0.0}
