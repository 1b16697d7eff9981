"""What a trainer asks of the rollout side, whoever implements it. Owns the seam to producers.

A trainer never imports a producer: `trainer.run` loads one by the dotted name in its settings. What
is produced lies in the plane; what comes back through here are counts and times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Produced(Protocol):
    """What one call produced, in numbers."""

    @property
    def produced_samples(self) -> int: ...
    @property
    def produced_tokens(self) -> int: ...
    @property
    def produce_time_s(self) -> float: ...
    @property
    def raw_rewards_sum(self) -> float: ...
    @property
    def raw_rewards_count(self) -> int: ...
    @property
    def plane_time_s(self) -> float:
        """Seconds in which at least one call of the plane was under way in a process that
        produced; of the busiest of them."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What is logged of it, by name: `timing/…`, `async/…`, `rollout/…`."""
        ...


class Rollouts(Protocol):
    """The producers of a run. One call at a time."""

    @property
    def dataset_size(self) -> int:
        """Prompts of one epoch, over all tasks that are trained."""
        ...

    @property
    def workers(self) -> int:
        """How many workers generate."""
        ...

    async def produce(self, batch_size: int, train_step: int) -> Produced:
        """Have `batch_size` finished groups in the partition of training, those that are there
        included. Nothing is under way when it returns."""
        ...

    async def demonstrate(self, name: str, batch_size: int, train_step: int) -> Produced:
        """The same in the partition of demonstrations, by the demonstrator of this name."""
        ...

    async def evaluate(self, train_step: int, *, prompts: int | None, greedy: bool) -> Produced:
        """The same in the partition of evaluation: so many prompts, all if not given, the same
        ones each time. `greedy` takes the likeliest token, and one session a prompt."""
        ...

    async def update_weights(self, version: int) -> None:
        """Generate with the weights that lie in the plane as this version."""
        ...

    async def recover(self, train_step: int) -> int:
        """Take over prompts that an earlier run left in the plane without a last status; how
        many."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the datasets are: plain data that `restore` goes on from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Draw on from where the state was taken. ValueError if it is of other datasets."""
        ...

    async def close(self) -> None: ...


class OpenRollouts(Protocol):
    """What the dotted name in the settings names."""

    async def __call__(
        self,
        settings: Mapping[str, Any],
        *,
        plane: Mapping[str, Any],
        partitions: Mapping[str, str],
        model_path: str,
        seed: int,
        run_id: str,
        ray_address: str | None,
    ) -> Rollouts:
        """Start producers with the weights of `model_path`.

        Args:
            settings: The section `rollout` of the run's file; ValueError if it makes no sense.
            plane: `name`, `address`, `settings` of the plane, which is there.
            partitions: Names of those for `train`, `evaluate` and `demonstrate`.
            run_id: Names the run: the same one draws the same prompts under the same uids.
        """
        ...
