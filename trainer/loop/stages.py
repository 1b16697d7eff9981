"""The stages of a training step, each a function of the run's parts.

    produce -> take -> train -> clear -> pass weights -> evaluate -> save -> tell

They stand in the order in which a step takes them. Every stage leaves the plane and the ranks such
that the next one, or the same one of a run that is resumed, can begin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane import ValueLost
from trainer import debug_rollout
from trainer.batch import Batch
from trainer.checkpoint import TrainState, random_states
from trainer.errors import UnusableBatch
from trainer.evaluate import evaluation_metrics, mean_score
from trainer.loop.clock import StepClock
from trainer.loop.decisions import due, hand_over
from trainer.loop.parts import PARTITIONS, Lane, Parts
from trainer.ranks.outcome import RankError
from trainer.ranks.types import RankReport
from trainer.replay_buffer import Sample
from trainer.report import StepWork, step_values
from trainer.rollouts import Produced
from trainer.select import group_rows, rows_of


@dataclass(slots=True)
class StepRecord:
    """What happened in one step."""

    step: int
    clock: StepClock = field(default_factory=StepClock)
    produced: Produced | None = None
    raw_rewards: tuple[float, int] = (0.0, 0)
    """Sum and count of the scores that producers saw."""
    saved_groups: int | None = None
    """How many groups came out of a file; None: they were generated."""
    sample: Sample | None = None
    batch: Batch | None = None
    reports: Sequence[RankReport] = ()
    evaluation: dict[str, float] = field(default_factory=dict[str, float])
    times: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage, and of the whole step; there once the step is told."""
    plane: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds in which calls of the plane were waited for, by stage."""

    @property
    def plane_s(self) -> float:
        """Of all stages together."""
        return sum(self.plane.values())


async def produce(parts: Parts, record: StepRecord) -> None:
    """Have the groups of this step in the plane: generated, or as an earlier run saved them."""
    step, settings = record.step, parts.settings
    if settings.debug.debug_train:
        assert settings.debug.debug_rollout_dir is not None
        with record.clock.timed("load_debug_rollout"):
            saved = await debug_rollout.load(settings.debug.debug_rollout_dir, step)
            await debug_rollout.replay(parts.client, PARTITIONS["train"], saved)
        record.raw_rewards, record.saved_groups = saved.raw_rewards, len(saved.prompts)
        return
    with record.clock.timed("produce_batch"):
        produced = await parts.producers.produce(settings.train.batch_size, step)
    record.produced = produced
    record.raw_rewards = (produced.raw_rewards_sum, produced.raw_rewards_count)
    record.plane["produce"] = produced.plane_time_s


async def take(parts: Parts, record: StepRecord, lane: Lane, batch_size: int) -> None:
    """Claim the groups of this step, and plan them.

    Raises:
        UnusableBatch: none of them can be trained, or not like this; they were given back.
    """
    before = lane.buffer.plane_time_s
    with record.clock.timed("sample"):
        sample = await lane.buffer.sample(record.step, batch_size)
    record.sample = sample
    record.plane["sample"] = lane.buffer.plane_time_s - before
    try:
        uids = [group.uid for group in sample.groups]
        span = parts.client.span("plan", lane.controller.partition_id, uids=uids)
        with record.clock.timed("plan"), span:
            record.batch = lane.controller.batch(
                sample.groups, record.step, raw_rewards=record.raw_rewards
            )
    except BaseException as error:
        await lane.buffer.give_back(sample)
        if isinstance(error, ValueError):
            raise UnusableBatch(f"step {record.step}: {error}") from error
        raise


async def train(parts: Parts, record: StepRecord, lane: Lane) -> None:
    """Have the ranks train the batch. Its rows are dumped meanwhile.

    Raises:
        UnusableBatch: rows of it were lost since they were sampled. It was given back, and ranks
            may have trained a part of it: the run goes on from its newest checkpoint.
    """
    assert record.batch is not None
    assert record.sample is not None
    batch = record.batch
    if parts.dump is not None and parts.settings.dump.train:
        skipped = {skip.uid for skip in batch.skipped}
        trained = [group for group in record.sample.groups if group.uid not in skipped]
        parts.dump.train(record.step, batch.partition_id, trained)
    with record.clock.timed("onload"):
        await parts.ranks.onload()
    with record.clock.timed("training"):
        try:
            record.reports = await parts.ranks.fit(batch.works)
        except RankError as error:
            if error.kind != ValueLost.__name__:
                raise
            await lane.buffer.give_back(record.sample)
            raise UnusableBatch(
                f"step {record.step}: rows of the batch were lost while it was trained, which may "
                "have been in part: resume the run from its newest checkpoint, and groups that "
                f"lost rows are replaced ({error})"
            ) from error
    record.plane["train"] = max(report.plane_time_s for report in record.reports)


async def clear(parts: Parts, record: StepRecord, lane: Lane) -> None:
    """Commit the batch and clear it whole, once its dump has read it."""
    assert record.sample is not None
    if parts.dump is not None:
        with record.clock.timed("dump"):
            await parts.dump.read_done()
    before = lane.buffer.plane_time_s
    with record.clock.timed("clear"):
        await lane.buffer.finish(record.sample)
    record.plane["clear"] = lane.buffer.plane_time_s - before


async def save(parts: Parts, record: StepRecord, *, last: bool) -> None:
    """Save a checkpoint and export weights, where this step is one for it."""
    settings, step = parts.settings.checkpoint, record.step
    if due(step, settings.checkpoint_interval):
        with record.clock.timed("save_ckpt"):
            await save_checkpoint(parts)
    if due(step, settings.hf_interval, last=last):
        with record.clock.timed("save_hf"):
            await export(parts)


async def save_checkpoint(parts: Parts) -> None:
    """Save where the run stands; it is there whole, or not at all."""
    standing, settings = parts.standing, parts.settings.checkpoint
    with parts.folder.checkpoints.saving(standing.step) as saving:
        await parts.ranks.save(saving.weights, optimizer=not settings.checkpoint_no_save_optimizer)
        if not settings.checkpoint_no_save_replay_buffer:
            await parts.client.save_checkpoint(saving.plane)
        if parts.rollouts is not None:
            saving.write_rollouts(await asyncio.to_thread(parts.rollouts.state))
        saving.write_state(
            TrainState(
                cur_step=standing.step,
                model_step=standing.model_step,
                run_id=parts.run_id,
                seed=parts.settings.seed,
                random=random_states(),
                progress=standing.as_data(),
            )
        )
        await asyncio.to_thread(saving.publish)


async def export(parts: Parts) -> None:
    """Write the weights as transformers loads them, with the tokenizer."""
    with parts.folder.checkpoints.exporting(parts.standing.step) as saving:
        await parts.ranks.export(saving.folder)
        await asyncio.to_thread(saving.publish)


async def pass_weights(parts: Parts, record: StepRecord, *, last: bool) -> bool:
    """Give rollouts the new weights, or the devices alone; whether they have new ones."""
    settings, step = parts.settings, record.step
    if parts.rollouts is None:
        return False
    interval = settings.train.sync_weights_interval
    what = hand_over(
        step,
        step if last else parts.total_steps,
        interval,
        evaluation_due=evaluation_due(parts, step),
    )
    with record.clock.timed(what):
        if what == "sync_weight":
            record.plane["publish"] = await give_weights(parts, step)
        await parts.ranks.offload()
    return what == "sync_weight"


async def give_weights(parts: Parts, version: int, *, replace: bool = False) -> float:
    """Publish the ranks' weights as this version and have rollouts use it; seconds of the first."""
    began = time.monotonic()
    await parts.ranks.publish_weights(version, replace=replace)
    took = time.monotonic() - began
    await parts.producers.update_weights(version)
    parts.standing.model_step = version
    return took


def evaluation_due(parts: Parts, step: int) -> bool:
    """Whether this step is followed by an evaluation."""
    evaluate = parts.settings.evaluate
    return evaluate.enabled and parts.rollouts is not None and due(step, evaluate.evaluate_step)


async def evaluate(parts: Parts, step: int) -> dict[str, float]:
    """Metrics of held-out prompts with the weights that rollouts have: sampled ones by their names
    alone, greedy ones under `greedy/`. Nothing of it stays in the plane."""
    settings, partition_id = parts.settings.evaluate, PARTITIONS["evaluate"]
    values: dict[str, float] = {}
    for greedy in (False, True):
        if not (settings.greedy if greedy else settings.sampled):
            continue
        await parts.producers.evaluate(step, prompts=settings.prompts, greedy=greedy)
        listing = await parts.client.kv_list(partition_id)
        metrics = {"reward/mean": mean_score(listing.tags), **evaluation_metrics(listing.tags)}
        prefix = "greedy/" if greedy and settings.sampled else ""
        values |= {prefix + name: value for name, value in metrics.items()}
        if parts.dump is not None and parts.settings.dump.evaluate and not prefix:
            parts.dump.evaluation(step, partition_id, group_rows(rows_of(listing)))
            await parts.dump.read_done()
        await parts.client.kv_clear(None, partition_id, where={}, retire=True)
        name = "greedy" if greedy else "sampled"
        parts.standing.milestones[name] = metrics["reward/mean"]
    return values


def tell(parts: Parts, record: StepRecord) -> dict[str, float]:
    """Log the step and show it; its values, by the names of training_data.md 8.8."""
    batch, sample, produced = record.batch, record.sample, record.produced
    assert batch is not None
    assert sample is not None
    times = record.times = record.clock.stop()
    work = StepWork(
        trained_samples=int(batch.metrics["training_samples"]),
        trained_tokens=int(batch.metrics["training_tokens"]),
        produced_samples=0 if produced is None else produced.produced_samples,
        produced_tokens=0 if produced is None else produced.produced_tokens,
        produce_time_s=0.0 if produced is None else produced.produce_time_s,
    )
    all_workers = parts.settings.report.all_workers
    values = step_values(
        times=times,
        data_info=batch.metrics,
        produced={} if produced is None else produced.metrics(),
        reports=record.reports,
        throughput=parts.throughput.of_step(work, times, now=time.monotonic()),
        evaluation=record.evaluation,
        others={
            **sample.metrics,
            **batch.off_policy,
            **{f"plane/{stage}_s": seconds for stage, seconds in record.plane.items()},
            "plane/time_s": record.plane_s,
            "plane/share": record.plane_s / times["step"],
        },
        all_workers=all_workers,
    )
    parts.trackers.log(values, record.step)
    for number, entry in parts.optimizer_steps.entries(record.reports, all_workers=all_workers):
        parts.trackers.log(entry, number)
    parts.standing.optimizer_steps = parts.optimizer_steps.count
    parts.progress.step(record.step, values, plane_s=record.plane_s)
    return values
