"""Under which names a training step is logged: XTuner's. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from trainer.ranks.types import RankReport

NOT_LOGGED: Final = ("training_samples", "training_tokens", "benchmark_end_time_s")
"""Entries of a batch's `data_info` that throughput is made of."""

OWN_PREFIXES: Final = ("training/",)
"""Entries of `data_info` that have a prefix of their own: verl's names of selection."""

RANK_0_PREFIXES: Final = ("mismatch/", "rollout_is/", "entropy/")

WORKER_TIMES: Final = {
    "packing_conversion_time_s": "response/packing/conversion_time_s_max",
    "packing_pack_time_s": "response/packing/pack_time_s_max",
}
"""Times that every rank reports, and under which name the longest is logged."""


def step_values(
    *,
    times: Mapping[str, float],
    data_info: Mapping[str, float] | None = None,
    produced: Mapping[str, float] | None = None,
    reports: Iterable[RankReport] = (),
    throughput: Mapping[str, float] | None = None,
    evaluation: Mapping[str, float] | None = None,
    sft: Mapping[int, Mapping[str, float]] | None = None,
    others: Mapping[str, float] | None = None,
    all_workers: bool = False,
) -> dict[str, float]:
    """All values of one training step, by name.

    Args:
        times: Seconds of timers, by their names alone: `time/…`.
        data_info: Statistics of the batch and its plan: `response/…`.
        produced: What the producers say, under full names (`timing/…`, `async/…`, `rollout/…`).
        reports: One of each rank, in any order. Rank 0 speaks for `mismatch/…`, `rollout_is/…`
            and `entropy/…`, each worker for its `train_metrics/worker_{i}/step_avg_…`.
        throughput: Under full names, as `Throughput.of_step` gives them.
        evaluation: `eval/…`.
        sft: `sft_train_metrics/worker_{i}/…`, by worker.
        others: Under full names; logged as they are.
        all_workers: Show every worker, not worker 0 alone.
    """
    ranks = sorted(reports, key=lambda report: report.rank)
    values: dict[str, float] = {f"time/{name}": seconds for name, seconds in times.items()}
    values.update(produced or {})
    for name, value in (data_info or {}).items():
        if name not in NOT_LOGGED:
            values[name if name.startswith(OWN_PREFIXES) else f"response/{name}"] = value
    values.update(throughput or {})
    for name, longest in WORKER_TIMES.items():
        seconds = [report.metrics[name] for report in ranks if name in report.metrics]
        if seconds:
            values[longest] = max(seconds)
    for report in ranks:
        if report.rank == 0:
            first = report.metrics.items()
            values |= {name: v for name, v in first if name.startswith(RANK_0_PREFIXES)}
            values.setdefault("entropy/rollout", 0.0)
        if report.rank == 0 or all_workers:
            for name, mean in _means(report.steps).items():
                values[f"train_metrics/worker_{report.rank}/step_avg_{name}"] = mean
    for worker, metrics in sorted((sft or {}).items()):
        if worker == 0 or all_workers:
            values |= {f"sft_train_metrics/worker_{worker}/{k}": v for k, v in metrics.items()}
    values |= {f"eval/{name}": value for name, value in (evaluation or {}).items()}
    values.update(others or {})
    return values


class OptimizerSteps:
    """Numbers the optimizer steps of a run, all training steps together."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        """Steps so far: what a checkpoint keeps."""

    def entries(
        self, reports: Iterable[RankReport], *, all_workers: bool = False
    ) -> list[tuple[int, dict[str, float]]]:
        """What is logged of each optimizer step of a training step: its number, and its values as
        `train_metrics/worker_{i}/…`.

        The count goes on by the steps of rank 0. Example: at a count of 10 and with 3 steps the
        numbers are 11, 12 and 13.
        """
        ranks = sorted(reports, key=lambda report: report.rank)
        made: dict[int, dict[str, float]] = {}
        for report in ranks:
            if report.rank == 0 or all_workers:
                for number, metrics in enumerate(report.steps, self.count + 1):
                    prefix = f"train_metrics/worker_{report.rank}/"
                    entry = made.setdefault(number, {})
                    entry.update({f"{prefix}{name}": value for name, value in metrics.items()})
        self.count += next((len(report.steps) for report in ranks if report.rank == 0), 0)
        return sorted(made.items())


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each value over the steps that have it."""
    columns: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in columns.items()}
