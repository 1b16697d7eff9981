"""Two trajectories from an agent loop to the tensors of a training step, through a plane.

The worked examples of the specification, one after the other: EX-2.1 and EX-2.2 are made canonical
and published, sampled at step 5, planned, and fetched as the pack of EX-6.1 with the statistics of
EX-4.14. There is no model, and nothing stands in for the plane.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import dataplane
from agentloop.groups.job import GroupJob
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.publish import publish, submit
from agentloop.trajectory.canonicalize import canonicalize_group
from agentloop.trajectory.state import RolloutState, Status
from dataplane import AsyncClient, async_connect
from trainer.advantage import AdvantageConfig
from trainer.controller import Controller, write_advantages
from trainer.materialize import Fetched, PackSpec, PackTensors, pack_plan, reads_for
from trainer.plan import PlanConfig, Topology
from trainer.ranks.types import RankWork
from trainer.replay_buffer import ReplayBuffer
from trainer.select import ReplayPolicy

MODEL_STEP, TRAIN_STEP = 4, 5
I = -100  # noqa: E741 as in the specification


def ex_2_1() -> RolloutState:
    """A plain answer."""
    return RolloutState(
        messages=[], prompt_ids=[10, 11, 12], response_ids=[20, 21, 22],
        response_logprobs=[-0.1, -0.2, -0.3], response_model_steps=[MODEL_STEP] * 3,
        reward={"score": 1.5},
    )  # fmt: skip


def ex_2_2() -> RolloutState:
    """Two turns, and what a tool said between them."""
    return RolloutState(
        messages=[], prompt_ids=[10, 11], response_ids=[20, 21, 90, 91, 22, 2],
        generated=[True, True, False, False, True, True],
        response_logprobs=[-0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
        response_model_steps=[MODEL_STEP] * 6, reward={"score": -0.5},
    )  # fmt: skip


@pytest.fixture
async def client(plane_settings: dict[str, Any]) -> AsyncIterator[AsyncClient]:
    settings = {**plane_settings, "host": "embedded"}
    name = f"end-to-end-{os.getpid()}"
    owner = dataplane.init(settings, name=name)
    async with await async_connect(name, config=settings) as client:
        yield client
    owner.close(destroy=True)


async def generate(client: AsyncClient, uid: str, state: RolloutState) -> None:
    """The agent loop's side: a group of one session, from its prompt to its end."""
    job = GroupJob(
        uid=uid, partition_id="train", task="t", n=1, global_steps=TRAIN_STEP, messages=[]
    )
    await submit(client, "train", [job], persist=False)
    attempt = await client.begin_group(uid, "train", n=1)
    state.uid = uid
    state.status = Status.COMPLETED
    assert canonicalize_group([state]) == []
    await publish(client, [state], job, attempt, PlaneClock())
    await client.end_group(attempt, "finished")


async def fetch(client: AsyncClient, work: RankWork, cap: int) -> list[list[PackTensors]]:
    """The worker's side: its packs, from the rows of its work alone."""
    spec = PackSpec(cap=cap, traits=work.traits, fresh=work.fresh)
    fetched = [
        (read, await client.kv_batch_get(read.keys, work.partition_id, **read.arguments))
        for read in reads_for(work.members, spec)
    ]
    return pack_plan(work.part, work.members, Fetched(fetched), spec, advantages=work.advantages)


async def test_the_end_to_end_fixture_from_an_agent_loop_to_the_tensors_of_ex_6_1(
    client: AsyncClient,
) -> None:
    await generate(client, "ex-2-2", ex_2_2())
    await generate(client, "ex-2-1", ex_2_1())

    buffer = ReplayBuffer(
        client, ReplayPolicy(), partition_id="train", timeout_s=30.0, deterministic=True
    )
    sample = await buffer.sample(TRAIN_STEP, 2)
    assert sample.keys == ["ex-2-1", "ex-2-1_0_0", "ex-2-2", "ex-2-2_0_0"]

    controller = Controller(
        partition_id="train",
        # Of a group of one session it is the score: so the advantages are given.
        advantage=AdvantageConfig(estimator="rloo"),
        plan=PlanConfig(cap=16, strategy="legacy", deterministic=True),
        topology=Topology(world_size=1),
        required=("logprobs",),
        deterministic=True,
    )
    batch = controller.batch(sample.groups, TRAIN_STEP)
    assert batch.selection.keys == ["ex-2-1_0_0", "ex-2-2_0_0"]
    assert [(t.train_len, t.policy_len, t.prompt_len, t.response_len)
            for t in batch.trajectories] == [(5, 3, 3, 3), (7, 4, 2, 6)]  # fmt: skip
    assert batch.advantages.values == [1.5, -0.5]
    assert batch.plan.packs == [[[[0, 1]]]]
    assert batch.global_tokens == [7]

    found = batch.metrics
    assert found["packing/real_tokens"] == found["training_tokens"] == 12
    assert found["packing/padding_tokens"] == 4
    assert found["packing/efficiency"] == 0.75
    assert found["advantages/mean"] == pytest.approx(0.3571429, abs=1e-6)
    assert (found["advantages/min"], found["advantages/max"]) == (-0.5, 1.5)
    assert found["prompt_len/mean"] == 2.5
    assert found["response_len/mean"] == 3.5
    assert found["response_len/std"] == pytest.approx(0.7071068, abs=1e-6)
    # Made by the weights of step 4 and trained at step 5: as fresh as can be.
    assert batch.off_policy["training/off_policy/staleness/max"] == 0

    (work,) = batch.works
    ((pack,),) = await fetch(client, work, cap=16)
    assert pack.input_ids.tolist() == [[10, 11, 12, 20, 21, 10, 11, 20, 21, 90, 91, 22, 0, 0, 0, 0]]
    assert pack.cu_seq_lens.tolist() == [0, 5, 12, 16]
    assert (pack.max_length, pack.num_padding) == (7, 4)
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]]
    assert pack.labels.tolist() == [[I, I, 20, 21, 22, I, 20, 21, I, I, 22, 2, I, I, I, I]]
    due = {
        "advantages": [0, 0, 1.5, 1.5, 1.5, 0, -0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0, 0, 0],
        "logprobs": [0, 0, -0.1, -0.2, -0.3, 0, -0.1, -0.2, 0, 0, -0.3, -0.4, 0, 0, 0, 0],
    }
    for name, values in due.items():
        assert torch.equal(pack[name], torch.tensor([values])), name
    assert int((pack.labels != I).sum()) == batch.global_tokens[0]
    assert pack.consumed_tokens == 12

    await write_advantages(client, batch)
    listing = await client.kv_list("train", where={"advantage": {"exists": True}})
    told = dict(zip(listing.keys, listing.column("advantage").tolist(), strict=True))
    assert told == {"ex-2-1_0_0": 1.5, "ex-2-2_0_0": -0.5}

    await buffer.finish(sample)
    assert len(await client.kv_list("train")) == 0
    assert (await client.status())["bytes_in_use"] == 0
