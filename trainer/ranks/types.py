"""What goes to a training rank and what comes back: plain data, small, never a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from trainer.loss.config import LossConfig
from trainer.materialize.spec import Experts, Freshness, Teacher
from trainer.plan.types import RankPlan
from trainer.trajectory import BatchTraits, Trajectory

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model that is trained: a transformers causal language model."""

    path: str | None = None
    """A folder as `save_pretrained` writes it (safetensors only)."""
    config: Mapping[str, Any] | None = None
    """Or a configuration with `model_type`: random weights, by the seed."""
    dtype: str | None = None
    """Such as `float32`; None: the one it was saved with."""
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    adapter: Mapping[str, Any] | None = None
    """Settings of a LoRA adapter (`peft.LoraConfig`); None: all weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm, over all ranks; None: they are left alone."""
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    """Optimizer steps in which the rate rises from 0."""
    total_steps: int | None = None
    """Optimizer steps at whose end linear and cosine have come down."""
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training with one loss and one optimizer. Each begins with a fresh optimizer."""

    name: str
    loss: LossConfig
    optimizer: OptimizerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneAddress:
    """The plane that ranks join."""

    name: str
    address: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What every rank is started with; the same for all."""

    plane: PlaneAddress
    model: ModelSettings
    tokenizer_path: str | None = None
    """Saved beside exported weights."""
    reference: Literal["frozen", "adapter_off"] | None = None
    """A frozen copy of the first weights, or the model without its adapter; None: there is none."""
    world_size: int = 1
    parallel: Literal["replicated", "fsdp"] = "replicated"
    device: str = "cpu"
    """`cpu` (gloo) or `cuda` (nccl)."""
    threads: int | None = None
    """Of torch, in each rank."""
    seed: int = 42
    deterministic: bool = False
    cap: int
    """Length of a pack."""
    optimizer_steps: int = 1
    """The most that a plan may have."""
    write_back: bool = True
    """Whether log-probs of stages are written to the plane too, under the keys of their rows."""
    prefetch: int = 1
    """Packs that are read ahead of the one that is trained."""
    collective_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one data-parallel rank does with a batch. Its replicas share it."""

    partition_id: str
    train_step: int
    members: Sequence[Trajectory]
    """Its rows in the order of its packs (`RankPlan.in_pack_order`)."""
    part: RankPlan
    advantages: Sequence[float]
    """One for each member."""
    global_tokens: Sequence[int]
    """Supervised tokens over all ranks. # [optimizer steps]"""
    cap: int | None = None
    """Length of a pack that was planned with; refused where ranks have another one."""
    traits: BatchTraits = field(default_factory=BatchTraits)
    """Of the whole batch, whatever this rank has of it."""
    teacher: Teacher | None = None
    experts: Experts | None = None
    fresh: Freshness | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What became of it."""

    rank: int
    steps: Sequence[Mapping[str, float]]
    """Metrics of each optimizer step: `loss`, `grad_norm`, `lr`, `step_consumed_tokens`,
    `efficient_attn_ratio`, `reduced_train_policy_…`, on GPUs `max_memory` and `reserved_memory`."""
    metrics: Mapping[str, float]
    """Of the whole batch: `mismatch/…`, `rollout_is/…`, `entropy/train`, `entropy/rollout`,
    `packing_conversion_time_s`, `packing_pack_time_s`."""
    plane_time_s: float
    """Seconds in which it waited for calls of the plane."""
