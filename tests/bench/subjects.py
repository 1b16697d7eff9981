"""What can be measured: one class per system, all with the same verbs.

A subject lives in one process. The verbs do what a user of that system would write and no
more; `read` turns what a get returned into columns, outside the timed part.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from tests.bench.data import Batch, Columns, Row, Tags

NAMES = ("ours", "embedded", "drop_in", "transferqueue", "redis", "ray_actor", "memcpy")
"""Every subject; the runner leaves out what is not installed."""


class Subject(ABC):
    """One system, as one process sees it."""

    name: ClassVar[str]
    needs_ray: ClassVar[bool] = False

    @abstractmethod
    def start(self, address: str) -> str:
        """Start the system, join it, and return what another process needs to join."""

    @abstractmethod
    def join(self, address: str) -> None:
        """Join what another process started."""

    @abstractmethod
    def close(self, *, destroy: bool) -> None:
        """Leave; with `destroy`, end the system too."""

    @abstractmethod
    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        """Put a batch: fields, and tags where it has some."""

    @abstractmethod
    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        """Put one trajectory."""

    @abstractmethod
    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        """Put tags only."""

    @abstractmethod
    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        """Get a batch, as ragged tensors in the order of `keys`."""

    @abstractmethod
    def read(self, got: Any, field: str) -> Columns:
        """One field of what `get` returned (not timed)."""

    @abstractmethod
    def list(self, partition: str) -> Any:
        """List every key of a partition with its tags, the way a controller uses them."""

    @abstractmethod
    def listed(self, listing: Any) -> dict[str, Tags]:
        """Key -> tags of what `list` or `list_since` returned (not timed)."""

    def list_since(self, partition: str, revision: Any) -> Any:
        """List what changed since then; a system that cannot lists everything."""
        return self.list(partition)

    def revision(self, partition: str) -> Any:
        """The point in time that `list_since` starts from; None where there is none."""
        return None

    @abstractmethod
    def clear(self, keys: list[str], partition: str) -> None:
        """Remove these keys."""


COLUMNS = (
    "uid",
    "session_id",
    "index",
    "status",
    "prompt_len",
    "seq_len",
    "global_steps",
    "score",
)
"""Every tag that the workloads put; a controller takes them as arrays from each listing."""


class Dataplane(Subject):
    """This project through its public client, hosted by Ray."""

    name = "ours"
    needs_ray = True
    plane: ClassVar[str] = "bench"

    def start(self, address: str) -> str:
        import dataplane

        join_ray(address)
        self.client: Any = dataplane.init(dataplane.Config(host="ray"), name=self.plane)
        return address

    def join(self, address: str) -> None:
        import dataplane

        join_ray(address)
        self.client = dataplane.connect(self.plane)

    def close(self, *, destroy: bool) -> None:
        self.client.close(destroy=destroy)

    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        self.client.kv_batch_put(keys, partition, batch.fields, batch.tags)

    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        self.client.kv_put(key, partition, row, tags)

    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        if len(keys) == 1:
            self.client.kv_put(keys[0], partition, None, tags[0])
        else:
            self.client.kv_batch_put(keys, partition, None, tags)

    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        return self.client.kv_batch_get(keys, partition, list(fields), layout="nested")

    def read(self, got: Any, field: str) -> Columns:
        return _columns(got.fields[field])

    def view(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        """A context manager over the rows where they lie (not copied)."""
        return self.client.kv_view(keys, partition, list(fields), layout="nested")

    def list(self, partition: str) -> Any:
        listing = self.client.kv_list(partition)
        # A controller selects over arrays, so the columns belong to the price.
        return listing, {name: listing.column(name) for name in COLUMNS}

    def listed(self, listing: Any) -> dict[str, Tags]:
        found, columns = listing
        for name, column in columns.items():
            if len(column) != len(found.keys):
                raise AssertionError(f"column {name}: {len(column)} of {len(found.keys)} rows")
        return dict(zip(found.keys, (dict(t) for t in found.tags), strict=True))

    def list_since(self, partition: str, revision: Any) -> Any:
        listing = self.client.kv_list(partition, since=revision)
        return listing, {name: listing.column(name) for name in COLUMNS}

    def revision(self, partition: str) -> Any:
        return self.client.kv_list(partition, limit=1).revision

    def clear(self, keys: list[str], partition: str) -> None:
        self.client.kv_clear(keys, partition)

    def status(self) -> Mapping[str, Any]:
        """What the plane says of itself."""
        return self.client.status()

    def another(self) -> Any:
        """One more client of the same plane in this process."""
        import dataplane

        return dataplane.connect(self.plane)


class Embedded(Dataplane):
    """This project without Ray: one child process of the writer holds both stores."""

    name = "embedded"
    needs_ray = False
    plane = "bench-embedded"

    def start(self, address: str) -> str:
        import dataplane

        self.client = dataplane.init(dataplane.Config(host="embedded"), name=self.plane)
        return ""

    def join(self, address: str) -> None:
        import dataplane

        self.client = dataplane.connect(self.plane)


class TransferQueue(Subject):
    """TransferQueue 0.1.11 as `transfer_queue.init()` sets it up: SimpleStorage, two units."""

    name = "transferqueue"
    needs_ray = True

    def start(self, address: str) -> str:
        self.join(address)
        return address

    def join(self, address: str) -> None:
        import transfer_queue

        join_ray(address)
        self.tq: Any = transfer_queue
        # The first caller starts the controller and its units, the others attach.
        self.tq.init()

    def close(self, *, destroy: bool) -> None:
        # Its close() kills the controller from any process, so only the last one calls it.
        if destroy:
            self.tq.close()

    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        self.tq.kv_batch_put(
            keys=keys, partition_id=partition, fields=batch.fields, tags=batch.tags
        )

    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        self.tq.kv_put(key=key, partition_id=partition, fields=row, tag=tags)

    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        if len(keys) == 1:
            self.tq.kv_put(key=keys[0], partition_id=partition, tag=tags[0])
        else:
            self.tq.kv_batch_put(keys=keys, partition_id=partition, tags=tags)

    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        return self.tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(fields))

    def read(self, got: Any, field: str) -> Columns:
        return _columns(got[field])

    def list(self, partition: str) -> Any:
        return self.tq.kv_list(partition_id=partition)[partition]

    def listed(self, listing: Any) -> dict[str, Tags]:
        return dict(listing)

    def clear(self, keys: list[str], partition: str) -> None:
        self.tq.kv_clear(keys=keys, partition_id=partition)


class DropIn(TransferQueue):
    """This project behind TransferQueue's interface, as `import transfer_queue` gets it."""

    name = "drop_in"

    def join(self, address: str) -> None:
        from dataplane import compat

        # The real one runs on the same cluster, under the usual name.
        os.environ["DATAPLANE_TRANSFER_QUEUE_NAME"] = "drop-in"
        compat.activate()
        super().join(address)

    def close(self, *, destroy: bool) -> None:
        self.tq.close()


def _columns(tensor: torch.Tensor) -> Columns:
    """A dense or jagged batch as columns."""
    if tensor.is_nested:
        return Columns(tensor.values(), tensor.offsets().diff().to(torch.int64))
    rows, width = tensor.shape[0], tensor[0].numel() if tensor.shape[0] else 0
    return Columns(tensor.reshape(-1), torch.full((rows,), width, dtype=torch.int64))


def join_ray(address: str) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
