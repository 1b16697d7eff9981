"""Packs of rows that lie in a plane: the same tensors however they are got, none left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dataplane
from dataplane import Client, FieldNotFound
from tests.trainer.materials import Sample, ex_2_1, ex_2_2, members, packed, sample, spec_of
from tests.trainer.rows import tags
from trainer.advantage import Advantages, batch_statistics
from trainer.materialize import (
    Experts,
    Fetched,
    Freshness,
    PackSpec,
    PackTensors,
    Teacher,
    new_buffers,
    pack_plan,
    pack_rows,
    reads_for,
)
from trainer.plan import PlanConfig, make_plan
from trainer.select import group_rows, rows_of, select_valid
from trainer.trajectory import BatchTraits, Trajectory


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Client]:
    settings = {**plane_settings, "host": "embedded"}
    client = dataplane.init(settings, name=f"materialize-{os.getpid()}")
    yield client
    client.close(destroy=True)


def put(plane: Client, samples: Sequence[Sample]) -> None:
    for one in samples:
        plane.kv_put(one.row.key, "train", one.fields)


def get(plane: Client, rows: Sequence[Trajectory], spec: PackSpec, **options: Any) -> Fetched:
    reads = reads_for(rows, spec, **options)
    return Fetched([(r, plane.kv_batch_get(r.keys, "train", **r.arguments)) for r in reads])


def equal(one: PackTensors, other: PackTensors) -> bool:
    names = ("input_ids", "labels", "position_ids", "cu_seq_lens")
    return (
        all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
        and set(one.columns) == set(other.columns)
        and all(torch.equal(one[name], other[name]) for name in one.columns)
        and (one.max_length, one.num_padding) == (other.max_length, other.num_padding)
    )


def rich(n: int, session: int) -> Sample:
    """A row with everything that goes by the token."""
    rng = np.random.default_rng([n, session])
    return sample(
        range(1, 4), range(5, 5 + n), [i % 3 != 1 for i in range(n)], rng.normal(size=n),
        session=session,
        fields={
            "old_logprobs": torch.as_tensor(rng.normal(size=n + 3), dtype=torch.float32),
            "advantages": torch.as_tensor(rng.normal(size=n + 3), dtype=torch.float32),
            "routed_experts": torch.as_tensor(rng.integers(0, 8, (n + 2, 4)).astype(np.uint16)),
            "teacher_ids": torch.as_tensor(rng.integers(0, 9, (n, 2))),
            "teacher_logprobs": torch.as_tensor(rng.normal(size=(n, 2)), dtype=torch.float32),
        },
        policy_spans=[[0, sum(i % 3 != 1 for i in range(n))]],
    )  # fmt: skip


def test_a_rank_gets_its_packs_with_few_gets_and_one_pack_gets_the_same(plane: Client) -> None:
    samples = [rich(n, i) for i, n in enumerate([4, 1, 9, 6, 2])]
    put(plane, samples)
    rows = members(samples)
    spec = spec_of(
        samples, 16, columns=("old_logprobs", "advantages"), teacher=Teacher("topk", 2),
        experts=Experts(8, 2, 2),
    )  # fmt: skip
    part = make_plan([r.train_len for r in rows], PlanConfig(cap=16, seed=1), 1).for_rank(0)
    assert len(reads_for(rows, spec)) == 2
    together = pack_plan(part, rows, get(plane, rows, spec), spec, generator=torch.Generator())
    into = new_buffers(spec)
    for pack, places in zip(together[0], part.packs[0], strict=True):
        mine = [rows[i] for i in places]
        fetched = get(plane, mine, spec, one_pack=True, into=into)
        alone = pack_rows(mine, fetched, spec, generator=torch.Generator())
        due = packed(
            [samples[i] for i in places], spec, advantages=None, generator=torch.Generator()
        )
        assert equal(pack, due)
        assert equal(alone, due)
        assert alone.labels.data_ptr() == into["labels"].data_ptr()
        assert pack.routed_experts is not None
        assert alone.routed_experts is not None
        used = sum(pack.lengths)
        real = slice(0, used)
        experts = [p.routed_experts[real].to(torch.int64) for p in (pack, alone, due)]  # type: ignore[index]
        assert torch.equal(experts[0], experts[2])
        assert torch.equal(experts[1], experts[2])


def test_the_end_to_end_fixture(plane: Client) -> None:
    """EX-2.1 and EX-2.2 from a plane to the tensors of EX-6.1, with the statistics of EX-4.14."""
    samples = [ex_2_1(uid="end"), ex_2_2(uid="end")]
    its = [
        tags("end", i, prompt=one.row.prompt_len, response=one.row.response_len,
             policy_len=one.row.policy_len)
        for i, one in enumerate(samples)
    ]  # fmt: skip
    for one, tag in zip(samples, its, strict=True):
        plane.kv_put(one.row.key, "end", one.fields, tag)
    groups = group_rows(rows_of(plane.kv_list("end")))
    selection = select_valid(groups)
    assert selection.keys == ["end_0_0", "end_1_0"]
    rows = selection.trajectories
    config = PlanConfig(cap=16, step_split="ceil", deterministic=True)
    plan = make_plan([row.train_len for row in rows], config, 1, keys=selection.keys)
    assert plan.packs == [[[[0, 1]]]]
    assert (plan.real_tokens, plan.padding_tokens, plan.efficiency) == (12, 4, 0.75)
    part = plan.for_rank(0).in_pack_order()
    spec = PackSpec(cap=plan.cap, traits=BatchTraits.of(rows))
    mine = part.take(rows)
    reads = reads_for(mine, spec)
    fetched = Fetched([(r, plane.kv_batch_get(r.keys, "end", **r.arguments)) for r in reads])
    advantages = Advantages([1.5, -0.5], [1.5, -0.5])
    ((pack,),) = pack_plan(part, mine, fetched, spec, advantages=part.take(advantages.values))
    assert equal(pack, packed(samples, advantages=[1.5, -0.5]))
    found = batch_statistics(rows, advantages)
    assert found["advantages/mean"] == pytest.approx(0.3571429, abs=1e-6)
    assert found["training_tokens"] == pack.consumed_tokens == 12
    supervised = pack["advantages"][pack.mask]
    assert supervised.mean().item() == pytest.approx(found["advantages/mean"], abs=1e-6)


def test_scenario_6_what_came_back_changes_nothing_in_the_plane(plane: Client) -> None:
    """Staleness clears labels in the reader's memory: the next step may count it otherwise."""
    row = ex_2_1(uid="kept", policy_spans=[[0, 3]])
    put(plane, [row])
    spec = spec_of([row])
    for _ in range(2):
        pack = pack_rows([row.row], get(plane, [row.row], spec), spec, advantages=[1.0])
        assert pack.num_supervised == 3
        stale = replace(spec, fresh=Freshness(9, 1))
        found = pack_rows([row.row], get(plane, [row.row], stale), stale, advantages=[1.0])
        assert found.num_supervised == 0


def test_a_field_that_a_row_lacks_is_named_by_the_get(plane: Client) -> None:
    rows = [ex_2_1(uid="lacks"), ex_2_2(uid="lacks")]
    put(plane, rows)
    spec = spec_of(rows, columns=("values",))
    with pytest.raises(FieldNotFound, match="values"):
        get(plane, members(rows), spec)


def test_log_probs_go_back_under_their_keys(plane: Client) -> None:
    """What a worker computed in a pack is one more field of each row, a token an entry."""
    rows = [ex_2_1(uid="back"), ex_2_2(uid="back")]
    put(plane, rows)
    spec = spec_of(rows)
    pack = pack_rows(members(rows), get(plane, members(rows), spec), spec, advantages=[1.0, 2.0])
    computed = torch.randn(1, 16)
    back = pack.rows_of(computed)
    plane.kv_batch_put(list(back), "train", {"old_logprobs": list(back.values())}, must_exist=True)
    more = replace(spec, columns=("old_logprobs",))
    again = pack_rows(members(rows), get(plane, members(rows), more), more, advantages=[1.0, 2.0])
    assert torch.equal(again["old_logprobs"][0, :12], computed[0, :12])
    assert not again["old_logprobs"][0, 12:].any()


def test_rg_34_what_a_group_shares_goes_with_it_though_a_worker_failed(plane: Client) -> None:
    grid = np.array([[1, 2, 4]], np.int32)
    pixels = {"pixel_values": torch.rand(8, 3).to(torch.bfloat16), "image_grid_thw": grid}
    plane.kv_put("rg34", "images", {"multi_modal_inputs": pixels}, {"uid": "rg34"})
    rows = [ex_2_1(uid="rg34", shared="rg34"), ex_2_2(uid="rg34", shared="rg34")]
    for one in rows:
        plane.kv_put(one.row.key, "images", one.fields)
    spec = replace(spec_of(rows), multi_modal=True)
    reads = reads_for(members(rows), spec)
    fetched = Fetched([(r, plane.kv_batch_get(r.keys, "images", **r.arguments)) for r in reads])
    pack = pack_rows(members(rows), fetched, spec, advantages=[1.0, 2.0])
    images = pack.multi_modal
    assert torch.equal(images["pixel_values"], torch.cat([pixels["pixel_values"]] * 2))  # type: ignore[list-item]
    assert images["image_grid_thw"].tolist() == [[1, 2, 4]] * 2
    assert images["image_grid_thw"].dtype == torch.int64
    with pytest.raises(ValueError, match="a pack holds 4"):
        pack_rows(members(rows), fetched, replace(spec, cap=4), advantages=[1.0, 2.0])
    assert plane.kv_clear(["rg34", *(one.row.key for one in rows)], "images") == 3
    assert plane.kv_clear(["rg34"], "images") == 0
    assert plane.kv_list("images").keys == []


def test_three_axes_and_plain_text_of_one_batch(plane: Client) -> None:
    axes = torch.tensor([[0, 1, 1, 3], [0, 1, 2, 3], [0, 2, 1, 3]])
    rows = [
        sample(
            [1, 2], [3, 4], uid="axes", fields={"position_ids": axes}, position_layout="mrope_3d"
        ),
        sample([5], [6, 7], uid="axes", session=1),
    ]
    put(plane, rows)
    spec = spec_of(rows, 5)
    pack = pack_rows(members(rows), get(plane, members(rows), spec), spec, advantages=[1.0, 1.0])
    assert pack.position_ids[:, 0].tolist() == [[0, 1, 1, 0, 1], [0, 1, 2, 0, 1], [0, 2, 1, 0, 1]]


def test_an_empty_pack_asks_for_nothing(plane: Client) -> None:
    del plane
    spec = PackSpec(cap=8, traits=BatchTraits.of([Trajectory.of("k", tags())]))
    assert reads_for([], spec, one_pack=True) == []
    assert pack_rows([], Fetched(), spec).num_padding == 8
