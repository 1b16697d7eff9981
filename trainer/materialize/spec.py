"""What all packs of one batch have in common; the same on every rank.

Ranks meet in one collective per column, so which columns there are is decided for the batch, by
settings and by `BatchTraits`, and never by the rows that a rank happens to have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from trainer.materialize.columns import COLUMNS, TEACHER_IDS, TEACHER_INDICES, TEACHER_LOGPROBS
from trainer.select.staleness import is_stale
from trainer.trajectory import BatchTraits

PADDING_CHUNK: Final = 1024
"""Padding is cut into sequences of this length: attention over one long one would cost more."""
WIDE_EXPERTS: Final = 65_536
"""More experts than this have ids of over 16 bits."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Targets of a teacher that answered during the rollout: fields `teacher_…` of every row."""

    kind: Literal["sampled", "topk"]
    """Log-probs of the sampled tokens, or of the teacher's own k likeliest ones with their ids."""
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("sampled", "topk"):
            raise ValueError(f"teacher: kind is 'sampled' or 'topk', not {self.kind!r}")
        if self.kind == "topk" and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"teacher: topk needs top_k from 1 on, not {self.top_k!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that packs get for it."""
        if self.kind == "sampled":
            return (TEACHER_LOGPROBS.name,)
        return (TEACHER_LOGPROBS.name, TEACHER_IDS.name)

    @property
    def trail(self) -> tuple[int, ...]:
        """What an entry of its columns is shaped like."""
        return () if self.kind == "sampled" or self.top_k is None else (self.top_k,)


@dataclass(frozen=True, slots=True)
class Experts:
    """The router of the model whose choices are replayed: field `routed_experts`."""

    count: int
    layers: int
    topk: int

    def __post_init__(self) -> None:
        for name in ("count", "layers", "topk"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"experts: {name} is a number from 1 on, not {value!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type that holds every id."""
        return torch.uint16 if self.count <= WIDE_EXPERTS else torch.int64


@dataclass(frozen=True, slots=True)
class Freshness:
    """Which tokens are too old to be trained: those at or beyond this staleness."""

    train_step: int
    threshold: int

    def is_stale(self, model_step: int) -> bool:
        """Whether tokens of these weights are left out."""
        return is_stale(model_step, self.train_step, self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSpec:
    """Length and columns of the packs of a batch."""

    cap: int
    """Length of every pack; `Plan.cap`."""
    traits: BatchTraits = field(default_factory=BatchTraits)
    columns: Sequence[str] = ()
    """Fields of `COLUMNS` that every row has by now, because a stage wrote them: old_logprobs,
    ref_logprobs, values, and advantages where they differ by token."""
    teacher: Teacher | None = None
    train_teachers: bool = False
    """Teachers run in the training worker; packs say which of them scores which token."""
    experts: Experts | None = None
    """Needed where the batch has routed experts; without it they are left where they are."""
    fresh: Freshness | None = None
    """Supervised tokens older than this lose their label. None: all are trained."""
    multi_modal: bool = False
    """Whether `multi_modal_inputs` are fetched."""

    def __post_init__(self) -> None:
        if type(self.cap) is not int or self.cap < 1:
            raise ValueError(f"packs: cap is a number from 1 on, not {self.cap!r}")
        built_in = ("input_ids", "labels", "logprobs")
        for name in self.columns:
            if name in built_in or name not in COLUMNS:
                known = ", ".join(sorted(set(COLUMNS).difference(built_in)))
                raise ValueError(f"packs: {name!r} is no further column; those are {known}")
        if len(set(self.columns)) != len(self.columns):
            raise ValueError(f"packs: a column is named twice in {list(self.columns)}")

    @property
    def replays_experts(self) -> bool:
        """Whether packs carry routed experts."""
        return self.experts is not None and self.traits.has_routed_experts

    @property
    def has_three_axes(self) -> bool:
        """Whether positions have three axes."""
        return self.traits.position_layout == "mrope_3d"

    @property
    def template(self) -> tuple[str, ...]:
        """The columns of every pack of every rank beside ids, labels and advantages, in order."""
        names = [name for name in self.columns if name != "advantages"]
        if self.traits.has_rollout_logprobs:
            names.insert(0, "logprobs")
        if self.teacher is not None:
            names += self.teacher.columns
        if self.train_teachers:
            names.append(TEACHER_INDICES.name)
        return tuple(names)
