"""A run whose ranks and rollouts take turns: from its settings to its summary.

    summary = await train(settings, folder, open_rollouts=open_rollouts, model_path=path)

A disaggregated run would have other turns than `_step`, and share the rest: rollouts behind their
Protocol, policy versions in tags, and the stages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from dataplane import DataplaneError, PartitionNotFound, keep_record, write_report
from trainer import debug_rollout
from trainer.checkpoint import Checkpoint, restore_random_states
from trainer.config import RunSettings
from trainer.loop import stages
from trainer.loop.open import opened
from trainer.loop.parts import PARTITIONS, Parts
from trainer.loop.stages import StepRecord
from trainer.loop.warm_up import warm_up
from trainer.report import draw_picture, plane_share
from trainer.rollouts import OpenRollouts
from trainer.run_folder import RunFolder

_log = logging.getLogger(__name__)

RECORD_S = 20.0
"""How long the plane may take to tell what a report tells of it."""


async def train(
    settings: RunSettings,
    folder: RunFolder,
    *,
    open_rollouts: OpenRollouts | None,
    model_path: str,
    resume: Checkpoint | None = None,
) -> dict[str, Any]:
    """Train to the end; the content of `summary.json`.

    Raises:
        RankError, RankLost: a rank failed. The run goes on from its newest checkpoint with
            `--resume`.
        DataplaneError: the plane failed a stage; likewise.
    """
    began = time.monotonic()
    try:
        async with opened(
            settings, folder, open_rollouts=open_rollouts, model_path=model_path, resume=resume
        ) as parts:
            try:
                await _begin(parts, resume)
                records = await _steps(parts)
                left = await _rows_left(parts)
            finally:
                await _keep_record(parts)
    except BaseException:
        # What is known of a run that failed is what is asked for.
        await asyncio.to_thread(_report, folder)
        raise
    share = plane_share([r.plane_s for r in records], [r.times["step"] for r in records])
    summary = {
        **_rewards(parts),
        "steps": parts.standing.step,
        "rows_left": left,
        **share.values(),
        "wall_s": time.monotonic() - began,
        "seed": settings.seed,
    }
    folder.write_summary(summary)
    await asyncio.to_thread(draw_picture, folder.metrics, folder.picture, title=settings.name)
    await asyncio.to_thread(_report, folder)
    parts.progress.say(str(share))
    return summary


async def _begin(parts: Parts, resume: Checkpoint | None) -> None:
    """Bring ranks and rollouts to where the first step finds them."""
    settings, standing = parts.settings, parts.standing
    phase = settings.training_phase(parts.total_steps)
    if resume is not None:
        await parts.ranks.begin_phase(phase)
        await parts.ranks.load(resume.weights)
        restore_random_states(resume.state.random)
        if parts.rollouts is not None:
            if resume.rollouts is None:
                parts.progress.say("the datasets begin anew: the checkpoint does not have them")
            else:
                parts.rollouts.restore(resume.rollouts)
            await stages.give_weights(parts, standing.model_step, replace=True)
            await parts.rollouts.recover(standing.step + 1)
        return
    if settings.warmup:
        await warm_up(parts)
    await parts.ranks.begin_phase(phase)
    if settings.warmup and stages.due(standing.step, settings.checkpoint.checkpoint_interval):
        await stages.save_checkpoint(parts)  # a warm-up is not to be made twice
    if settings.evaluate.enable_initial_evaluate and parts.rollouts is not None:
        parts.trackers.log(
            {f"eval/{name}": value for name, value in (await stages.evaluate(parts, 0)).items()}, 0
        )


async def _steps(parts: Parts) -> list[StepRecord]:
    """Every step that is left; a record of each."""
    parts.throughput.start(time.monotonic())
    parts.progress.begin("training", parts.total_steps, done=parts.standing.step)
    records: list[StepRecord] = []
    for step in range(parts.standing.step + 1, parts.total_steps + 1):
        record = StepRecord(step)
        records.append(record)
        if parts.settings.debug.debug_rollout:
            await _only_produce(parts, record)
            continue
        values = await _step(parts, record)
        if _is_enough(parts, values) and step < parts.total_steps:
            parts.progress.say(f"step {step}: the reward to stop at is reached")
            await _export_last(parts)
            break
    return records


async def _step(parts: Parts, record: StepRecord) -> dict[str, float]:
    """One step, stage after stage; its values."""
    step, lane = record.step, parts.train
    last = step == parts.total_steps
    await stages.produce(parts, record)
    await stages.take(parts, record, lane, _groups_of(parts, record))
    await stages.train(parts, record, lane)
    await stages.clear(parts, record, lane)
    parts.standing.step = step
    handed_over = await stages.pass_weights(parts, record, last=last)
    if handed_over and stages.evaluation_due(parts, step):
        with record.clock.timed("evaluation"):
            record.evaluation = await stages.evaluate(parts, step)
    await stages.save(parts, record, last=last)
    return stages.tell(parts, record)


async def _only_produce(parts: Parts, record: StepRecord) -> None:
    """Produce a batch and write it to a file; nothing is trained."""
    lane, settings = parts.train, parts.settings
    await stages.produce(parts, record)
    await stages.take(parts, record, lane, settings.train.batch_size)
    assert record.sample is not None
    assert settings.debug.debug_rollout_dir is not None
    with record.clock.timed("save_debug_rollout"):
        saved = await debug_rollout.capture(
            parts.client,
            PARTITIONS["train"],
            record.sample.groups,
            step=record.step,
            raw_rewards=record.raw_rewards,
        )
        await debug_rollout.save(settings.debug.debug_rollout_dir, saved)
    await stages.clear(parts, record, lane)
    parts.standing.step = record.step
    stages.tell(parts, record)


def _groups_of(parts: Parts, record: StepRecord) -> int:
    """How many groups a step takes: of a saved batch, those that it has."""
    return record.saved_groups or parts.settings.train.batch_size


def _is_enough(parts: Parts, values: dict[str, float]) -> bool:
    stop_at = parts.settings.train.stop_at
    if stop_at is None:
        return False
    both = parts.settings.evaluate.sampled
    name = {
        "train": "response/rewards/mean",
        "sampled": "eval/reward/mean",
        "greedy": "eval/greedy/reward/mean" if both else "eval/reward/mean",
    }[stop_at.of]
    return values.get(name, float("-inf")) >= stop_at.reward


async def _export_last(parts: Parts) -> None:
    """The last step turned out to be this one: its weights are exported, if any are."""
    interval = parts.settings.checkpoint.hf_interval
    exported = stages.due(parts.standing.step, interval)
    if stages.due(parts.standing.step, interval, last=True) and not exported:
        await stages.export(parts)


async def _keep_record(parts: Parts) -> None:
    """Write down what the plane knows of itself, before it ends. Never a reason to fail."""
    try:
        record = await parts.client.record(timeout=RECORD_S)
        await asyncio.to_thread(keep_record, record, parts.folder.path)
    except (DataplaneError, OSError) as error:
        _log.warning("the report will not tell of the plane: %s", error)


def _report(folder: RunFolder) -> None:
    """Write the page about the run. Never a reason to fail."""
    try:
        write_report(folder.report, run=folder.path)
    except Exception:  # of whatever kind: the run is what counts
        _log.exception("no report was written")


def _rewards(parts: Parts) -> dict[str, float]:
    """The held-out rewards that are known, by the names of the summary."""
    milestones = parts.standing.milestones
    final = {
        f"{kind}_final": milestones[kind] for kind in ("sampled", "greedy") if kind in milestones
    }
    before = {name: value for name, value in milestones.items() if name.startswith("sampled_")}
    return {**before, **final}


async def _rows_left(parts: Parts) -> int:
    """Rows of the run that still lie in the plane; 0 where everything was cleared."""

    async def count(partition_id: str) -> int:
        try:
            return len(await parts.client.kv_list(partition_id, columns=()))
        except PartitionNotFound:
            return 0

    counts: Sequence[int] = await asyncio.gather(*map(count, PARTITIONS.values()))
    return sum(counts)
