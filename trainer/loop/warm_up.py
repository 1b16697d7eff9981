"""Supervised stages before the first step: rows of demonstrators, through the path of all rows.

A demonstrator writes groups into a partition of its own; they are sampled, planned, trained with
advantages of 1, and cleared.
"""

from __future__ import annotations

from trainer.config.sections import WarmupStage
from trainer.loop import stages
from trainer.loop.parts import Parts
from trainer.loop.stages import StepRecord

VERSION = 0
"""Policy version of the weights that a warm-up ends with: those that the first step begins with."""


async def warm_up(parts: Parts) -> None:
    """All stages, one after the other; rollouts have the weights afterwards."""
    settings, standing = parts.settings, parts.standing
    if settings.evaluate.enabled and settings.evaluate.sampled:
        await look(parts, "before the warm-up")
        standing.milestones["sampled_before_warmup"] = standing.milestones["sampled"]
    done = 0
    for number, stage in enumerate(settings.warmup):
        await parts.ranks.begin_phase(settings.warmup_phase(number))
        done += await _stage(parts, stage, done)
    if "sampled" in standing.milestones:
        await look(parts, "after the warm-up")
        standing.milestones["sampled_after_warmup"] = standing.milestones["sampled"]
    standing.warmed_up = True


async def _stage(parts: Parts, stage: WarmupStage, done: int) -> int:
    """One stage; the steps that it took."""
    parts.progress.begin(f"warm-up: {stage.demonstrator}", stage.max_steps)
    for step in range(1, stage.max_steps + 1):
        record = StepRecord(done + step)
        produced = await parts.producers.demonstrate(
            stage.demonstrator, stage.batch_size, done + step
        )
        record.produced = produced
        record.raw_rewards = (produced.raw_rewards_sum, produced.raw_rewards_count)
        lane = parts.demonstrations
        await stages.take(parts, record, lane, stage.batch_size)
        assert record.batch is not None
        record.reports = await parts.ranks.fit(record.batch.works)
        await stages.clear(parts, record, lane)
        checked = stage.until is not None and step % stage.check_every == 0
        if not checked and step < stage.max_steps:
            continue
        await stages.give_weights(parts, VERSION, replace=True)
        if stage.until is not None:
            reward = await look(parts, f"{stage.demonstrator}, step {step}")
            if stage.until.is_reached(reward):
                return step
    return stage.max_steps


async def look(parts: Parts, when: str) -> float:
    """The sampled held-out reward now, which is said."""
    await stages.evaluate(parts, 0)
    reward = parts.standing.milestones["sampled"]
    parts.progress.say(f"held-out reward {when}: {reward:.3f} sampled")
    return reward
