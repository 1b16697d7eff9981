"""Rows of a partition as an iterable dataset: batches fetched as they become ready, cut into
micro-batches, and kept for another pass.

Owns one rank's place in the stream. Its client is made where it iterates, from the config alone:
forked and spawned workers need no Ray.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from dataplane.config import Config
from dataplane.errors import DeadlineExceeded, InvalidRequest

from .micro_batches import chunk_batch_fn

if TYPE_CHECKING:
    from ..client import TransferQueueClient
    from ..metadata import BatchMeta

Batch = tuple[TensorDict, "BatchMeta"]

REPLAY_BYTES = int(os.environ.get("TQ_STREAMING_DATASET_REPLAY_BYTES", str(4 << 30)))
"""Tensors of batches that a dataset keeps for `reset`; beyond that the oldest batches go."""
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = float(os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1"))
"""Between two tries of an instance in polling mode: from the first on twice as long each time."""
ENDING_LOOK_S = 1.0
"""How long a dataset that ends waits for rows before it looks whether all were consumed."""

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]


class StreamingDataset(IterableDataset[Batch]):
    """Micro-batches of one rank: `(TensorDict, BatchMeta)` as they become ready.

    Batch `i` is asked for with `sampling_config` {dp_rank, task_name, batch_index: i}: ranks that
    share a `dp_rank` get the same rows from a sampler that knows ranks. The iterator does not end
    by itself, unless `should_check_consumption_status` is set: then it does when the task has
    consumed all rows of the partition.

    A batch that does not come within `Config.wait_timeout_s` (DATAPLANE_WAIT_TIMEOUT_S, 600 s)
    raises DeadlineExceeded, which says what is missing; iterating again waits again.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., tuple[TensorDict | None, BatchMeta]] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        """`config` is the one that the instance stored, as `init(conf)` returns it.

        `fetch_batch_fn` has the arguments of `default_fetch_batch_fn`; `process_batch_fn` those of
        `chunk_batch_fn`, and returns what is yielded. ValueError if a size or rank cannot be.
        """
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is at least 1, not {micro_batch_size}")
        if len(data_fields) < 1:
            raise ValueError("data_fields name at least one field")
        if dp_rank < 0:
            raise ValueError(f"dp_rank counts from 0, it is not {dp_rank}")
        super().__init__()
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config: dict[str, Any] = {"dp_rank": dp_rank, "task_name": task_name}
        self.replay_bytes = REPLAY_BYTES
        self.buffer: list[Batch] = []
        """What `reset` can replay."""
        self.batch_index = 0
        """The batch that comes next, of those that were fetched here."""
        self._dropped = 0
        """Batches that had to go from the front of the buffer."""
        self._kept_bytes = 0
        self._tq_client: TransferQueueClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A client does not travel: a worker that is spawned makes its own.
        return {**self.__dict__, "_tq_client": None}

    def __iter__(self) -> Iterator[Any]:
        if self._tq_client is None:
            self._create_client()
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            at = self.batch_index - self._dropped
            if at < len(self.buffer):
                self.batch_index += 1
                data, meta = self.buffer[at]
                yield from self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
            elif (batch := self._next(first + stride * self.batch_index)) is None:
                return
            else:
                self._keep(batch)

    def reset(self) -> None:
        """Begin again with the first batch; what is kept comes without being fetched again.

        InvalidRequest if the first batches are not kept any more.
        """
        if self._dropped:
            raise InvalidRequest(
                f"the first {self._dropped} batches of partition {self.partition_id!r} are not "
                f"kept any more, because all of them have over {self.replay_bytes} bytes: set "
                "TQ_STREAMING_DATASET_REPLAY_BYTES to what one pass needs, or go on with step()"
            )
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Go on with another partition, and let go of the batches of this one."""
        self.buffer = []
        self._kept_bytes = self._dropped = self.batch_index = 0
        self.partition_id = partition_id

    # -- batches -----------------------------------------------------------------------------

    def _create_client(self) -> None:
        """Make the client from the config: no Ray, so that it works in a forked worker."""
        from ..client import TransferQueueClient
        from ..link import Link

        info: Any = self.config["controller"]["zmq_info"]
        if not info:
            raise InvalidRequest(
                "the config has no controller.zmq_info: pass the one that transfer_queue.init() "
                "returned to its first caller, or what the controller's get_config() answers"
            )
        settings = self._settings()
        if self.should_check_consumption_status:
            look_s = min(ENDING_LOOK_S, settings.wait_timeout_s)
            settings = settings.model_copy(update={"wait_timeout_s": look_s})
        link = Link.at(info, settings)
        weakref.finalize(self, link.close)  # nobody else closes it
        client = TransferQueueClient(f"StreamingDataset_{uuid.uuid4().hex[:8]}", info, link=link)
        backend = self.config["backend"]["storage_backend"]
        client.initialize_storage_manager(backend, self.config["backend"].get(backend))
        self._tq_client = client

    def _settings(self) -> Config:
        """What the instance's plane was started with."""
        from ..link import settings_in

        return settings_in(self.config["controller"]["zmq_info"])

    def _next(self, number: int) -> Batch | None:
        """Batch `number` of the stream as soon as it is ready; None at the end of the partition."""
        client = cast("TransferQueueClient", self._tq_client)
        started = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while not (
            self.should_check_consumption_status
            and client.check_consumption_status(self.task_name, self.partition_id)
        ):
            late: DeadlineExceeded | None = None
            try:
                data, meta = self.fetch_batch_fn(
                    tq_client=client,
                    data_fields=self.data_fields,
                    batch_size=self.batch_size,
                    partition_id=self.partition_id,
                    task_name=self.task_name,
                    sampling_config=self.sampling_config,
                    batch_index=number,
                )
                if data is not None:
                    return data, meta
            except DeadlineExceeded as error:
                if not self.should_check_consumption_status:
                    raise
                late = error
            waited_s = time.monotonic() - started
            if waited_s > self._settings().wait_timeout_s:
                raise self._late(number, waited_s) from late
            if late is None:  # polling mode answers at once
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def _late(self, number: int, waited_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"batch {number} of partition {self.partition_id!r} did not come in {waited_s:.0f} s: "
            f"task {self.task_name!r}, rank {self.dp_rank}, wants {self.batch_size} rows with "
            f"{self.data_fields}. Iterate again to wait on; DATAPLANE_WAIT_TIMEOUT_S is how long",
            waited_s=waited_s,
        )

    def _keep(self, batch: Batch) -> None:
        """Keep a batch, the newest one always, and as many before it as there is room for."""
        self.buffer.append(batch)
        self._kept_bytes += _nbytes(batch[0])
        while self._kept_bytes > self.replay_bytes and len(self.buffer) > 1:
            self._kept_bytes -= _nbytes(self.buffer.pop(0)[0])
            self._dropped += 1


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """The rows of a batch and their meta; None and an empty meta while they are not ready.

    An instance that is not in polling mode answers when they are, or with DeadlineExceeded.
    """
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config={
            **sampling_config, "batch_index": batch_index, "partition_id": partition_id,
        },
    )  # fmt: skip
    return (tq_client.get_data(meta) if meta.size else None), meta


def _nbytes(data: TensorDict) -> int:
    """Bytes of the tensors of a batch, about: other values are not counted."""
    leaves: list[Any] = [v for v in cast("Any", data).values() if isinstance(v, torch.Tensor)]
    return sum((leaf.values() if leaf.is_nested else leaf).nbytes for leaf in leaves)
