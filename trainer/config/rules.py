"""What settings of a run demand of each other: every broken rule, in words.

Owns the rules of intervals, lengths and modes. They are looked at once each setting by itself is
right, all of them, so that a file is corrected in one go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.sections import FOREVER

if TYPE_CHECKING:
    from trainer.config.settings import RunSettings


def broken_rules(settings: RunSettings) -> Iterator[str]:
    """A line for each rule that does not hold."""
    yield from _length(settings)
    yield from _intervals(settings)
    yield from _evaluation(settings)
    yield from _debugging(settings)
    yield from _loss(settings)
    yield from _parts(settings)


def multiple_of_sync(name: str, value: int, sync: int) -> str | None:
    """What is wrong with an interval that must hold whole ones of the weights' hand-over."""
    section, _, short = name.rpartition(".")
    if value <= 0:
        return f"{name}: {short}={value} is no interval; write a number from 1 on"
    if value % sync:
        return (
            f"{name}: {short}={value} is no multiple of sync_weights_interval={sync}, so the "
            f"{section} would have weights that never generated"
        )
    return None


def _length(settings: RunSettings) -> Iterator[str]:
    train = settings.train
    if train.sync_weights_interval <= 0:
        yield (
            f"train.sync_weights_interval: sync_weights_interval={train.sync_weights_interval}; "
            "write a number from 1 on"
        )
    given = {
        name: value
        for name in ("total_train_steps", "total_epochs")
        if (value := getattr(train, name)) is not None
    }
    for name, value in given.items():
        if value <= 0:
            yield f"train.{name}: {name}={value}; write a number from 1 on"
    if len(given) == 2:
        yield "train: total_train_steps and total_epochs are both set; one of them says how long"
    if not given and not settings.debug.debug_train:
        yield "train: neither total_train_steps nor total_epochs is set; one of them says how long"


def _intervals(settings: RunSettings) -> Iterator[str]:
    checkpoint, sync = settings.checkpoint, settings.train.sync_weights_interval
    for name in ("checkpoint_interval", "hf_interval"):
        value = getattr(checkpoint, name)
        if value is None or value == FOREVER or sync <= 0:
            continue
        wrong = multiple_of_sync(f"checkpoint.{name}", value, sync)
        if wrong is not None:
            yield wrong
    for name in ("checkpoint_maxkeep", "hf_max_keep"):
        value = getattr(checkpoint, name)
        if value != FOREVER and value < 1:
            yield f"checkpoint.{name}: {name}={value}; write a number from 1 on, or -1 to keep all"


def _evaluation(settings: RunSettings) -> Iterator[str]:
    evaluate, sync = settings.evaluate, settings.train.sync_weights_interval
    stop_at = settings.train.stop_at
    if stop_at is not None and stop_at.of != "train":
        off = [name for name in ("enabled", stop_at.of) if not getattr(evaluate, name)]
        for name in off[:1]:
            yield (
                f"train.stop_at: waits for the {stop_at.of} reward of an evaluation, and "
                f"evaluate.{name} is false"
            )
    if not evaluate.enabled or settings.debug.debug_rollout or settings.debug.debug_train:
        return
    if evaluate.evaluate_step is None:
        yield (
            "evaluate.evaluate_step: is not set; write how many steps lie between evaluations, or "
            "evaluate.enabled: false"
        )
    elif sync > 0:
        wrong = multiple_of_sync("evaluate.evaluate_step", evaluate.evaluate_step, sync)
        if wrong is not None:
            yield wrong
    if not (evaluate.sampled or evaluate.greedy):
        yield "evaluate: sampled and greedy are both false; one of them, or enabled: false"


def _debugging(settings: RunSettings) -> Iterator[str]:
    debug = settings.debug
    if debug.debug_rollout and debug.debug_train:
        yield "debug: debug_rollout and debug_train are both set; one half runs at a time"
    for name in ("debug_rollout", "debug_train"):
        if getattr(debug, name) and debug.debug_rollout_dir is None:
            yield f"debug.debug_rollout_dir: is not set, and {name} needs it"
    if settings.rollout is None and not debug.debug_train:
        yield "rollout: is not set; rollout.open names what produces"
    if debug.debug_train and settings.warmup:
        yield "warmup: debug_train has no rollouts, and warm-up needs them"


def _loss(settings: RunSettings) -> Iterator[str]:
    if settings.loss.kl is not None and settings.reference is None:
        yield "reference: is not set, and loss.kl measures the distance to one"
    if settings.reference is not None and settings.loss.kl is None:
        yield f"loss.kl: is not set, and nothing else looks at the reference {settings.reference!r}"
    if settings.reference == "adapter_off" and settings.model.adapter is None:
        yield "reference: adapter_off needs model.adapter, which is not set"
    if settings.advantage.by_token:
        yield (
            f"advantage.estimator: {settings.advantage.estimator!r} needs the field 'values', "
            "which a critic writes, and no stage of this trainer does"
        )
    stops = settings.optimizer.schedule != "constant" and settings.optimizer.total_steps is None
    if stops and settings.plan.mini_batch_rows is not None:
        yield (
            f"optimizer.total_steps: is not set; the schedule {settings.optimizer.schedule!r} "
            "needs it, because plan.mini_batch_rows leaves open how many optimizer steps there are"
        )


def _parts(settings: RunSettings) -> Iterator[str]:
    if settings.ranks.kind == "local" and settings.ranks.count != 1:
        yield (
            f"ranks.count: count={settings.ranks.count}, and kind: local is one rank in a thread; "
            "write kind: ray"
        )
    if settings.replay.mode != "sync":
        yield f"replay.mode: mode={settings.replay.mode}; this loop trains and produces in turns"
    rows = settings.plan.mini_batch_rows
    if rows is not None and rows % settings.ranks.count:
        yield (
            f"plan.mini_batch_rows: mini_batch_rows={rows} does not divide by the "
            f"{settings.ranks.count} ranks"
        )
    inner = {} if settings.rollout is None else settings.rollout.options
    if settings.engine is not None and "engine" in inner:
        yield "engine: is set here and as rollout.engine; one of them"
