"""The plan of a run, in words: what `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpoint
    from trainer.config import RunSettings
    from trainer.model_folder import ModelFacts


def outline(
    settings: RunSettings,
    facts: ModelFacts,
    start: Checkpoint | None,
    *,
    dataset_size: int | None,
) -> Iterator[str]:
    """A line for each part of the run. `dataset_size`: prompts of an epoch; None: not known yet.

    Raises:
        ValueError: an epoch holds no batch.
    """
    where = "from the beginning" if start is None else f"from step {start.step}"
    yield f"run          {settings.name} in {settings.folder}, {where}, seed {settings.seed}"
    yield (
        f"model        {facts.architecture}, {facts.parameters:,} parameters; tokenizer of "
        f"{facts.vocabulary:,} tokens"
    )
    ranks = settings.ranks
    yield f"ranks        {ranks.count} on {ranks.device}, {ranks.kind}, {ranks.parallel}"
    if settings.rollout is not None:
        yield f"rollouts     {settings.rollout.open}"
    for number, stage in enumerate(settings.warmup, 1):
        until = "" if stage.until is None else f", until the sampled reward is {stage.until.words}"
        yield (
            f"warm-up {number}    {stage.demonstrator}: at most {stage.max_steps} steps of "
            f"{stage.batch_size} prompts{until}"
        )
    yield f"steps        {_length_line(settings, dataset_size)}"
    yield f"evaluation   {_evaluation_line(settings)}"
    saved = settings.checkpoint
    yield f"checkpoints  {_interval_line(saved.checkpoint_interval, saved.keep)}"
    yield f"exports      {_interval_line(saved.hf_interval, saved.keep_exports, last=True)}"


def _length_line(settings: RunSettings, dataset_size: int | None) -> str:
    train = settings.train
    if dataset_size is None:
        if train.total_train_steps is not None:
            return f"{train.total_train_steps}, of {train.batch_size} groups"
        return f"{train.total_epochs} epochs, of steps of {train.batch_size} groups"
    per_epoch = settings.steps_per_epoch(dataset_size)
    return (
        f"{settings.total_steps(dataset_size)}, of {train.batch_size} groups; {dataset_size:,} "
        f"prompts are {per_epoch} steps per epoch"
    )


def _evaluation_line(settings: RunSettings) -> str:
    evaluate = settings.evaluate
    if not evaluate.enabled:
        return "none"
    kinds = " and ".join(kind for kind in ("sampled", "greedy") if getattr(evaluate, kind))
    prompts = "all prompts" if evaluate.prompts is None else f"{evaluate.prompts} prompts"
    first = ", and before the first" if evaluate.enable_initial_evaluate else ""
    return f"every {evaluate.evaluate_step} steps{first}: {prompts}, {kinds}"


def _interval_line(interval: int | None, keep: int | None, *, last: bool = False) -> str:
    if interval is None or interval < 1:
        return "none"
    kept = "all are kept" if keep is None else f"the newest {keep} are kept"
    return f"every {interval} steps{' and at the end' if last else ''}; {kept}"
