"""Settings of a rollout: validated once, read at the entry point, plain data all the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, DirectoryPath, Field, model_validator

from agentloop.groups.task import Policy
from agentloop.production.split import check_names


class Settings(BaseModel):
    """Unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoopConfig(Settings):
    """An agent loop by its dotted name, `package.module:Class`."""

    path: str = "agentloop.loops.single_turn:SingleTurnLoop"
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class. Tools are named by dotted names."""


class TaskConfig(Settings):
    """One task: prompts, the loop that answers them, the judge of the answers."""

    name: str
    weight: float = Field(default=1.0, ge=0)
    """Its share of a batch, relative to the other tasks."""
    n: int = Field(default=4, ge=1)
    """Sessions per prompt."""
    dataset: dict[str, Any]
    loop: LoopConfig = LoopConfig()
    reward: dict[str, Any] | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    is_valid_sample: str | None = None
    """Dotted name of a function that says whether a completed group is worth training."""
    incomplete: Policy = "fail"
    filtered: Policy = "fail"
    declared_bytes: int | None = Field(default=None, ge=0)
    """Room that a group reserves when it begins."""
    session_timeout_s: float = Field(default=1800.0, gt=0)
    turn_timeout_s: float = Field(default=600.0, gt=0)
    admission_timeout_s: float = Field(default=600.0, gt=0)
    partial_rollout: bool = True


class PlaneConfig(Settings):
    """Which plane the trajectories go to."""

    name: str = "default"
    address: str | None = None
    """The unix socket of a plane without Ray, or a gateway (`grpcs://host:port`); found by its name
    if not set."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of `dataplane.Config`."""


class ModelConfig(Settings):
    """The model and tokenizer that sessions run against."""

    path: DirectoryPath | None = None
    """A local folder as `save_pretrained` writes it."""
    tiny: str | None = None
    """Make a tiny random model of this family (`llama`, …) instead: to try things out."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("a model is given by its path, or made with tiny; one of the two")
        return self


class WorkersConfig(Settings):
    """Where sessions run."""

    kind: Literal["local", "process", "ray"] = "process"
    count: int = Field(default=1, ge=1)
    groups: int = Field(default=8, ge=1)
    """Groups that one worker runs at once."""
    plane: PlaneConfig | None = None
    """How workers join the plane, where that is not as their manager does: through a gateway, with
    a token of their own. They are told no other way."""
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    """What one worker asks of Ray."""
    start_timeout_s: float = Field(default=120.0, gt=0)


class WorkerConfig(Settings):
    """What one worker has to know."""

    plane: PlaneConfig
    ray_address: str | None = None
    """The cluster that a worker process joins, where the plane is hosted by Ray."""
    model_path: Path | None = None
    """Folder of the model and its tokenizer; None for loops and engines that need neither."""
    engine: dict[str, Any]
    tasks: list[TaskConfig]
    eval_tasks: list[TaskConfig] = []


class DemonstratorConfig(Settings):
    """A demonstrator by its dotted name, `package.module:Class`."""

    path: str
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the class, beside the tokenizer and the seed."""


class DemonstrationsConfig(Settings):
    """Episodes to learn from, by somebody who knows how it is done."""

    demonstrator: DemonstratorConfig
    tasks: list[TaskConfig] = []
    """None: the tasks that are trained, one session a prompt, not judged."""
    groups: int = Field(default=64, ge=1)
    """Groups that are run at once."""


class RolloutsConfig(Settings):
    """The producers of a training run; its model and plane are the run's."""

    engine: dict[str, Any] = Field(default_factory=lambda: {"kind": "hf"})
    workers: WorkersConfig = WorkersConfig()
    tasks: list[TaskConfig] = Field(min_length=1)
    eval_tasks: list[TaskConfig] = []
    demonstrations: dict[str, DemonstrationsConfig] = Field(
        default_factory=dict[str, DemonstrationsConfig]
    )
    """By name."""
    persist_prompts: bool = True
    reissues: int = Field(default=2, ge=0)

    @model_validator(mode="after")
    def _names(self) -> RolloutsConfig:
        check_names([task.name for task in self.tasks], [task.name for task in self.eval_tasks])
        for demonstrations in self.demonstrations.values():
            if demonstrations.tasks:
                check_names([task.name for task in demonstrations.tasks])
        return self


class RunConfig(Settings):
    """A rollout: `python -m agentloop.run --config FILE`."""

    plane: PlaneConfig = PlaneConfig()
    partition_id: str = "train"
    model: ModelConfig
    engine: dict[str, Any] = Field(default_factory=lambda: {"kind": "hf"})
    workers: WorkersConfig = WorkersConfig()
    tasks: list[TaskConfig] = Field(min_length=1)
    eval_tasks: list[TaskConfig] = []
    """Run once at the end, in a partition of their own; nothing of them is trained."""
    eval_partition_id: str = "val"
    eval_prompts: int = Field(default=8, ge=1)
    """Prompts of the evaluation, over all its tasks."""
    batch_size: int = Field(default=8, ge=1)
    """Groups per step."""
    steps: int = Field(default=1, ge=1)
    seed: int = 0
    persist_prompts: bool = True
    reissues: int = Field(default=2, ge=0)
    keep: bool = False
    """Leave what was produced in the plane, rather than clear each step's groups."""

    @model_validator(mode="after")
    def _names(self) -> RunConfig:
        check_names([task.name for task in self.tasks], [task.name for task in self.eval_tasks])
        return self
