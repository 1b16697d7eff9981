"""From rows in a plane to the plan of a rank: what a controller does between two waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client
from dataplane.fields import align
from tests.trainer.rows import prompt, tags
from trainer.advantage import AdvantageConfig, advantages, batch_statistics
from trainer.plan import PlanConfig, Topology, make_plan
from trainer.select import ReplayPolicy, decide, group_rows, rows_of, select_valid


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Client]:
    settings = {**plane_settings, "host": "embedded"}
    client = dataplane.init(settings, name=f"controller-{os.getpid()}")
    yield client
    client.close(destroy=True)


def put(plane: Client, uid: str, *responses: tuple[int, float], labels: int = 0) -> None:
    """A finished group with a prompt of 3; `labels` makes the first row's labels longer."""
    rows = [3 + response for response, _ in responses]
    its = [
        tags(uid, i, response=response, score=score)
        for i, (response, score) in enumerate(responses)
    ]
    plane.kv_put(uid, "train", tags=dict(prompt(uid).tags))
    plane.kv_batch_put(
        [f"{uid}_{i}_0" for i in range(len(rows))],
        "train",
        {
            "input_ids": [torch.arange(n) for n in rows],
            "labels": [torch.arange(n + (labels if i == 0 else 0)) for i, n in enumerate(rows)],
        },
        its,
    )


def test_a_listing_becomes_the_plan_of_each_rank(plane: Client) -> None:
    put(plane, "a", (3, 1.0), (6, 0.0))
    put(plane, "flat", (2, 0.5), (2, 0.5))
    put(plane, "b", (1, 0.0), (4, 1.0))
    put(plane, "bent", (3, 1.0), (3, 0.0), labels=1)
    groups = group_rows(rows_of(plane.kv_list("train")))
    assert {g.uid: g.status for g in groups} == dict.fromkeys(
        ["a", "flat", "b", "bent"], "finished"
    )

    policy = ReplayPolicy(drop_identical=True)
    first = decide(groups, policy, step=2, batch_size=3)
    assert first.clear_keys == first.evicted[0].group.all_keys
    assert plane.kv_clear(first.clear_keys, "train") == 3
    groups = group_rows(rows_of(plane.kv_list("train")))
    chosen = decide(groups, policy, step=2, batch_size=3, state=first.state).selected

    selection = select_valid(chosen)
    (skipped,) = selection.skipped
    assert skipped.uid == "bent"
    assert "labels has 7 entries for 6 tokens" in skipped.reason
    assert [t.has_rollout_logprobs for t in selection.trajectories] == [False] * 4

    result = advantages(selection.groups, AdvantageConfig())
    topology = Topology(world_size=4, tensor=2)
    made = make_plan(
        [t.train_len for t in selection.trajectories],
        PlanConfig(cap=16, strategy="cost"),
        topology.dp_size,
        keys=selection.keys,
    )
    fetched: list[str] = []
    for part in (made.for_rank(rank) for rank in range(topology.dp_size)):
        mine = part.take(selection.keys)
        rows = plane.kv_batch_get(mine, "train", ["input_ids"], layout="list")
        for key, values, advantage in zip(
            mine, rows["input_ids"], part.take(result.values), strict=True
        ):
            member = next(t for t in selection.trajectories if t.key == key)
            assert len(values) == member.train_len + 1
            assert advantage == pytest.approx(0.7071068 if member.score else -0.7071068)
        fetched += mine
    assert sorted(fetched) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    metrics = batch_statistics(selection.trajectories, result)
    assert metrics["training_tokens"] == made.metrics()["packing/real_tokens"] == 5 + 8 + 3 + 6


def test_v1_a_workers_output_becomes_response_entries() -> None:
    """A worker's entry i predicts token i + 1, so its last one belongs to no token of the row."""
    rows = [(torch.arange(5), 2), (torch.arange(10, 14), 3)]
    found = [
        align(
            output[:-1], "shifted", "response",
            prompt_len=len(output) - response, total_len=len(output), fill=0,
        ).tolist()
        for output, response in rows
    ]  # fmt: skip
    assert found == [[2, 3], [10, 11, 12]]


def test_v2_padded_rows_are_cut_to_their_own_lengths(plane: Client) -> None:
    padded, lengths = torch.tensor([[1, 2, 0], [3, 4, 5]]), [2, 3]
    keys = ["v2a", "v2b"]
    rows = [row[:n] for row, n in zip(padded, lengths, strict=True)]
    plane.kv_batch_put(keys, "vectors", {"values": rows})
    nested = plane.kv_batch_get(keys, "vectors", ["values"])["values"]
    assert [row.tolist() for row in nested.unbind()] == [[1, 2], [3, 4, 5]]
    back = plane.kv_batch_get(keys, "vectors", ["values"], layout="padded")
    assert back["values"].tolist() == padded.tolist()
    assert back.lengths["values"].tolist() == lengths
