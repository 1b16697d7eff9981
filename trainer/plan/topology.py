"""How the ranks of the training engine share the rows of a batch.

Owns the logical data-parallel size and which rank has which part. It records the trainer's own
parallelism only: how rollout engines are split never enters, so there is no field for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import PlanError

_SIZES = ("world_size", "tensor", "pipeline", "context", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The parallel layout that the engine reports.

    | engine | data-parallel size | consecutive ranks |
    |---|---|---|
    | fsdp | world / (sequence * tensor) | replicas of one part |
    | megatron | world / (tensor * pipeline * context) | tensor, context, data, pipeline innermost
    first |
    | either, with `dynamic_context` | 1: sequences are cut over all ranks as they come | one part |

    Example: Topology(engine="megatron", world_size=16, tensor=2, pipeline=2).dp_size == 4.
    """

    engine: Literal["fsdp", "megatron"] = "fsdp"
    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence: int = 1
    """Sequence parallelism of its own (Ulysses); Megatron's runs inside its tensor groups."""
    dynamic_context: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"topology: {name} is a number from 1 on, not {size!r}")
        if self.engine not in ("fsdp", "megatron"):
            raise ValueError(f"topology: engine is 'fsdp' or 'megatron', not {self.engine!r}")
        foreign = ("pipeline", "context") if self.engine == "fsdp" else ("sequence",)
        for name in foreign:
            if getattr(self, name) != 1:
                raise ValueError(f"topology: {self.engine} has no {name} parallelism of its own")
        if self.world_size % self._shards:
            raise PlanError(
                f"{self.world_size} ranks do not divide into replicas of {self._shards} "
                f"({self._spelled()})"
            )

    @property
    def _shards(self) -> int:
        return self.tensor * self.pipeline * self.context * self.sequence

    def _spelled(self) -> str:
        sizes = ((name, getattr(self, name)) for name in _SIZES[1:])
        return " * ".join(f"{name} {size}" for name, size in sizes if size > 1)

    @property
    def dp_size(self) -> int:
        """Into how many parts a batch is divided."""
        return 1 if self.dynamic_context else self.world_size // self._shards

    @property
    def replica_size(self) -> int:
        """How many ranks train the same part."""
        return self.world_size // self.dp_size

    def dp_rank(self, rank: int) -> int:
        """Whose part a rank trains.

        Example: with tensor=2, sequence=2, ranks 0 to 3 have part 0 and ranks 4 to 7 part 1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        inner = self.tensor * self.context * self.sequence
        return (rank // inner) % self.dp_size if self.dp_size > 1 else 0

    def ranks_of(self, dp_rank: int) -> list[int]:
        """The ranks that train one part: they share one copy of it."""
        return [rank for rank in range(self.world_size) if self.dp_rank(rank) == dp_rank]
