"""The settings of a run: one file, checked as a whole, and what its parts are started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from trainer.advantage import AdvantageConfig
from trainer.config.rules import broken_rules
from trainer.config.sections import (
    CheckpointSection,
    DebugSection,
    DumpSection,
    EvaluateSection,
    KindSection,
    ModelSection,
    RanksSection,
    ReportSection,
    RolloutSection,
    Section,
    TrainSection,
    WarmupStage,
    spelled_out_kind,
    spelled_out_model,
)
from trainer.loss import LossConfig
from trainer.plan import PlanConfig
from trainer.plan.topology import Topology
from trainer.ranks.types import ModelSettings, OptimizerSettings, Phase, PlaneAddress, RankSettings
from trainer.select import ReplayPolicy

Resolve: TypeAlias = Callable[[str], Any]
"""What a dotted name stands for; ValueError if nothing."""

MANY_STEPS: Final = 1 << 31
"""More optimizer steps than a plan ever has."""

_RANK_NAMES: Final = "parallel device threads write_back prefetch collective_timeout_s".split()
_MODEL_NAMES: Final = "dtype attention gradient_checkpointing adapter".split()


class RunSettings(Section):
    """A run. `trainer.config.load_settings` reads one from a file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    folder: Path
    """Everything that the run writes; `runs/<name>` if not given."""
    seed: int = Field(default=42, ge=0, lt=1 << 32)
    deterministic: bool = False
    """The same settings give the same weights, bit for bit."""
    plane: PlaneAddress
    """Its name is that of the run if not given."""
    ray_address: str | None = None
    """The Ray cluster that is joined; one is started if not given."""
    model: Annotated[ModelSection, BeforeValidator(spelled_out_model)]
    engine: Annotated[KindSection | None, BeforeValidator(spelled_out_kind)] = None
    ranks: RanksSection = RanksSection()
    optimizer: OptimizerSettings
    loss: LossConfig
    reference: Literal["frozen", "adapter_off"] | None = None
    advantage: AdvantageConfig = AdvantageConfig()
    plan: PlanConfig
    """Its seed is that of the run if not given, and so is whether it is deterministic."""
    replay: ReplayPolicy = ReplayPolicy()
    train: TrainSection
    warmup: tuple[WarmupStage, ...] = ()
    """One after the other."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    report: ReportSection = ReportSection()
    dump: DumpSection = DumpSection()
    debug: DebugSection = DebugSection()
    rollout: RolloutSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, value: object) -> object:
        """What is taken from the run's own name, seed and mode where it is not given."""
        if not isinstance(value, Mapping):
            return value
        data = dict(cast("Mapping[str, Any]", value))
        if data.get("folder") is None:
            data["folder"] = f"runs/{data.get('name')}"
        plane: object = data.get("plane")
        if plane is None or isinstance(plane, Mapping):
            given = cast("Mapping[str, Any]", plane or {})
            data["plane"] = {"name": data.get("name"), **given}
        plan = data.get("plan")
        if isinstance(plan, PlanConfig):
            plan = {name: getattr(plan, name) for name in PlanConfig.__dataclass_fields__}
        if isinstance(plan, Mapping):
            plan = dict(cast("Mapping[str, Any]", plan))
            if plan.get("seed") is None:
                plan["seed"] = data.get("seed", 42)
            plan["deterministic"] = bool(plan.get("deterministic") or data.get("deterministic"))
            data["plan"] = plan
        return data

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: object, info: ValidationInfo) -> object:
        """A loss of one's own is named `package.module:function`."""
        if not isinstance(value, Mapping):
            return value
        data = dict(cast("Mapping[str, Any]", value))
        policy = data.get("policy")
        if isinstance(policy, str) and ":" in policy:
            context = cast("Mapping[str, Any]", info.context or {})
            resolve = cast("Resolve | None", context.get("resolve"))
            if resolve is None:
                raise ValueError(f"loss: {policy!r} is loaded by the command, and not here")
            data["policy"] = resolve(policy)
        return data

    @model_validator(mode="after")
    def _rules(self) -> Self:
        broken = list(broken_rules(self))
        if broken:
            raise ValueError("\n".join(broken))
        return self

    # -- how long -------------------------------------------------------------------------------

    def total_steps(self, dataset_size: int | None) -> int:
        """Training steps of the run.

        Example: 10 prompts in batches of 4 make 2 steps an epoch, so 3 epochs are 6 steps.

        Raises:
            ValueError: epochs are not known to end, or an epoch holds no batch.
        """
        if self.train.total_train_steps is not None:
            return self.train.total_train_steps
        if self.train.total_epochs is None or dataset_size is None:
            raise ValueError("train: how many steps there are is not said, nor how many prompts")
        per_epoch = self.steps_per_epoch(dataset_size)
        if per_epoch == 0:
            raise ValueError(
                f"train.batch_size: batch_size={self.train.batch_size}, and the dataset has "
                f"{dataset_size} prompts: an epoch is no step"
            )
        return per_epoch * self.train.total_epochs

    def steps_per_epoch(self, dataset_size: int) -> int:
        """Whole batches of the dataset."""
        return dataset_size // self.train.batch_size

    # -- what parts are started with ------------------------------------------------------------

    def topology(self) -> Topology:
        """How ranks share a batch: each has a part of its own."""
        return Topology(world_size=self.ranks.count)

    def rank_settings(self, *, model_path: str, plane: PlaneAddress | None = None) -> RankSettings:
        """What ranks are started with: with the model of this folder, at this plane."""
        return RankSettings(
            plane=self.plane if plane is None else plane,
            model=ModelSettings(
                path=model_path, **{name: getattr(self.model, name) for name in _MODEL_NAMES}
            ),
            tokenizer_path=self.model.tokenizer or model_path,
            reference=self.reference,
            world_size=self.ranks.count,
            seed=self.seed,
            deterministic=self.deterministic,
            cap=self.plan.cap,
            optimizer_steps=(
                self.plan.optimizer_steps if self.plan.mini_batch_rows is None else MANY_STEPS
            ),
            **{name: getattr(self.ranks, name) for name in _RANK_NAMES},
        )

    def warmup_phase(self, stage: int) -> Phase:
        """The phase of a stage of the warm-up: cross-entropy, at the stage's own constant rate."""
        return Phase(
            name=f"warmup-{stage + 1}",
            # With advantages of 1 it is cross-entropy; no ratio is taken, so nothing is recomputed.
            loss=LossConfig(policy="policy_gradient", old_logprobs="rollout"),
            optimizer=replace(
                self.optimizer,
                lr=self.warmup[stage].lr,
                schedule="constant",
                warmup_steps=0,
                total_steps=None,
            ),
        )

    def training_phase(self, total_steps: int) -> Phase:
        """The phase of reinforcement learning, of so many training steps."""
        optimizer = self.optimizer
        if optimizer.schedule != "constant" and optimizer.total_steps is None:
            optimizer = replace(optimizer, total_steps=total_steps * self.plan.optimizer_steps)
        return Phase(name="train", loss=self.loss, optimizer=optimizer)

    def required_fields(self) -> tuple[str, ...]:
        """Fields that rows cannot be trained without, beside their tokens."""
        loss = self.loss
        takes = loss.importance is not None or (
            loss.old_logprobs == "rollout" and loss.policy != "policy_gradient"
        )
        return ("logprobs",) if takes else ()

    def rollout_settings(self) -> dict[str, Any]:
        """What the producers get: their section as it is, and the engine."""
        settings = {} if self.rollout is None else self.rollout.options
        if self.engine is not None:
            settings["engine"] = {"kind": self.engine.kind, **self.engine.options}
        return settings

    # -- as data --------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """All settings as plain data, defaults included, that reads back as the same."""
        return cast("dict[str, Any]", _plain(self.model_dump()))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value
