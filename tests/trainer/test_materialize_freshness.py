"""Tokens that are too old, cleared where labels are at hand, and counted where they are not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.fields import IGNORED
from tests.trainer.materials import Sample, packed, sample, spec_of
from trainer.materialize import Freshness
from trainer.select import fresh_policy_len, staleness

I = IGNORED  # noqa: E741 as in the specification


def spans_of(labels: list[int], steps: list[int]) -> list[list[int]]:
    """What a producer writes: run lengths of (step, supervised tokens) over the response."""
    tail = labels[len(labels) - len(steps) :]
    pairs = zip(steps, tail, strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [[step, sum(label != I for _, label in run)] for step, run in runs]


def baked(labels: list[int], steps: list[int], train_step: int, threshold: int) -> list[int]:
    """Section 7.3 on the labels themselves, to compare with."""
    out = list(labels)
    for i, step in enumerate(steps):
        if staleness(step, train_step) >= threshold:
            out[len(labels) - len(steps) + i] = I
    return out


def row_of(labels: list[int], steps: list[int]) -> Sample:
    """A row of these labels, whose last tokens have these versions."""
    prompt = len(labels) - len(steps)
    ids = [label if label != I else 1 for label in labels]
    mask = [int(label != I) for label in labels[prompt:]]
    return sample(ids[:prompt], ids[prompt:], mask, policy_spans=spans_of(labels, steps))


def trained(row: Sample, fresh: Freshness | None) -> list[int]:
    cap = row.row.train_len
    return packed([row], spec_of([row], cap, fresh=fresh)).labels[0].tolist()


EX_7_2 = ([I, I, 20, 21, I, 22, 2], [0, 0, 4, 4, 4])


@pytest.mark.parametrize(
    ("step", "threshold", "due"),
    [
        (5, 4, [I, I, I, I, I, 22, 2]),
        (5, 8, EX_7_2[0]),
        (9, 4, [I] * 7),
        (6, 4, [I, I, I, I, I, 22, 2]),
    ],
)
def test_ex_7_2_rg_06_stale_tokens_lose_their_labels_on_the_way_to_training(
    step: int, threshold: int, due: list[int]
) -> None:
    row = row_of(*EX_7_2)
    assert trained(row, Freshness(step, threshold)) == due[1:]
    assert trained(row, None) == EX_7_2[0][1:]
    supervised = sum(label != I for label in due[1:])
    assert fresh_policy_len(row.row, step, threshold) == supervised


@pytest.mark.parametrize(
    ("labels", "steps", "threshold", "due"),
    [
        ([I, I, 3, 4], [0, 4], 4, [I, I, I, 4]),
        ([I, I, 3, 4], [0, 4], 8, [I, I, 3, 4]),
        ([I, I, 3, I], [0, 4], 4, [I, I, I, I]),
        ([3, 4], [0, 4], 4, [I, 4]),
        ([I, I, 30, I, 40, I, 32], [0] * 5, 4, [I] * 7),
        ([I, I, 30, I, 40, I, 32], [0, 4, 4, 4, 4], 4, [I, I, I, I, 40, I, 32]),
        ([I, I, 30, I, 40, I, 32], [4] * 5, 4, [I, I, 30, I, 40, I, 32]),
    ],
)
def test_ex_7_3_more_masks(
    labels: list[int], steps: list[int], threshold: int, due: list[int]
) -> None:
    assert trained(row_of(labels, steps), Freshness(5, threshold)) == due[1:]


def test_a_stale_token_has_no_advantage_either() -> None:
    row = row_of(*EX_7_2)
    pack = packed([row], spec_of([row], 8, fresh=Freshness(5, 4)), advantages=[2.0])
    assert pack["advantages"].tolist() == [[0, 0, 0, 0, 2, 2, 0, 0]]


def test_each_row_of_a_pack_has_its_own_versions() -> None:
    old = row_of([I, 5, 6], [0, 0])
    new = sample([1], [7, 8], session=1, policy_spans=[[4, 2]])
    silent = sample([1], [9, 9], session=2)
    pack = packed([old, new, silent], spec_of([old], 6, fresh=Freshness(5, 4)))
    assert pack.labels.tolist() == [[I, I, 7, 8, 9, 9]]


def test_versions_that_count_other_tokens_are_refused() -> None:
    row = sample([1, 2], [3, 4], policy_spans=[[0, 1]])
    with pytest.raises(ValueError, match=r"u_0_0.*count 1 supervised tokens, and labels 2"):
        packed([row], spec_of([row], fresh=Freshness(5, 4)))


_tokens = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=12)


@given(st.integers(0, 3), _tokens, st.integers(1, 9), st.integers(1, 4))
def test_masking_by_spans_equals_baking_the_labels(
    prompt: int, tokens: list[tuple[bool, int]], step: int, threshold: int
) -> None:
    labels = [I] * prompt + [7 if flag else I for flag, _ in tokens]
    if len(labels) < 2:
        labels, tokens = [I, *labels], [*tokens]
        prompt += 1
    steps = sorted(version for _, version in tokens)
    found = trained(row_of(labels, steps), Freshness(step, threshold))
    due = baked(labels, steps, step, threshold)
    assert found == due[1:]
    assert fresh_policy_len(row_of(labels, steps).row, step, threshold) == sum(
        label != I for label in due[1:]
    )


@given(_tokens, st.integers(1, 9), st.integers(0, 4), st.integers(1, 4))
def test_rg_09_masking_twice_is_masking_once_at_the_later_step(
    tokens: list[tuple[bool, int]], step: int, later: int, threshold: int
) -> None:
    labels = [I] + [7 if flag else I for flag, _ in tokens]
    steps = sorted(version for _, version in tokens)
    once: Any = baked(labels, steps, step + later, threshold)
    first: Any = baked(labels, steps, step, threshold)
    assert baked(first, steps, step + later, threshold) == once
    assert trained(row_of(labels, steps), Freshness(step + later, threshold)) == once[1:]


def test_a_label_once_cleared_never_comes_back() -> None:
    """Labels that were baked in the plane, with the spans of what they were, are refused."""
    labels = torch.tensor([I, I, 4])
    row = sample([1], [3, 4], policy_spans=[[0, 1], [4, 1]], fields={"labels": labels})
    with pytest.raises(ValueError, match="count 2 supervised tokens, and labels 1"):
        packed([row], spec_of([row], fresh=Freshness(5, 4)))
