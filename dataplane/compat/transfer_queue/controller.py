"""The named actor of an instance: `TransferQueueController`.

Owns its name, its life, which Ray begins again, and the few methods that look inside. What answers
the low-level client is a server in a thread of this process (serving.py), since clients ask from
places where Ray does not work, forked workers among them.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, cast

import ray as untyped_ray

from dataplane.config import Config

from .control.serving import ControllerServer
from .metrics import MetricsExporter
from .sampler import BaseSampler, SequentialSampler

if TYPE_CHECKING:
    from .control.snapshot import PartitionSnapshot

ray = cast("Any", untyped_ray)
"""Ray's own annotations leave most of what is used here unknown."""

LAST_WORDS_S = 5.0
"""How long a controller that cannot serve is there to say why."""


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=16)
class TransferQueueController:
    """Gives rows their indexes and remembers who consumed them. One per instance, by name."""

    def __init__(
        self,
        plane: str,
        config: dict[str, Any],
        sampler: BaseSampler | type[BaseSampler] = SequentialSampler,
        polling_mode: bool = False,
    ) -> None:
        settings = Config(**config)
        self._served = ControllerServer(
            plane,
            settings,
            as_sampler(sampler),
            polling_mode=polling_mode,
            ahead=int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "1")),
            tcp_host=settings.tcp_host or ray.util.get_node_ip_address(),
            on_end=_leave,
        )
        self._metrics: MetricsExporter | None = None

    # -- what init asks ----------------------------------------------------------------------

    def describe(self, timeout_s: float | None = None) -> dict[str, Any]:
        """How a process of this machine joins the plane, once this controller serves."""
        served = self._served
        served.up(timeout_s)
        return {
            "plane": served.plane,
            "address": served.link.joined.tags.unix,
            "config": served.config.model_dump(mode="json", exclude_defaults=True),
        }

    def store_config(self, config: Any) -> None:
        """Keep the instance's settings, here and in the plane."""
        self._served.call(lambda: self._served.store(config))

    def get_config(self) -> Any:
        """The instance's settings, a DictConfig; None before they were stored."""
        self._served.up()
        return self._served.settings

    def start_metrics(self, port: int = 0) -> str:
        """Serve Prometheus metrics; `host:port`. Repeatable."""
        served = self._served
        served.up()
        if self._metrics is None:
            self._metrics = served.service.metrics = MetricsExporter(
                lambda: served.call(served.service.progress),
                lambda timeout_s: served.link.sync.status(timeout=timeout_s),
            )
        return self._metrics.start(ray.util.get_node_ip_address(), port)

    # -- what looks inside -------------------------------------------------------------------

    def list_partitions(self) -> list[str]:
        """The partitions that there are."""
        return self._served.call(lambda: self._served.service.mirrors.names())

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Take a partition away with all its rows. None of this name is no error."""
        self._served.call(lambda: self._served.service.clear_partition(partition_id))

    def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """A copy of what is known of a partition; None if there is none."""
        return self._served.call(lambda: self._served.service.snapshot(partition_id))

    def get_partition_index_range(self, partition_id: str) -> list[int]:
        """The indexes of a partition, ascending."""
        snapshot = self.get_partition_snapshot(partition_id)
        if snapshot is None:
            return []
        return sorted(snapshot.global_indexes | snapshot.pre_allocated_global_indexes)

    def register_sampler(self, sampler: BaseSampler | type[BaseSampler]) -> None:
        """Choose rows by this sampler from now on; a controller that is started again does not."""
        self._served.up()
        self._served.service.sampler = as_sampler(sampler)


def _leave() -> None:
    """End this actor for good, so that its name is free."""
    time.sleep(LAST_WORDS_S)  # for who asks why
    with contextlib.suppress(Exception):
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
    os._exit(1)


def as_sampler(sampler: Any) -> BaseSampler:
    """A sampler, made if its class is given. TypeError for anything else."""
    made: Any = sampler() if isinstance(sampler, type) else sampler
    if isinstance(made, BaseSampler):
        return made
    raise TypeError(
        f"sampler {getattr(sampler, '__name__', repr(sampler)):.80} must be an instance or "
        "subclass of BaseSampler"
    )
