"""From the groups of a sample to the work of every rank: what each gets, and what is told of it."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

import dataplane
from dataplane import AsyncClient, KeyNotFound, async_connect
from tests.trainer.materials import ex_2_1, ex_2_2, packed, spec_of
from tests.trainer.rows import failed, prompt, row
from trainer.advantage import AdvantageConfig
from trainer.controller import Batch, Controller, plan_batch, write_advantages
from trainer.errors import PlanError
from trainer.materialize import Fetched, Freshness, PackSpec, pack_plan
from trainer.plan import PlanConfig, Topology
from trainer.select import Group, group_rows

GRPO = AdvantageConfig()
IN_ORDER = PlanConfig(cap=16, deterministic=True)


def group(uid: str, *scores: float | None, **more: Any) -> Group:
    """A finished group of one session a score."""
    rows = [prompt(uid, n=len(scores))]
    rows += [row(uid, i, score=score, **more) for i, score in enumerate(scores)]
    (made,) = group_rows(rows)
    return made


def planned(groups: Sequence[Group], *, ranks: int = 1, **more: Any) -> Batch:
    more = {"advantage": GRPO, "plan": IN_ORDER, "step": 5, **more}
    return plan_batch(groups, partition_id="train", topology=Topology(world_size=ranks), **more)


# -- work ----------------------------------------------------------------------------------------


def test_each_rank_gets_its_rows_in_pack_order_with_their_advantages() -> None:
    groups = [group("a", 1.0, 0.0, response=5), group("b", 0.0, 1.0, response=3)]
    batch = planned(groups, ranks=2, plan=PlanConfig(cap=12, strategy="balance"), step=7)
    assert len(batch.works) == 2
    assert sorted(m.key for work in batch.works for m in work.members) == [
        "a_0_0", "a_1_0", "b_0_0", "b_1_0",
    ]  # fmt: skip
    for rank, work in enumerate(batch.works):
        assert (work.partition_id, work.train_step) == ("train", 7)
        assert work.part == batch.plan.for_rank(rank).in_pack_order()
        places = [place for step in work.part.packs for pack in step for place in pack]
        assert places == list(range(len(work.members)))
        for member, advantage in zip(work.members, work.advantages, strict=True):
            assert advantage == pytest.approx(0.7071068 if member.score else -0.7071068)
        assert work.global_tokens == batch.global_tokens == [16]


def test_replicas_share_one_work() -> None:
    batch = plan_batch(
        [group("a", 1.0, 0.0)], step=1, partition_id="p", advantage=GRPO, plan=IN_ORDER,
        topology=Topology(world_size=4, sequence=2),
    )  # fmt: skip
    assert len(batch.works) == 2


def test_ex_6_13_tokens_of_a_step_are_counted_over_all_ranks_the_empty_one_included() -> None:
    sizes = [7, 3]
    rows = [prompt("u")]
    rows += [row("u", i, prompt=2, response=n, score=float(i)) for i, n in enumerate(sizes)]
    batch = planned(group_rows(rows), ranks=3, plan=PlanConfig(cap=9, deterministic=True))
    assert [[len(w.members), w.global_tokens] for w in batch.works] == [
        [1, [10]], [1, [10]], [0, [10]],
    ]  # fmt: skip


def test_tokens_that_are_too_old_are_in_no_count_and_workers_are_told() -> None:
    rows = [prompt("u")]
    rows += [
        row("u", 0, response=5, score=1.0, policy_spans=[[0, 2], [4, 3]]),
        row("u", 1, response=4, score=0.0, policy_spans=[[4, 4]]),
        row("u", 2, response=4, score=0.0),
    ]
    batch = planned(group_rows(rows), token_threshold=4)
    assert batch.global_tokens == [3 + 4 + 4]
    assert batch.works[0].fresh == Freshness(5, 4)
    everything = planned(group_rows(rows))
    assert everything.global_tokens == [13]
    assert everything.works[0].fresh is None


def test_global_tokens_are_what_workers_find_in_the_labels_of_their_packs() -> None:
    samples = [ex_2_1(), ex_2_2(policy_spans=[[0, 2], [4, 2]])]
    rows = [prompt("u")]
    for one in samples:
        r = one.row
        rows.append(
            row("u", r.session_id, prompt=r.prompt_len, response=r.response_len,
                policy_len=r.policy_len, score=0.0, policy_spans=list(map(list, r.policy_spans)),
                has_rollout_logprobs=True)
        )  # fmt: skip
    for threshold, due in ((None, 7), (4, 5)):
        batch = planned(group_rows(rows), token_threshold=threshold)
        spec = spec_of(samples, fresh=batch.works[0].fresh)
        pack = packed(samples, spec)
        assert batch.global_tokens == [int((pack.labels != -100).sum())] == [due]


def test_rg_38_a_step_in_which_no_rank_has_a_row_is_dropped() -> None:
    groups = [group("a", 1.0, 0.0, prompt=2, response=2)]
    plan = PlanConfig(cap=4, optimizer_steps=4, strategy="balance")
    batch = planned(groups, ranks=2, plan=plan)
    assert batch.plan.num_optimizer_steps == len(batch.global_tokens) == 1
    assert all(batch.global_tokens)
    for work in batch.works:
        assert len(work.part.packs) == 1
    kept = planned(
        groups, ranks=2,
        plan=PlanConfig(cap=4, optimizer_steps=4, strategy="balance", drop_empty_steps=False),
    )  # fmt: skip
    assert kept.plan.num_optimizer_steps > 1, "the case is the one that is meant"


def test_rg_40_a_rank_with_an_empty_pack_has_the_columns_of_the_batch() -> None:
    rows = [prompt("u"), row("u", 0, has_rollout_logprobs=True, score=1.0)]
    batch = planned(group_rows(rows), ranks=2)
    full, empty = batch.works
    assert (len(full.members), len(empty.members)) == (1, 0)
    assert empty.traits == full.traits == batch.traits
    assert empty.traits.has_rollout_logprobs
    assert empty.part.packs == [[[]]]
    spec = PackSpec(cap=16, traits=empty.traits)
    ((pack,),) = pack_plan(empty.part, [], Fetched([]), spec, advantages=[])
    assert torch.equal(pack["logprobs"], torch.zeros(1, 16))


def test_rg_37_a_sample_without_a_reward_trains_where_its_task_weighs_nothing() -> None:
    rows = [prompt("u"), row("u", 0, score=None)]
    batch = planned(group_rows(rows), advantage=AdvantageConfig(task_adv_weight=0))
    assert [m.key for m in batch.works[0].members] == ["u_0_0"]
    assert list(batch.works[0].advantages) == [0.0]
    assert batch.metrics["training_samples"] == 1
    assert batch.metrics["rewards/mean"] == 0.0
    scored = [*rows, row("u", 1, score=1.0)]
    mixed = planned(group_rows(scored), advantage=AdvantageConfig(task_adv_weight=0))
    assert mixed.metrics["rewards/mean"] == mixed.metrics["rewards/min"] == 1.0
    with pytest.raises(ValueError, match="'u_0_0': its score is missing"):
        planned(group_rows(scored))


# -- order ---------------------------------------------------------------------------------------


def test_deterministic_batches_do_not_depend_on_who_arrived_first() -> None:
    one = [prompt("b"), row("b", 1), row("b", 0, 1), row("b", 0, 0), prompt("a"), row("a", 0)]
    batches = [
        planned(group_rows(rows), deterministic=True, shuffle_seed=3, ranks=2)
        for rows in (one, one[::-1])
    ]
    assert batches[0].works == batches[1].works
    assert batches[0].selection.keys == ["a_0_0", "b_0_0", "b_0_1", "b_1_0"]
    assert planned(group_rows(one)).selection.keys == ["b_1_0", "b_0_1", "b_0_0", "a_0_0"]


# -- other advantages ----------------------------------------------------------------------------


def test_supervised_rows_all_have_an_advantage_of_1_whatever_their_scores() -> None:
    groups = [group("a", 1.0, 0.0), group("b", None), group("c", 0.5, 0.5)]
    batch = planned(groups, supervised=True)
    assert batch.advantages.values == [1.0] * 5
    assert batch.metrics["advantages/mean"] == 1.0
    assert batch.metrics["rewards/mean"] == 0.5


def test_shuffled_advantages_are_the_same_numbers_at_other_rows() -> None:
    groups = [group(f"g{i}", *[float(k) for k in range(4)]) for i in range(8)]
    plain = planned(groups).advantages
    shuffled = [
        planned(groups, shuffle_seed=s, step=t) for s, t in [(1, 5), (1, 5), (1, 6), (2, 5)]
    ]
    values = [batch.advantages.values for batch in shuffled]
    assert values[0] == values[1]
    assert plain.values not in values
    assert values[0] != values[2] != values[3] != values[0]
    for batch in shuffled:
        assert sorted(batch.advantages.values) == sorted(plain.values)
        assert batch.metrics["rewards/mean"] == 1.5
        assert list(batch.works[0].advantages) == batch.advantages.values


def test_what_differs_by_token_is_not_planned_here() -> None:
    with pytest.raises(PlanError, match="differs by token"):
        planned([group("a", 1.0, 0.0)], advantage=AdvantageConfig(estimator="gae"))


# -- what is told --------------------------------------------------------------------------------


def test_skipped_groups_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    (bad,) = group_rows([prompt("bad"), row("bad", 0), failed("bad", 1)])
    controller = Controller(
        partition_id="train", advantage=GRPO, plan=IN_ORDER, topology=Topology(world_size=1)
    )
    with caplog.at_level(logging.WARNING):
        batch = controller.batch([group("a", 1.0, 0.0), bad], 9)
    assert [skip.uid for skip in batch.skipped] == ["bad"]
    assert batch.metrics["skipped_groups"] == 1
    assert batch.metrics["training_samples"] == 2
    (record,) = caplog.records
    assert record.getMessage() == "step 9 leaves out group bad: bad_1_0 is failed"
    assert batch.metrics["packing/plan_time_s"] >= 0
    with pytest.raises(ValueError, match="step 9 has no valid training samples"):
        controller.batch([bad], 9)


def test_a_field_that_the_run_requires_is_missed_by_name() -> None:
    with pytest.raises(ValueError, match="'a_0_0' has no field 'routed_experts'"):
        planned([group("a", 1.0)], required=("routed_experts",))


def test_metrics_are_those_of_the_batch_its_packs_and_its_age() -> None:
    rows = [prompt("u")]
    rows += [row("u", i, score=float(i), min_global_steps=2, max_global_steps=3) for i in range(2)]
    batch = planned(group_rows(rows), raw_rewards=(3.0, 4))
    assert batch.metrics["raw_rewards/mean"] == 0.75
    assert batch.metrics["rewards/mean"] == 0.5
    assert batch.metrics["packing/real_tokens"] == batch.metrics["training_tokens"] == 10
    assert batch.off_policy["training/off_policy/staleness/mean"] == 1
    assert batch.off_policy["training/off_policy/worst/max"] == 2


# -- written back --------------------------------------------------------------------------------


@pytest.fixture
async def client(plane_settings: dict[str, Any]) -> AsyncIterator[AsyncClient]:
    settings = {**plane_settings, "host": "embedded"}
    name = f"advantages-{os.getpid()}"
    owner = dataplane.init(settings, name=name)
    async with await async_connect(name, config=settings) as client:
        yield client
    owner.close(destroy=True)


async def test_advantages_are_written_back_as_tags_of_rows_that_are_there(
    client: AsyncClient,
) -> None:
    batch = planned([group("a", 1.0, 0.0)])
    with pytest.raises(KeyNotFound):
        await write_advantages(client, batch)
    await client.kv_batch_put(batch.selection.keys, "train", tags=[{"n": 0}, {"n": 1}])
    await write_advantages(client, batch)
    listing = await client.kv_list("train")
    assert listing.keys == batch.selection.keys
    assert listing.tags == [
        {"n": n, "advantage": value} for n, value in enumerate(batch.advantages.values)
    ]
    await client.kv_clear([batch.selection.keys[0]], "train")
    with pytest.raises(KeyNotFound) as gone:
        await write_advantages(client, batch)
    assert gone.value.keys == [batch.selection.keys[0]]
