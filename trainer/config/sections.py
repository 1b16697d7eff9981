"""Sections of a run's settings that only a trainer has; the others are settings of its parts.

Owns names, defaults and short forms. What sections demand of each other is in rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainer.ranks.types import ModelSettings

FOREVER: int = -1
"""Of intervals: never; of what is kept: all of it."""


class Section(BaseModel):
    """Unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(ModelSettings):
    """Where the model comes from: one of path, config and make."""

    make: str | None = None
    """Dotted name of a function that writes a model folder: `make(path, seed=…, **options)`."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `make`; they may also stand beside it."""
    tokenizer: str | None = None
    """A folder with the tokenizer, where that of the model has none."""

    def __post_init__(self) -> None:
        given = [name for name in ("path", "config", "make") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"model: one of path, config and make is set, not {' and '.join(given) or 'none'}"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model: config needs model_type, such as qwen3")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model: config needs tokenizer, the folder of one")
        if self.options and self.make is None:
            raise ValueError("model: options are those of make, which is not set")


MODEL_NAMES = frozenset(entry.name for entry in fields(ModelSection))


def spelled_out_model(value: object) -> object:
    """A path becomes {path: …}; what stands beside `make` and is no setting becomes an option."""
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, Mapping):
        return value
    data = dict(cast("Mapping[str, Any]", value))
    options = {name: data.pop(name) for name in list(data) if name not in MODEL_NAMES}
    if data.get("make") is None:
        return {**data, **options}  # unknown settings, and refused as such
    if options:
        data["options"] = {**(data.get("options") or {}), **options}
    return data


def spelled_out_kind(value: object) -> object:
    """`hf`, {hf: {…}} and {openai: http://…} become {kind: …, …}; a text is the base_url."""
    if isinstance(value, str):
        return {"kind": value}
    if not isinstance(value, Mapping):
        return value
    data = cast("Mapping[str, Any]", value)
    if "kind" in data or len(data) != 1:
        return data
    ((kind, rest),) = data.items()
    if isinstance(rest, str):
        return {"kind": kind, "base_url": rest}
    return {"kind": kind, **(cast("dict[str, Any]", rest) or {})}


class KindSection(Section):
    """A kind with settings of its own, which are passed on as they are."""

    model_config = ConfigDict(extra="allow")

    kind: str

    @property
    def options(self) -> dict[str, Any]:
        """All but the kind."""
        return dict(self.model_extra or {})


class RolloutSection(Section):
    """What produces: the rest is passed on as plain data."""

    model_config = ConfigDict(extra="allow")

    open: str
    """Dotted name of a `trainer.rollouts.OpenRollouts`."""

    @property
    def options(self) -> dict[str, Any]:
        """All but the name."""
        return dict(self.model_extra or {})


class RanksSection(Section):
    """The processes that train."""

    count: int = Field(default=1, ge=1)
    kind: Literal["local", "ray"] = "ray"
    """`ray`: an actor each. `local`: one, in a thread of this process."""
    parallel: Literal["replicated", "fsdp"] = "replicated"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1)
    """Of torch, in each."""
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    """What each asks of Ray; if not set 1 on cuda, else 0."""
    prefetch: int = Field(default=1, ge=0)
    """Packs that are read ahead of the one that is trained."""
    write_back: bool = True
    """Write log-probs of stages to the plane too."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    start_timeout_s: float = Field(default=120.0, gt=0)

    @property
    def gpus(self) -> float:
        """What each asks of Ray."""
        return float(self.device == "cuda") if self.num_gpus is None else self.num_gpus


class StopAt(Section):
    """A mean reward at which training ends before its last step."""

    reward: float
    of: Literal["train", "sampled", "greedy"] = "sampled"
    """Of a training batch, or of an evaluation of this kind."""


def spelled_out_stop(value: object) -> object:
    """A number becomes {reward: …}."""
    return {"reward": value} if isinstance(value, int | float | str) else value


class TrainSection(Section):
    """How long, and in which steps."""

    batch_size: int = Field(ge=1)
    """Groups of a step."""
    total_train_steps: int | None = None
    total_epochs: int | None = None
    """One of the two."""
    sync_weights_interval: int = 1
    """Steps between two versions that generate."""
    stop_at: Annotated[
        StopAt | None,
        BeforeValidator(spelled_out_stop),
    ] = None
    lease_s: float = Field(default=600.0, gt=0)
    """How long claimed rows stay claimed without a connection."""
    sample_timeout_s: float = Field(default=600.0, gt=0)
    """How long a step waits for its groups."""
    shuffle_advantages: bool = False
    """Give every row the advantage of another: a control run, which must learn nothing."""


class Until(Section):
    """A bound on the sampled held-out reward."""

    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _one(self) -> Until:
        if (self.above is None) == (self.below is None):
            raise ValueError("until: one of above and below is set")
        return self

    @property
    def words(self) -> str:
        """The bound as it is said."""
        return f"above {self.above:g}" if self.above is not None else f"at most {self.below:g}"

    def is_reached(self, reward: float) -> bool:
        """Whether it passed `above`, or is at most `below`."""
        if self.above is not None:
            return reward > self.above
        return self.below is not None and reward <= self.below


class WarmupStage(Section):
    """Supervised training on what a demonstrator does, before the first step."""

    demonstrator: str
    """By the name that the rollouts know it."""
    batch_size: int = Field(ge=1)
    """Prompts of a step."""
    lr: float = Field(gt=0)
    max_steps: int = Field(ge=1)
    until: Until | None = None
    """Where it ends before that; None: it makes all its steps."""
    check_every: int = Field(default=10, ge=1)
    """Steps between two looks at the reward."""


class EvaluateSection(Section):
    """Generating from held-out prompts, which are never trained."""

    enabled: bool = True
    evaluate_step: int | None = None
    """Steps between two evaluations."""
    enable_initial_evaluate: bool = False
    prompts: int | None = Field(default=None, ge=1)
    """The same ones each time; None: all."""
    sampled: bool = True
    greedy: bool = False


class CheckpointSection(Section):
    """What is kept to go on from, and to use elsewhere."""

    checkpoint_interval: int | None = None
    checkpoint_maxkeep: int = FOREVER
    hf_interval: int | None = None
    """Steps between two exports in the form of transformers; the last step is exported too."""
    hf_max_keep: int = FOREVER
    auto_resume: bool = False
    """Go on from the newest checkpoint of the run folder, if there is one."""
    checkpoint_no_save_optimizer: bool = False
    checkpoint_no_save_replay_buffer: bool = False
    """Leave out what lies in the plane and was not trained."""

    @property
    def keep(self) -> int | None:
        """How many checkpoints stay; None: all."""
        return self.checkpoint_maxkeep if self.checkpoint_maxkeep > 0 else None

    @property
    def keep_exports(self) -> int | None:
        """How many exports stay; None: all."""
        return self.hf_max_keep if self.hf_max_keep > 0 else None


Tracker = Annotated[KindSection, BeforeValidator(spelled_out_kind)]


class ReportSection(Section):
    """Where values are logged."""

    trackers: tuple[Tracker, ...] = (KindSection(kind="jsonl"),)
    """`jsonl`, `tensorboard`, `wandb`, `trackio`, `prometheus`, with settings as
    {wandb: {project: …}}."""
    all_workers: bool = False
    """Log the values of every rank, and not of rank 0 alone."""

    @model_validator(mode="after")
    def _known(self) -> ReportSection:
        known = ("jsonl", "tensorboard", "wandb", "trackio", "prometheus")
        for tracker in self.trackers:
            if tracker.kind not in known:
                raise ValueError(f"trackers: {tracker.kind!r} is none of {', '.join(known)}")
        return self


class DumpSection(Section):
    """Which trajectories are written to the run folder as text."""

    train: bool = True
    evaluate: bool = True


class DebugSection(Section):
    """One half of the loop at a time."""

    debug_rollout: bool = False
    """Only produce, and write each step's batch to a file."""
    debug_train: bool = False
    """Only train, on those files."""
    debug_rollout_dir: Path | None = None
