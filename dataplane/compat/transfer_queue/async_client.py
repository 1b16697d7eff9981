"""The low-level client for coroutines, and what it has in common with the blocking one.

Owns the checks of arguments and what comes of answers. Each method is a verb of metas.py or
row_values.py, or a question to the controller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import GRACE_S
from dataplane.client.partitions import list_partitions
from dataplane.errors import InvalidRequest

from . import checkpoint
from .control.answers import Status, all_set, as_status
from .control.asking import Controller
from .errors import unsupported
from .link import Link, settings_in
from .names import HIDDEN, refuse_partition
from .verbs import metas, row_values, rows

if TYPE_CHECKING:
    from tensordict import TensorDict

    from .metadata import BatchMeta

log = logging.getLogger("transfer_queue.client")

# What TransferQueue calls its managers of storage, and its backends.
_MANAGERS = ("SimpleStorage", "AsyncSimpleStorageManager")


class AsyncTransferQueueClient:
    """Rows by index, for coroutines: awaitable on any event loop, also on several at once."""

    def __init__(
        self,
        client_id: str,
        controller_info: Mapping[str, Any],
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
        *,
        link: Link | None = None,
    ) -> None:
        """A client of the instance that `controller_info` describes: what `init` keeps in its
        config as `controller.zmq_info`. Needs no Ray, so it works in a forked worker.

        The settings of ZeroMQ mean nothing here. Raises PlaneLost if the instance has ended.
        """
        if controller_info is None:  # pyright: ignore[reportUnnecessaryComparison] (user input)
            raise InvalidRequest("controller_info cannot be None: pass config.controller.zmq_info")
        info = {str(name): controller_info[name] for name in _names_of(controller_info)}
        self.client_id = client_id
        self._owns_link = link is None
        if link is None:
            link = Link.at(info, settings_in(info))
        self._link = link
        self._controller = Controller()

    @property
    def link(self) -> Link:
        """Its way to the plane."""
        return self._link

    @property
    def controller(self) -> Controller:
        """Its way to the controller."""
        return self._controller

    def initialize_storage_manager(self, manager_type: str, config: Any = None) -> None:
        """Nothing to do: values lie in the plane. InvalidRequest for a backend that it is not."""
        if manager_type not in _MANAGERS:
            raise unsupported(
                f"the storage backend {manager_type!r}",
                "set backend.storage_backend to SimpleStorage; values then lie in shared memory, "
                "whose size is dataplane.capacity_bytes",
            )

    def close(self) -> None:
        """Let go of the plane, where this client joined it by itself. Repeatable."""
        if self._owns_link:
            self._link.close()

    # -- batches -----------------------------------------------------------------------------

    async def async_get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See `TransferQueueClient.get_meta`."""
        return await self._link.run_async(
            self._get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config),
            self._wait_s(),
        )

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """See `TransferQueueClient.set_custom_meta`."""
        await self._link.run_async(self._of(row_values.set_custom_meta, meta=metadata))

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: rows.Parser = None,
    ) -> BatchMeta:
        """See `TransferQueueClient.put`."""
        return await self._link.run_async(self._put(data, metadata, partition_id, data_parser))

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """See `TransferQueueClient.get_data`."""
        return await self._link.run_async(self._of(row_values.get_data, meta=metadata))

    async def async_clear_partition(self, partition_id: str) -> None:
        """See `TransferQueueClient.clear_partition`."""
        if not await self._link.run_async(self._asking("clear_partition", partition_id)):
            warn_of_nothing(partition_id)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """See `TransferQueueClient.clear_samples`."""
        await self._link.run_async(self._of(row_values.clear_samples, meta=metadata))

    # -- statuses ----------------------------------------------------------------------------

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """See `TransferQueueClient.get_consumption_status`."""
        return as_status(
            await self._link.run_async(self._asking("consumption", task_name, partition_id))
        )

    async def async_get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> Status:
        """See `TransferQueueClient.get_production_status`."""
        told = await self._link.run_async(
            self._asking("production", list(data_fields or ()), partition_id)
        )
        return as_status(told)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """See `TransferQueueClient.check_consumption_status`."""
        return all_set(*await self.async_get_consumption_status(task_name, partition_id))

    async def async_check_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> bool:
        """See `TransferQueueClient.check_production_status`."""
        return all_set(
            *await self.async_get_production_status(data_fields, partition_id), of_none=True
        )

    async def async_reset_consumption(
        self, partition_id: str, task_name: str | None = None
    ) -> bool:
        """See `TransferQueueClient.reset_consumption`."""
        await self._link.run_async(self._asking("reset_consumption", partition_id, task_name))
        return True

    async def async_get_partition_list(self) -> list[str]:
        """See `TransferQueueClient.get_partition_list`."""
        return await self._link.run_async(partition_names)

    # -- keys --------------------------------------------------------------------------------

    async def async_kv_retrieve_meta(
        self, keys: list[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """See `TransferQueueClient.kv_retrieve_meta`."""
        return await self._link.run_async(self._meta_of_keys(keys, partition_id, create))

    async def async_kv_retrieve_keys(
        self, global_indexes: list[int] | int, partition_id: str
    ) -> list[str | None]:
        """See `TransferQueueClient.kv_retrieve_keys`."""
        return await self._link.run_async(self._keys_of(global_indexes, partition_id))

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """See `TransferQueueClient.kv_list`."""
        return await self._link.run_async(self._listing(partition_id))

    # -- checkpoints -------------------------------------------------------------------------

    async def async_save_controller_checkpoint(self, path: str) -> None:
        """See `TransferQueueClient.save_controller_checkpoint`."""
        await self._link.run_async(self._of(checkpoint.save_controller, path=path), self._wait_s())

    async def async_load_controller_checkpoint(self, path: str) -> None:
        """See `TransferQueueClient.load_controller_checkpoint`."""
        await self._link.run_async(self._of(checkpoint.load_controller, path=path), self._wait_s())

    async def async_save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """See `TransferQueueClient.save_storage_checkpoint`."""
        await self._link.run_async(
            partial(checkpoint.save_storage, checkpoint_dir=checkpoint_dir), self._wait_s()
        )

    async def async_load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """See `TransferQueueClient.load_storage_checkpoint`."""
        await self._link.run_async(
            partial(checkpoint.load_storage, checkpoint_dir=checkpoint_dir), self._wait_s()
        )

    # -- what both faces share ---------------------------------------------------------------

    def _of(self, verb: Callable[..., Any], **arguments: Any) -> Any:
        return partial(verb, controller=self._controller, **arguments)

    def _asking(self, question: str, *body: Any) -> Any:
        for part in body:
            refuse_partition(part)

        def verb(core: Any, deadline: float) -> Any:
            return self._controller.ask(core, question, list(body), deadline)

        return verb

    def _wait_s(self) -> float:
        """How long a claim may wait, and for the answer after that."""
        return self._link.config.wait_timeout_s + GRACE_S

    def _get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str,
        task_name: str | None,
        sampling_config: Mapping[str, Any] | None,
    ) -> Any:
        refuse_partition(partition_id)
        return self._of(
            metas.get_meta,
            fields=list(rows.one_or_many(data_fields)),
            count=batch_size,
            partition_id=partition_id,
            mode=mode,
            task=task_name,
            sampling=sampling_config,
        )

    def _put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None,
        partition_id: str | None,
        data_parser: rows.Parser,
    ) -> Any:
        rows.refuse_parser(data_parser)
        refuse_partition(partition_id)
        return self._of(row_values.put, data=data, meta=metadata, partition_id=partition_id)

    def _meta_of_keys(self, keys: Any, partition_id: str, create: bool) -> Any:
        refuse_partition(partition_id)
        keys = rows.one_or_many(keys)
        return self._of(
            metas.meta_of_keys,
            keys=rows.new_keys(keys, partition_id) if create else rows.checked_keys(keys),
            partition_id=partition_id,
            create=bool(create),
        )

    def _keys_of(self, global_indexes: Any, partition_id: str) -> Any:
        indexes: list[Any] = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise TypeError(f"global_indexes are a list of int, not {type(indexes).__name__}")
        if not indexes:
            raise InvalidRequest("global_indexes are empty: name at least one")
        for index in indexes:
            if not isinstance(index, int):
                raise TypeError(f"an index is an int, not {type(index).__name__}: {index!r:.80}")
        return self._asking("keys_of", indexes, partition_id, True)

    def _listing(self, partition_id: str | None) -> Any:
        return partial(self._link.listings.all, partition_id=partition_id)


# -- inside ----------------------------------------------------------------------------------


def partition_names(core: Core, deadline: float) -> Verb[list[str]]:
    """The names of the partitions that there are."""
    found = yield from list_partitions(core, deadline)
    return [name for name in found if name != HIDDEN]


def _names_of(info: Any) -> list[Any]:
    # A DictConfig is no Mapping.
    if not hasattr(info, "keys"):
        raise TypeError(
            f"controller_info is the mapping in config.controller.zmq_info, not "
            f"{type(info).__name__}"
        )
    return list(info.keys())


def warn_of_nothing(partition_id: str) -> None:
    """Say that a partition to be cleared is not there."""
    log.warning("there is no partition %r to clear", partition_id)
