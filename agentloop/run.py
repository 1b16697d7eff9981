"""Run a rollout by a file of settings: `python -m agentloop.run --config rollout.yaml`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

import dataplane
from agentloop.assembly import load_tokenizer
from agentloop.config import RunConfig, TaskConfig, WorkerConfig
from agentloop.datasets import DatasetError, PromptRow
from agentloop.groups.invariants import wrong_rows
from agentloop.groups.plane_clock import PlaneClock
from agentloop.loops.chat import ChatTokenizer
from agentloop.production.accounting import ProduceResult
from agentloop.production.manager import RolloutManager
from agentloop.production.progress import RolloutProgress
from agentloop.production.prompts import make_sampler, managed
from agentloop.production.seats import NoWorkers, Seats
from agentloop.production.staffing import make_seats
from dataplane import AsyncClient, async_connect


def read_config(path: Path) -> RunConfig:
    """The settings of a YAML file. ValueError says what is wrong with it."""
    with path.open(encoding="utf-8") as file:
        return RunConfig.model_validate(yaml.safe_load(file))


async def rollout(config: RunConfig, *, ray_address: str | None) -> list[ProduceResult]:
    """Run all steps, and what each produced. The plane is there already."""
    with tempfile.TemporaryDirectory(prefix="rollout-model-") as folder:
        model_path = _model(config, Path(folder))
        tokenizer = await asyncio.to_thread(load_tokenizer, model_path)
        client = await async_connect(
            config.plane.name, address=config.plane.address, config=config.plane.settings
        )
        worker = WorkerConfig(
            plane=config.plane,
            ray_address=ray_address,
            model_path=model_path,
            engine=config.engine,
            tasks=config.tasks,
            eval_tasks=config.eval_tasks,
        )
        clock = PlaneClock()
        seats = make_seats(config.workers, worker, clock)
        try:
            await seats.open()
            return await _steps(config, client, seats, tokenizer, clock)
        finally:
            await seats.close()
            await client.close()


async def _steps(
    config: RunConfig,
    client: AsyncClient,
    seats: Seats,
    tokenizer: ChatTokenizer,
    clock: PlaneClock,
) -> list[ProduceResult]:
    run_id = uuid.uuid4().hex

    def rows_of(task: TaskConfig) -> Callable[[], PromptRow]:
        return make_sampler(task, tokenizer, config.seed, run_id).next

    results: list[ProduceResult] = []
    with RolloutProgress() as progress:

        def manager_of(tasks: Sequence[TaskConfig], partition_id: str) -> RolloutManager:
            return RolloutManager(
                client,
                seats,
                [managed(task, partition_id, rows_of(task)) for task in tasks],
                partition_id=partition_id,
                persist_prompts=config.persist_prompts,
                reissues=config.reissues,
                on_outcome=progress.outcome,
                clock=clock,
            )

        train = manager_of(config.tasks, config.partition_id)
        for step in range(1, config.steps + 1):
            progress.begin(f"step {step}", config.batch_size)
            results.append(await train.produce(config.batch_size, step))
            await _report(client, config.partition_id, f"step {step}", results[-1])
            if not config.keep:
                await client.kv_clear(None, config.partition_id, where={}, retire=True)
        if config.eval_tasks:
            evaluation = manager_of(config.eval_tasks, config.eval_partition_id)
            progress.begin("evaluation", config.eval_prompts)
            result = await evaluation.produce(config.eval_prompts, config.steps)
            await _report(client, config.eval_partition_id, "evaluation", result)
            results.append(result)
    return results


async def _report(
    client: AsyncClient, partition_id: str, title: str, result: ProduceResult
) -> None:
    """Say what was produced; every row is looked at first. RuntimeError if one is not in order."""
    listing = await client.kv_list(partition_id)
    wrong = await wrong_rows(client, listing)
    if wrong:
        raise RuntimeError(f"{len(wrong)} rows are not in order, the first: {wrong[0]}")
    rows = sum(1 for tags in listing.tags if not tags.get("is_prompt"))
    print(f"{title}: {result.summary()}; {rows} rows in order", flush=True)


def _model(config: RunConfig, folder: Path) -> Path:
    if config.model.path is not None:
        return config.model.path
    from agentloop.tiny import make_tiny_model

    assert config.model.tiny is not None
    return make_tiny_model(folder / "model", family=config.model.tiny, seed=config.seed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m agentloop.run", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file of settings")
    parser.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS",
        help="host plane and workers on Ray: on the cluster of this address, or a new one",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.exit(f"agentloop.run: {options.config}: {error}")
    address: str | None = None
    if options.ray is not None:
        import ray

        context = cast("Any", ray).init(options.ray, log_to_driver=False)
        address = context.address_info["address"]
        workers = config.workers.model_copy(update={"kind": "ray"})
        config = config.model_copy(update={"workers": workers})
    plane: dataplane.Client | None = None
    if config.plane.address is None:
        plane = dataplane.init(config.plane.settings, name=config.plane.name)
    try:
        asyncio.run(rollout(config, ray_address=address))
    except (NoWorkers, DatasetError) as error:
        sys.exit(f"agentloop.run: {error}")
    finally:
        if plane is not None:
            plane.close(destroy=not config.keep)


if __name__ == "__main__":
    main()
