"""How fast a run is: samples and tokens per second and worker. Time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one training step produced and trained."""

    trained_samples: int
    trained_tokens: int
    """Prompt tokens included, padding not."""
    produced_samples: int = 0
    produced_tokens: int = 0
    produce_time_s: float = 0.0
    """0: the timer of the step's production counts."""


class Throughput:
    """What has been trained since the loop started; counts anew in every process."""

    def __init__(self, *, train_workers: int, rollout_workers: int) -> None:
        self._train_workers = max(1, train_workers)
        self._rollout_workers = max(1, rollout_workers)
        self._started: float | None = None
        self._samples = 0
        self._tokens = 0

    def start(self, now: float) -> None:
        """The loop starts, at this reading of any clock that `of_step` is told as well."""
        self._started = now

    def of_step(
        self, work: StepWork, times: Mapping[str, float], *, now: float
    ) -> dict[str, float]:
        """`throughput/…` of a step, which is counted; nothing if a time is missing or not over 0.

        Args:
            times: Seconds of the timers `step`, `training` and `produce_batch`.
        """
        self._samples += work.trained_samples
        self._tokens += work.trained_tokens
        elapsed = 0.0 if self._started is None else now - self._started
        step, training = times.get("step", 0.0), times.get("training", 0.0)
        if elapsed <= 0 or step <= 0 or training <= 0:
            return {}
        produce = (
            work.produce_time_s if work.produce_time_s > 0 else times.get("produce_batch", 0.0)
        )
        per_producer = 1 / produce / self._rollout_workers if produce > 0 else 0.0
        ranks = self._train_workers
        return {
            "throughput/e2e_effective_sgs": self._samples / elapsed / ranks,
            "throughput/e2e_effective_tgs": self._tokens / elapsed / ranks,
            "throughput/effective_sgs": work.trained_samples / step / ranks,
            "throughput/effective_tgs": work.trained_tokens / step / ranks,
            "throughput/training_tgs": work.trained_tokens / training / ranks,
            "throughput/rollout_sgs": work.produced_samples * per_producer,
            "throughput/rollout_tgs": work.produced_tokens * per_producer,
        }
