"""The logical data-parallel size, and who trains which part."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import PlanError
from trainer.plan import Topology


@pytest.mark.parametrize(
    ("layout", "dp_size"),
    [
        ({"world_size": 8}, 8),
        ({"world_size": 8, "sequence": 2}, 4),
        ({"world_size": 8, "sequence": 8}, 1),
        ({"world_size": 8, "tensor": 2, "sequence": 2}, 2),
        ({"world_size": 16, "engine": "megatron"}, 16),
        ({"world_size": 16, "engine": "megatron", "tensor": 2}, 8),
        ({"world_size": 16, "engine": "megatron", "tensor": 2, "pipeline": 2}, 4),
        ({"world_size": 16, "engine": "megatron", "tensor": 2, "pipeline": 2, "context": 2}, 2),
        ({"world_size": 16, "engine": "megatron", "tensor": 2, "dynamic_context": True}, 1),
        ({"world_size": 8, "sequence": 2, "dynamic_context": True}, 1),
    ],
)
def test_the_data_parallel_size(layout: dict[str, Any], dp_size: int) -> None:
    topology = Topology(**layout)
    assert topology.dp_size == dp_size
    assert topology.replica_size * dp_size == topology.world_size


@pytest.mark.parametrize(
    ("rank", "tensor", "sequence", "dp_rank"),
    [
        (0, 1, 1, 0),
        (3, 1, 1, 3),
        (1, 2, 1, 0),
        (2, 2, 1, 1),
        (3, 2, 2, 0),
        (4, 2, 2, 1),
        (7, 2, 2, 1),
    ],
)
def test_ex_5_9_whose_part_a_rank_trains(
    rank: int, tensor: int, sequence: int, dp_rank: int
) -> None:
    topology = Topology(world_size=8, tensor=tensor, sequence=sequence)
    assert topology.dp_rank(rank) == dp_rank


def test_pipeline_stages_of_one_part_lie_apart() -> None:
    """Megatron counts tensor first and pipeline last: ranks 0, 1 and 4, 5 share a part."""
    topology = Topology(engine="megatron", world_size=8, tensor=2, pipeline=2)
    assert topology.ranks_of(0) == [0, 1, 4, 5]
    assert topology.ranks_of(1) == [2, 3, 6, 7]


def test_rollout_parallelism_has_no_place_here() -> None:
    assert not [field.name for field in fields(Topology) if "rollout" in field.name]
    with pytest.raises(TypeError):
        Topology(world_size=8, rollout_tensor=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ({"world_size": 6, "sequence": 4}, PlanError, "6 ranks do not divide.*sequence 4"),
        ({"world_size": 4, "tensor": 2, "sequence": 4}, PlanError, r"8 \(tensor 2 \* sequence 4\)"),
        ({"world_size": 0}, ValueError, "world_size is a number from 1 on"),
        ({"world_size": 4, "tensor": 0}, ValueError, "tensor is a number from 1 on"),
        ({"world_size": 4, "pipeline": 2}, ValueError, "fsdp has no pipeline parallelism"),
        ({"world_size": 4, "context": 2}, ValueError, "fsdp has no context parallelism"),
        ({"world_size": 4, "engine": "megatron", "sequence": 2}, ValueError, "megatron has no seq"),
        ({"world_size": 4, "engine": "jax"}, ValueError, "engine is 'fsdp' or 'megatron'"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    layout: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Topology(**layout)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 8 is not one of 8"):
        Topology(world_size=8).dp_rank(8)


@given(
    st.sampled_from(["fsdp", "megatron"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_parts_divide_the_ranks_equally(
    engine: Any, tensor: int, second: int, pipeline: int, dp: int
) -> None:
    more = {"sequence": second} if engine == "fsdp" else {"context": second, "pipeline": pipeline}
    world = dp * tensor * second * more.get("pipeline", 1)
    topology = Topology(engine=engine, world_size=world, tensor=tensor, **more)
    assert topology.dp_size == dp
    parts = [topology.ranks_of(part) for part in range(dp)]
    assert sorted(rank for part in parts for rank in part) == list(range(world))
    assert {len(part) for part in parts} == {topology.replica_size}
