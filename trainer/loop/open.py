"""From settings to the parts of a run, all of them ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import dataplane
from dataplane import AsyncClient, Client, PlaneLost, async_connect
from trainer import debug_rollout
from trainer.advantage import AdvantageConfig
from trainer.checkpoint import Checkpoint
from trainer.config import RunSettings
from trainer.controller import Controller
from trainer.dump import TrajectoryDump
from trainer.errors import RolloutsNotOpened
from trainer.loop.parts import PARTITIONS, Lane, Parts, Standing
from trainer.ranks.group import RankGroup
from trainer.ranks.types import PlaneAddress
from trainer.replay_buffer import ReplayBuffer
from trainer.report import OptimizerSteps, Progress, Throughput, open_trackers
from trainer.rollouts import OpenRollouts, Rollouts
from trainer.run_folder import RunFolder
from trainer.select import ReplayPolicy


@asynccontextmanager
async def opened(
    settings: RunSettings,
    folder: RunFolder,
    *,
    open_rollouts: OpenRollouts | None,
    model_path: str,
    resume: Checkpoint | None,
) -> AsyncGenerator[Parts]:
    """The parts of a run, for as long as the context is open. The plane is the run's own, and ends
    with it, unless the settings name one by its address."""
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        trackers = open_trackers(
            [(tracker.kind, tracker.options) for tracker in settings.report.trackers],
            folder.path,
            name=settings.name,
        )
        stack.callback(trackers.close)
        ray_address = await asyncio.to_thread(_join_ray, settings, stack.callback)
        plane, address = await asyncio.to_thread(open_plane, settings)
        stack.callback(plane.close, destroy=settings.plane.address is None)
        if resume is not None and resume.plane is not None:
            await asyncio.to_thread(plane.load_checkpoint, resume.plane)
        named = {"label": "trainer", **address.settings}
        client = await stack.enter_async_context(
            await async_connect(address.name, address=address.address, config=named)
        )
        ranks = await _start_ranks(settings, model_path, address)
        stack.push_async_callback(ranks.close)
        rollouts: Rollouts | None = None
        if open_rollouts is not None:
            try:
                rollouts = await open_rollouts(
                    settings.rollout_settings(),
                    plane={
                        "name": address.name, "address": address.address,
                        "settings": dict(address.settings),
                    },
                    partitions=PARTITIONS,
                    model_path=model_path,
                    seed=settings.seed,
                    run_id=folder.run_id,
                    ray_address=ray_address if hosted_by_ray(settings) else None,
                )  # fmt: skip
            except Exception as error:
                # Theirs, and of any kind: what producers are is not known here.
                raise RolloutsNotOpened(f"the rollouts cannot be opened: {error}") from error
            stack.push_async_callback(rollouts.close)
        standing = Standing() if resume is None else Standing(**resume.state.progress)
        dump = TrajectoryDump.open(
            folder.trajectories, address, tokenizer_path=settings.model.tokenizer or model_path
        )
        stack.push_async_callback(dump.close)
        yield Parts(
            settings=settings,
            folder=folder,
            client=client,
            ranks=ranks,
            rollouts=rollouts,
            train=_train_lane(settings, client, rollouts, standing),
            demonstrations=_demonstration_lane(settings, client),
            dump=dump,
            trackers=trackers,
            progress=progress,
            throughput=Throughput(
                train_workers=settings.ranks.count,
                rollout_workers=1 if rollouts is None else rollouts.workers,
            ),
            optimizer_steps=OptimizerSteps(standing.optimizer_steps),
            standing=standing,
            run_id=folder.run_id,
            total_steps=_total_steps(settings, rollouts),
        )


# -- the plane -------------------------------------------------------------------------------


def hosted_by_ray(settings: RunSettings) -> bool:
    """Whether Ray actors hold the plane: where ranks are actors too, unless it is said."""
    host = settings.plane.settings.get("host", "auto")
    return host == "ray" or (host == "auto" and settings.ranks.kind == "ray")


def open_plane(settings: RunSettings) -> tuple[Client, PlaneAddress]:
    """The plane of the run, new and empty, and how others join it; or the one that is named by its
    address.

    One that is held by this process has the process's number in its name, for it ends with it. One
    that Ray holds outlives a driver that was killed: what is left of it is ended first, and its
    rows come back from a checkpoint.
    """
    named = settings.plane
    if named.address is not None:
        client = dataplane.connect(named.name, address=named.address, config=named.settings)
        return client, named
    if hosted_by_ray(settings):
        try:
            dataplane.connect(named.name, config=named.settings).close(destroy=True)
        except PlaneLost:
            pass  # there is none
    else:
        named = replace(
            named,
            name=f"{named.name}-{os.getpid()}",
            settings={**named.settings, "host": "embedded"},
        )
    return dataplane.init(named.settings, name=named.name), named


def _join_ray(settings: RunSettings, at_the_end: Callable[..., object]) -> str | None:
    """The cluster of the run, joined or started; None where nothing of it needs one."""
    if settings.ranks.kind != "ray" and not hosted_by_ray(settings):
        return None
    import ray as library

    ray = cast("Any", library)
    if not ray.is_initialized():
        context = ray.init(
            settings.ray_address or "local",
            **({} if settings.ray_address else {"include_dashboard": False}),
            log_to_driver=False,
            logging_level="warning",
        )
        at_the_end(ray.shutdown)
        return str(context.address_info["address"])
    return str(ray.get_runtime_context().gcs_address)


# -- ranks, lanes, trackers ------------------------------------------------------------------


async def _start_ranks(settings: RunSettings, model_path: str, plane: PlaneAddress) -> RankGroup:
    ranks = settings.ranks
    return await RankGroup.start(
        settings.rank_settings(model_path=model_path, plane=plane),
        kind=ranks.kind,
        topology=settings.topology(),
        num_cpus=ranks.num_cpus,
        num_gpus=ranks.gpus,
    )


def _train_lane(
    settings: RunSettings, client: AsyncClient, rollouts: Rollouts | None, standing: Standing
) -> Lane:
    async def refill(prompts: int) -> None:
        # Groups that are there count: this replaces those that were evicted.
        del prompts
        assert rollouts is not None
        await rollouts.produce(settings.train.batch_size, standing.step + 1)

    partition_id = PARTITIONS["train"]
    return Lane(
        buffer=ReplayBuffer(
            client,
            settings.replay,
            partition_id=partition_id,
            refill=None if rollouts is None else refill,
            lease_s=settings.train.lease_s,
            timeout_s=settings.train.sample_timeout_s,
            deterministic=settings.deterministic,
        ),
        controller=Controller(
            partition_id=partition_id,
            advantage=settings.advantage,
            plan=settings.plan,
            topology=settings.topology(),
            required=settings.required_fields(),
            deterministic=settings.deterministic,
            shuffle_seed=settings.seed if settings.train.shuffle_advantages else None,
        ),
    )


def _demonstration_lane(settings: RunSettings, client: AsyncClient) -> Lane:
    """Rows are trained as they are: every advantage is 1, and one step takes the whole batch."""
    partition_id = PARTITIONS["demonstrate"]
    return Lane(
        buffer=ReplayBuffer(
            client,
            ReplayPolicy(),
            partition_id=partition_id,
            lease_s=settings.train.lease_s,
            timeout_s=settings.train.sample_timeout_s,
            deterministic=settings.deterministic,
        ),
        controller=Controller(
            partition_id=partition_id,
            advantage=AdvantageConfig(estimator=None),
            plan=replace(settings.plan, optimizer_steps=1, mini_batch_rows=None),
            topology=settings.topology(),
            deterministic=settings.deterministic,
            supervised=True,
        ),
    )


def _total_steps(settings: RunSettings, rollouts: Rollouts | None) -> int:
    """How many steps the run has; of saved batches, as many as there are unless it is said."""
    train, saved = settings.train, settings.debug
    if saved.debug_train and train.total_train_steps is None and train.total_epochs is None:
        assert saved.debug_rollout_dir is not None
        return max(debug_rollout.saved_steps(saved.debug_rollout_dir))
    return settings.total_steps(None if rollouts is None else rollouts.dataset_size)
