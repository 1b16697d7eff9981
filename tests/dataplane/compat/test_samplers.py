"""Samplers: what each hands out, what it remembers, and that no row is handed out twice."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transfer_queue.sampler.seqlen_balanced_sampler import (
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)

CONTEXT = {"task_name": "train", "partition_id": "p"}

ready_rows = st.lists(st.integers(0, 40), unique=True)


class Tags:
    """What a sampler asks a partition: the tags of rows."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, int]]:
        return {i: {"total_lengths": self.lengths[i]} for i in indexes if i in self.lengths}


class UserMade(BaseSampler):
    """The last row only, as a user may write it."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        answer = ready_indexes[-1:], ready_indexes
        self._states.setdefault(kwargs["partition_id"], {})[kwargs["task_name"]] = {
            kwargs["dp_rank"]: {kwargs["batch_index"]: answer}
        }
        return answer


def test_a_sampler_of_one_s_own_needs_only_sample() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseSampler()  # type: ignore[abstract]
    sampler = UserMade()
    asked = {"dp_rank": 3, "batch_index": 1}
    assert not sampler.has_cached_result("p", "train", asked)
    assert sampler([1, 2], 9, **CONTEXT, **asked) == ([2], [1, 2])
    assert sampler.has_cached_result("p", "train", asked)
    assert not sampler.has_cached_result("p", "other", asked)
    assert not sampler.has_cached_result("q", "train", asked)
    assert not sampler.has_cached_result("p", "train", {"dp_rank": 3})
    assert not sampler.has_cached_result("p", "train", {"batch_index": 1})
    assert not sampler.has_cached_result("p", "train", None)
    sampler.clear_cache("q")
    assert sampler.has_cached_result("p", "train", asked)
    sampler.clear_cache("p")
    assert not sampler.has_cached_result("p", "train", asked)


@pytest.mark.parametrize(
    ("ready", "size", "rows"),
    [
        ([4, 2, 9], 2, [4, 2]),
        ([4, 2], 3, [4, 2]),
        ([], 1, []),
        ([1, 2], 0, []),
        ([1, 2, 3], -1, [1, 2]),
    ],
)
def test_sequential_takes_the_first_ready_rows(
    ready: list[int], size: int, rows: list[int]
) -> None:
    sampler = SequentialSampler()
    assert sampler(ready, size, anything="else") == (rows, rows)
    assert sampler.save_checkpoint() == {"_states": {}}


GROUPS = [
    ([0, 1, 2, 3, 4, 5], 3, 6, [0, 1, 2, 3, 4, 5]),
    ([5, 3, 4, 10, 9, 11, 1], 3, 6, [3, 4, 5, 9, 10, 11]),
    ([0, 1, 3, 4, 5, 6, 7, 9, 10, 11], 3, 6, [3, 4, 5, 9, 10, 11]),
    ([0, 1, 3, 4, 6, 7], 3, 3, []),
    ([0, 1, 2, 3], 4, 8, []),
    ([2, 0, 1], 1, 2, [0, 1]),
    ([0, 1], 2, 0, []),
    ([], 2, 2, []),
    ([0, 0, 1, 2], 3, 3, [0, 1, 2]),
]


@pytest.mark.parametrize(("ready", "group", "size", "rows"), GROUPS)
def test_groups_are_handed_out_whole(
    ready: list[int], group: int, size: int, rows: list[int]
) -> None:
    assert GRPOGroupNSampler(group)(ready, size) == (rows, rows)


@given(ready_rows, st.integers(1, 4), st.integers(0, 4))
def test_a_batch_of_groups_is_complete_or_empty(ready: list[int], group: int, groups: int) -> None:
    before = list(ready)
    rows, consumed = GRPOGroupNSampler(n_samples_per_prompt=group)(ready, group * groups)
    assert ready == before
    assert rows == consumed == sorted(rows)
    assert set(rows) <= set(ready)
    parts = [rows[start : start + group] for start in range(0, len(rows), group)]
    assert all(part == list(range(part[0], part[0] + group)) for part in parts)
    if not rows:  # then there are fewer: no run of ready rows can be cut into as many groups
        left, run, found = sorted(ready), 0, 0
        for place, row in enumerate(left):
            run = run + 1 if place and run and row == left[place - 1] + 1 else 1
            found, run = (found + 1, 0) if run == group else (found, run)
        assert found < groups or groups == 0
    else:
        assert len(parts) == groups


def test_settings_and_sizes_that_make_no_groups_are_refused() -> None:
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="n_samples_per_prompt must be positive"):
            GRPOGroupNSampler(wrong)
        with pytest.raises(ValueError, match="dp_size must be positive"):
            SeqlenBalancedSampler(1, wrong)
    for sampler in (GRPOGroupNSampler(4), SeqlenBalancedSampler(4, 2)):
        with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt"):
            sampler(list(range(20)), 3, **CONTEXT)


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, RankAwareSampler])
def test_replicas_of_a_rank_get_the_same_rows(kind: type[BaseSampler]) -> None:
    sampler = kind()
    zero = sampler([0, 1, 2, 3], 2, dp_rank=0, batch_index=0, **CONTEXT)
    assert zero == ([0, 1], [0, 1])
    zero[0].append(99)  # nothing that a caller does changes what the next one gets
    assert sampler([2, 3], 2, dp_rank=1, batch_index=0, **CONTEXT)[0] == [2, 3]
    assert sampler([], 2, dp_rank=0, batch_index=0, **CONTEXT) == ([0, 1], [0, 1])
    assert sampler.has_cached_result("p", "train", {"dp_rank": 0, "batch_index": 0})
    for other in ({"batch_index": 1}, {"task_name": "eval"}, {"partition_id": "q"}):
        asked: dict[str, Any] = {"dp_rank": 0, "batch_index": 0, **CONTEXT, **other}
        assert sampler([7, 8], 2, **asked) == ([7, 8], [7, 8])
    sampler.clear_cache("p")
    assert sampler([5, 6], 2, dp_rank=0, batch_index=0, **CONTEXT) == ([5, 6], [5, 6])
    assert sampler([], 2, dp_rank=0, batch_index=0, task_name="train", partition_id="q")[0]


@pytest.mark.parametrize("kind", [GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler])
def test_an_answer_of_too_few_rows_is_not_remembered(kind: type[BaseSampler]) -> None:
    sampler = kind()
    asked = {"dp_rank": 0, "batch_index": 0}
    assert sampler([1], 2, **asked, **CONTEXT) == ([], [])
    assert not sampler.has_cached_result("p", "train", asked)
    assert sampler([1, 2], 2, **asked, **CONTEXT) == ([1, 2], [1, 2])
    assert sampler.has_cached_result("p", "train", asked)


def test_groups_without_a_batch_index_are_drawn_anew() -> None:
    sampler = GRPOGroupNSampler(2)
    assert sampler([0, 1], 2, dp_rank=0, **CONTEXT)[0] == [0, 1]
    assert not sampler.has_cached_result("p", "train", {"dp_rank": 0})
    assert sampler([2, 3], 2, dp_rank=0, **CONTEXT)[0] == [2, 3]


def test_rank_aware_must_be_told_who_asks() -> None:
    with pytest.raises(ValueError, match="dp_rank -1 must be greater than or equal to 0"):
        RankAwareSampler()([1, 2], 1, dp_rank=-1, batch_index=0, **CONTEXT)
    with pytest.raises(TypeError, match="batch_index"):
        RankAwareSampler()([1, 2], 1, dp_rank=0, **CONTEXT)
    assert list(inspect.signature(RankAwareSampler.sample).parameters)[1:7] == [
        "ready_indexes", "batch_size", "dp_rank", "batch_index", "task_name", "partition_id",
    ]  # fmt: skip


def shares_of(
    sampler: SeqlenBalancedSampler, ready: list[int], size: int, batch: int = 0, **more: Any
) -> list[list[int]]:
    asked = {"batch_index": batch, **CONTEXT, **more}
    answers = [sampler(ready, size, dp_rank=rank, **asked) for rank in range(sampler.dp_size)]
    assert all(rows == consumed for rows, consumed in answers)
    return [rows for rows, _ in answers]


def test_ranks_get_whole_groups_of_about_as_many_tokens() -> None:
    lengths = Tags(dict(enumerate([50, 50, 5, 5, 50, 50, 5, 5])))
    shares = shares_of(SeqlenBalancedSampler(2, 2), list(range(8)), 4, partition=lengths)
    assert shares == [[2, 3, 4, 5], [0, 1, 6, 7]]


def test_ranks_share_rows_where_groups_do_not_divide(caplog: pytest.LogCaptureFixture) -> None:
    lengths = Tags(dict(enumerate([8, 1, 1, 8])))
    shares = shares_of(SeqlenBalancedSampler(4, 2), list(range(4)), 2, partition=lengths)
    assert sorted(map(sorted, shares)) in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert "groups are split" in caplog.text


def test_ranks_get_equal_parts_when_no_lengths_are_known() -> None:
    assert shares_of(SeqlenBalancedSampler(1, 2), [3, 1, 2, 0], 2) == [[0, 1], [2, 3]]
    # A row without the tag counts as one token: 0 and 3 do, and neither rank gets both.
    shares = shares_of(SeqlenBalancedSampler(1, 2), [0, 1, 2, 3], 2, partition=Tags({1: 2, 2: 2}))
    assert [len({0, 3} & set(share)) for share in shares] == [1, 1]


def test_a_rank_that_does_not_exist_gets_nothing() -> None:
    sampler = SeqlenBalancedSampler(1, 2)
    shares_of(sampler, [0, 1, 2, 3], 2)
    for rank in (2, 5, -1):
        assert sampler([4, 5, 6, 7], 2, dp_rank=rank, batch_index=0, **CONTEXT) == ([], [])


def test_a_rank_that_is_ahead_does_not_get_another_rank_s_rows() -> None:
    sampler = SeqlenBalancedSampler(1, 2)
    ready = set(range(8))
    got: list[int] = []
    for rank, batch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        # As the controller does it: only what was handed out is consumed.
        rows, consumed = sampler(sorted(ready), 2, dp_rank=rank, batch_index=batch, **CONTEXT)
        ready -= set(consumed)
        got += rows
    assert sorted(got) == list(range(8))
    ahead = sampler([8, 9, 10, 11], 2, dp_rank=0, batch_index=2, **CONTEXT)[0]
    sampler.clear_cache("p")
    assert sampler._balanced_cache == {}
    assert sampler([8, 9, 10, 11], 2, dp_rank=0, batch_index=3, **CONTEXT)[0] == ahead


def test_rows_kept_for_a_rank_that_has_passed_them_by_are_free_again() -> None:
    sampler = SeqlenBalancedSampler(1, 2)
    # As after a new start of the controller, which knows itself what rank 0 had in batch 0.
    assert sampler([0, 1, 2, 3], 2, dp_rank=1, batch_index=0, **CONTEXT)[0] == [2, 3]
    assert sampler([0, 1], 1, dp_rank=1, batch_index=1, **CONTEXT) == ([], [])
    assert sampler([0, 1], 1, dp_rank=0, batch_index=1, **CONTEXT)[0] == [0]
    assert sampler([1], 1, dp_rank=1, batch_index=1, **CONTEXT)[0] == [1]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_shares_of_ranks_are_disjoint_and_cover_the_batch(
    group: int, ranks: int, per_rank: int, data: st.DataObject
) -> None:
    size = group * per_rank * ranks
    start = data.draw(st.integers(0, 50))
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size))
    ready = list(range(start, start + size))
    lengths = dict(zip(ready, weights, strict=True))
    sampler = SeqlenBalancedSampler(group, ranks)
    shares = shares_of(sampler, ready, group * per_rank, partition=Tags(lengths))
    assert sorted(row for share in shares for row in share) == ready
    assert {len(share) for share in shares} == {group * per_rank}
    for share in shares:
        parts = [share[at : at + group] for at in range(0, len(share), group)]
        assert all(part == list(range(part[0], part[0] + group)) for part in parts)
    assert shares_of(sampler, [], group * per_rank) == shares
    for rank in range(ranks):
        assert sampler.has_cached_result("p", "train", {"dp_rank": rank, "batch_index": 0})


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_parts_weigh_about_the_same(weights: list[int], parts: int, equal: bool) -> None:
    if len(weights) < parts or (equal and len(weights) % parts):
        with pytest.raises(AssertionError, match=r"items"):
            get_seqlen_balanced_partitions(weights, parts, equal_size=equal)
        return
    shares = get_seqlen_balanced_partitions(weights, k_partitions=parts, equal_size=equal)
    assert sorted(place for share in shares for place in share) == list(range(len(weights)))
    assert all(share == sorted(share) != [] for share in shares)
    assert len(shares) == parts
    if equal:
        assert len({len(share) for share in shares}) == 1
    loads = [sum(weights[place] for place in share) for share in shares]
    # What the method promises: joining two divisions never makes them more uneven than they were.
    assert max(loads) - min(loads) <= max(weights)


def test_the_largest_difference_goes_first() -> None:
    # 8-7 and 6-5 become 1 and 1; 4-1 is 3, 3-1 is 2.
    shares = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sorted([8, 7, 6, 5, 4][i] for i in share) for share in shares) == [
        [4, 5, 7], [6, 8],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="0 items"):
        karmarkar_karp([], 2, equal_size=False)


def used(kind: type[BaseSampler]) -> BaseSampler:
    sampler = SeqlenBalancedSampler(1, 2) if kind is SeqlenBalancedSampler else kind()
    sampler([0, 1, 2, 3], 2, dp_rank=0, batch_index=0, **CONTEXT)
    return sampler


@pytest.mark.parametrize(
    "kind",
    [UserMade, SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler],
)
def test_a_restored_sampler_goes_on_where_the_saved_one_was(kind: type[BaseSampler]) -> None:
    sampler = used(kind)
    saved = sampler.save_checkpoint()
    kept = copy.deepcopy(saved)
    sampler([4, 5, 6, 7], 2, dp_rank=0, batch_index=1, **CONTEXT)
    assert saved == kept, "what was saved changes with later answers"
    restored = pickle.loads(pickle.dumps(used(kind)))  # noqa: S301
    restored.clear_cache("p")
    restored.load_checkpoint(kept)
    assert restored.save_checkpoint() == saved
    for rank, batch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        ready = [0, 1, 2, 3, 4, 5, 6, 7]
        asked = {"dp_rank": rank, "batch_index": batch, **CONTEXT}
        other = used(kind)
        other.load_checkpoint(restored.save_checkpoint())
        assert restored(ready, 2, **asked) == other(ready, 2, **asked)
