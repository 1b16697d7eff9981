"""The order of prompts and their ids, over epochs and restarts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.datasets import PromptRow, Sampler


class Prompts:
    """A dataset of numbered prompts."""

    overlong = 0

    def __init__(self, count: int, first: str = "prompt 0") -> None:
        self.count = count
        self.first = first
        self.broken = set[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> PromptRow:
        if position in self.broken:
            raise OSError("the file is gone")
        text = self.first if position == 0 else f"prompt {position}"
        return PromptRow(position, [{"role": "user", "content": text}], {}, None, [position])


def drawn(sampler: Sampler, count: int) -> list[int]:
    return [sampler.next().index for _ in range(count)]


def test_ex_1_the_third_prompt_has_group_2_and_rollouts_4_and_5() -> None:
    sampler = Sampler(Prompts(5), repeat=2)
    ids = [(p.group_id, p.rollout_ids) for p in (sampler.next() for _ in range(3))]
    assert ids == [(0, (0, 1)), (1, (2, 3)), (2, (4, 5))]


@given(st.integers(1, 40), st.integers(), st.integers(1, 4))
def test_every_epoch_has_every_prompt_once(count: int, seed: int, epochs: int) -> None:
    sampler = Sampler(Prompts(count), seed=seed)
    for epoch in range(epochs):
        prompts = [sampler.next() for _ in range(count)]
        assert sorted(p.index for p in prompts) == list(range(count))
        assert {p.epoch for p in prompts} == {epoch}
    assert sampler.drawn == count * epochs


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one, other = Sampler(Prompts(50), seed=1), Sampler(Prompts(50), seed=2)
    orders = [tuple(drawn(sampler, 50)) for sampler in (one, one, other)]
    assert len(set(orders)) == 3


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert drawn(Sampler(Prompts(3), shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint holds the seed and not the order: another release must make the same one."""
    assert drawn(Sampler(Prompts(8), seed=0), 16) == ORDER_OF_SEED_0


ORDER_OF_SEED_0 = [5, 0, 6, 4, 1, 3, 2, 7, 0, 2, 5, 7, 1, 6, 4, 3]


@given(st.integers(1, 12), st.integers(0, 40), st.booleans(), st.integers(0, 3))
def test_a_restored_sampler_continues_as_if_nothing_had_happened(
    count: int, before: int, shuffle: bool, seed: int
) -> None:
    settings: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "repeat": 3, "name": "maths"}
    one = Sampler(Prompts(count), **settings)
    drawn(one, before)
    state = json.loads(json.dumps(one.state()))
    other = Sampler(Prompts(count), **settings)
    other.restore(state)
    for _ in range(count + 3):
        assert one.next() == other.next()


def test_the_state_is_as_small_after_a_million_draws() -> None:
    sampler = Sampler(Prompts(1000))
    small = sampler.state()
    sampler.restore({**small, "drawn": 1_000_000_007})
    assert sampler.next().epoch == 1_000_000
    assert len(json.dumps(sampler.state())) < len(json.dumps(small)) + 12


def test_rg_28_no_uid_is_used_twice_over_epochs_samplers_and_a_resume() -> None:
    """The reference's ids start again after an epoch, and one row overwrites the other."""
    prompts = Prompts(4)
    train, held_out = (Sampler(prompts, run_id="run", name=n) for n in ("train", "eval"))
    uids = [sampler.next().uid for sampler in (train, held_out) for _ in range(12)]
    resumed = Sampler(prompts, name="train")
    resumed.restore(train.state())
    uids += [resumed.next().uid for _ in range(12)]
    other_run = Sampler(prompts, name="train")
    uids += [other_run.next().uid for _ in range(12)]
    assert max(Counter(uids).values()) == 1
    assert all(len(uid) == 32 and set(uid) <= set("0123456789abcdef") for uid in uids)


def test_names_and_runs_that_join_to_the_same_text_differ() -> None:
    uids = {
        Sampler(Prompts(1), run_id=run, name=name).uid(draw)
        for run, name, draw in [("a", "b1", 1), ("a", "b", 11), ("ab", "1", 1), ("ab", "", 11)]
    }
    assert len(uids) == 4


def test_a_resumed_run_names_the_draws_it_repeats_as_before() -> None:
    sampler = Sampler(Prompts(4))
    drawn(sampler, 3)
    state = sampler.state()
    lost = [sampler.next().uid for _ in range(5)]
    again = Sampler(Prompts(4))
    again.restore(state)
    assert [again.next().uid for _ in range(5)] == lost
    assert again.run_id == sampler.run_id


def test_draws_that_nothing_came_of_come_again_first_as_the_same_prompts() -> None:
    sampler = Sampler(Prompts(4), repeat=2)
    five = [sampler.next() for _ in range(5)]
    state = json.loads(json.dumps(sampler.state([3, 1])))
    again = Sampler(Prompts(4), repeat=2)
    again.restore(state)
    assert [again.next(), again.next()] == [five[1], five[3]]  # with their uids and epochs
    assert (again.next(), again.drawn) == (sampler.next(), 6)
    again.restore(state)
    again.next()
    assert again.state()["again"] == [3]
    assert "again" not in sampler.state()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Sampler(Prompts(5)), "prompts 4, this one has 5"),
        (Sampler(Prompts(4, "another")), "first"),
        (Sampler(Prompts(4), seed=1), "seed 0, this one has 1"),
        (Sampler(Prompts(4), shuffle=False), "shuffle True, this one has False"),
        (Sampler(Prompts(4), name="eval"), "name '', this one has 'eval'"),
    ],
)  # fmt: skip
def test_the_state_of_another_order_is_refused(other: Sampler, message: str) -> None:
    sampler = Sampler(Prompts(4))
    drawn(sampler, 3)
    run_id = other.run_id
    with pytest.raises(ValueError, match=message):
        other.restore(sampler.state())
    assert (other.drawn, other.run_id) == (0, run_id)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"version": None}, {"drawn": -1}, {"drawn": "3"}, {"run_id": 7},
        {"again": [3]}, {"again": [-1]}, {"again": ["1"]}, {"again": 1},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    sampler = Sampler(Prompts(4))
    with pytest.raises(ValueError, match="sampler"):
        sampler.restore({**sampler.state(), **change})
    assert sampler.drawn == 0


def test_more_sessions_for_each_prompt_may_be_asked_for_after_a_restart() -> None:
    sampler = Sampler(Prompts(4), repeat=2)
    drawn(sampler, 3)
    wider = Sampler(Prompts(4), repeat=8)
    wider.restore(sampler.state())
    assert wider.next().rollout_ids == tuple(range(24, 32))


def test_a_prompt_that_cannot_be_read_is_not_skipped() -> None:
    prompts = Prompts(3)
    sampler = Sampler(prompts, shuffle=False)
    prompts.broken = {1}
    assert sampler.next().index == 0
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            sampler.next()
    prompts.broken = set()
    assert (sampler.next().index, sampler.drawn) == (1, 2)


def test_an_empty_dataset_and_no_sessions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(Prompts(0))
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(Prompts(1), repeat=0)
