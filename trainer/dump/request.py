"""What is dumped, by key: plain data that travels to whoever reads and writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainer.select import Group

Kind: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Dumped:
    """One prompt and those of its trajectories that are dumped."""

    uid: str
    prompt_key: str | None
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """One file: the trajectories of one step, in this order."""

    kind: Kind
    step: int
    partition_id: str
    prompts: tuple[Dumped, ...]

    @classmethod
    def of(cls, kind: Kind, step: int, partition_id: str, groups: Iterable[Group]) -> DumpRequest:
        """All trajectories of these groups."""
        prompts = (Dumped(group.uid, group.prompt_key, tuple(group.keys)) for group in groups)
        return cls(kind, step, partition_id, tuple(prompts))

    @property
    def file_name(self) -> str:
        """The file's name in the folder of dumps."""
        return f"{self.kind}_rollout_{self.step}.jsonl"
