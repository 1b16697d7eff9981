"""Cases of samplers alone: who gets which of the ready rows."""

from __future__ import annotations

from typing import Any

from tests.interop.parity.cases import category, raised

case = category("samplers", live=False)


class _Lengths:
    """What a sampler sees of a partition: the tags of rows by index."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {i: {"total_lengths": self.lengths[i]} for i in indexes}


def _asked(rank: int, batch: int, **rest: Any) -> dict[str, Any]:
    return {"task_name": "t", "partition_id": "p", "dp_rank": rank, "batch_index": batch, **rest}


@case
def the_first_ready_rows(tq: Any) -> Any:
    sampler = tq.SequentialSampler()
    return [sampler.sample([4, 1, 7], 2), sampler([4], 2), sampler.sample([], 1)]


@case
def groups_of_consecutive_rows(tq: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    return [sampler.sample([0, 1, 2, 3, 5, 6], 4), sampler.sample([3, 2, 1, 0], 2)]


@case
def groups_that_are_not_whole(tq: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=3)
    return [sampler.sample([0, 1, 3, 4, 6], 3), sampler.sample([0, 1, 2, 4], 6)]


@case
def a_batch_that_groups_do_not_divide(tq: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    return [raised(sampler.sample, [0, 1, 2], 3), raised(tq.GRPOGroupNSampler, 0)]


@case
def a_rank_gets_its_groups_again(tq: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    first = sampler.sample([0, 1, 2, 3], 2, **_asked(0, 0))
    config = {"dp_rank": 0, "batch_index": 0}
    cached = sampler.has_cached_result("p", "t", config)
    again = sampler.sample([2, 3], 2, **_asked(0, 0))
    sampler.clear_cache("p")
    return [first, cached, again, sampler.has_cached_result("p", "t", config)]


@case
def a_rank_gets_its_rows_again(tq: Any) -> Any:
    sampler = tq.RankAwareSampler()
    first = sampler.sample([3, 4, 5, 6], 2, **_asked(0, 0))
    other = sampler.sample([5, 6], 2, **_asked(1, 0))
    again = sampler.sample([], 2, **_asked(0, 0))
    return [first, other, again, sampler.sample([7], 2, **_asked(0, 1))]


@case
def a_rank_that_is_not_given(tq: Any) -> Any:
    sampler = tq.RankAwareSampler()
    return [raised(sampler.sample, [1], 1, **_asked(-1, 0)), raised(sampler.sample, [1], 1)]


@case
def a_cache_of_another_partition(tq: Any) -> Any:
    sampler = tq.RankAwareSampler()
    sampler.sample([1, 2], 2, **_asked(0, 0))
    config = {"dp_rank": 0, "batch_index": 0}
    sampler.clear_cache("q")
    kept = sampler.has_cached_result("p", "t", config)
    others = [sampler.has_cached_result(*of, config) for of in (("q", "t"), ("p", "u"))]
    return [
        kept,
        others,
        sampler.has_cached_result("p", "t", {}),
        sampler.has_cached_result("p", "t"),
    ]


@case
def lengths_are_balanced(tq: Any) -> Any:
    lengths = [10, 200, 30, 150, 90, 60, 120, 40]
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    partition = _Lengths(lengths)
    shares = [
        sampler.sample(list(range(8)), 4, **_asked(r, 0, partition=partition)) for r in (0, 1)
    ]
    return [
        sorted(sum(lengths[i] for i in rows) for rows, _ in shares),
        [len(s) for s, _ in shares],
    ]


@case
def groups_are_balanced_whole(tq: Any) -> Any:
    lengths = [5, 5, 100, 90, 40, 50, 60, 70]
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    partition = _Lengths(lengths)
    shares = [
        sampler.sample(list(range(8)), 4, **_asked(r, 0, partition=partition)) for r in (1, 0)
    ]
    return sorted([rows for rows, _ in shares])


@case
def an_equal_split_without_lengths(tq: Any) -> Any:
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    shares = [sampler.sample(list(range(6)), 3, **_asked(r, 0)) for r in (0, 1)]
    return [*shares, sampler.sample(list(range(4)), 3, **_asked(0, 1))]


@case
def sizes_that_are_refused(tq: Any) -> Any:
    wrong = ({"dp_size": 0}, {"n_samples_per_prompt": 0}, {"n_samples_per_prompt": -1})
    return [raised(tq.SeqlenBalancedSampler, **given) for given in wrong]


@case
def a_sampler_of_ones_own(tq: Any) -> Any:
    class Last(tq.BaseSampler):
        def sample(self, ready_indexes: Any, batch_size: Any, *args: Any, **kwargs: Any) -> Any:
            rows = ready_indexes[-batch_size:]
            return rows, rows[:1]

    sampler = Last()
    return [sampler([1, 2, 3], 2), sampler.has_cached_result("p", "t"), raised(tq.BaseSampler)]


@case
def a_state_is_saved_and_loaded(tq: Any) -> Any:
    one, two = tq.RankAwareSampler(), tq.RankAwareSampler()
    one.sample([1, 2, 3], 2, **_asked(0, 0))
    two.load_checkpoint(one.save_checkpoint())
    return [two.sample([], 2, **_asked(0, 0)), two.has_cached_result("p", "t", _asked(0, 0))]
