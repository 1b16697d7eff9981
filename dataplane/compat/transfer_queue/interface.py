"""The functions of `transfer_queue`: an instance's life, and the key-value verbs.

Owns the state of a process: its client and, where there is one, the controller's handle. Each verb
is one text in rows.py or listing.py, run in this thread or awaited on any event loop.
"""

# The names of this state are those that TransferQueue's own tests look for.
# pyright: reportConstantRedefinition=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane.errors import InvalidRequest

from .errors import NotInitialized
from .names import refuse_partition
from .verbs import rows

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from tensordict import TensorDict

    from .client import TransferQueueClient
    from .link import Link
    from .metadata import KVBatchMeta

_TQ_CLIENT: TransferQueueClient | None = None
_TQ_CONTROLLER: Any = None
_created = False
"""Whether this process made the instance, which it then ends."""

Names = list[str] | str | None


# -- life ------------------------------------------------------------------------------------


def init(conf: DictConfig | dict[str, Any] | None = None) -> DictConfig | dict[str, Any] | None:
    """Start the instance of this Ray cluster, or join the one that is there.

    The first caller merges `conf` over config.yaml and gets the result. Every other caller gets
    back its argument as it is. Repeatable. Starts Ray where it is not initialised.

    Raises:
        ValueError: an unknown sampler, or a setting that only TransferQueue has.
        DeadlineExceeded: the instance did not come up in time; init may be repeated.
    """
    global _TQ_CLIENT, _TQ_CONTROLLER, _created
    from . import instance

    if _TQ_CLIENT is not None:
        return conf
    joined = instance.start_or_join(conf)
    _TQ_CONTROLLER, _TQ_CLIENT, _created = joined.controller, joined.client, joined.created
    return joined.config if joined.created else conf


def close() -> None:
    """Let go of the instance; the process that made it ends it for everybody. Repeatable."""
    global _TQ_CLIENT, _TQ_CONTROLLER, _created
    from . import instance

    client, controller, created = _TQ_CLIENT, _TQ_CONTROLLER, _created
    _TQ_CLIENT = _TQ_CONTROLLER = None
    _created = False
    if client is not None:
        instance.leave(client, controller, end=created)


def get_client() -> TransferQueueClient:
    """The process's client. AssertionError before init and after close."""
    if _TQ_CLIENT is None:
        raise NotInitialized
    return _TQ_CLIENT


def get_metrics_endpoint() -> str | None:
    """`host:port` of the instance's Prometheus metrics; None where they are off or nothing runs."""
    from . import instance

    config = instance.config_of(_TQ_CONTROLLER)
    return None if config is None else config.get("metrics", {}).get("endpoint", None)


# -- verbs -----------------------------------------------------------------------------------


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: rows.Parser = None,
) -> KVBatchMeta:
    """Write one row's fields and tag, whole or not at all; the key's whole tag and all its fields.

    A tag merges into the one that is there; fields replace those of the same name, of whatever
    dtype and length. Of a dict, tensors are one row each, everything else is a value.
    """
    return _link().run(_put_one(key, partition_id, fields, tag, data_parser))


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: rows.Parser = None,
) -> KVBatchMeta:
    """See `kv_put`. May be awaited on any event loop, on several of one process at once."""
    return await _link().run_async(_put_one(key, partition_id, fields, tag, data_parser))


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: rows.Parser = None,
) -> KVBatchMeta:
    """Write many rows at once, all or none. `fields` is a TensorDict of batch size [B], `tags` one
    dict per key. The batch that comes back has whole tags, and the fields that all keys have now.

    Raises:
        ValueError: nothing to write, no keys, keys twice, another number of rows or tags.
        TypeError: keys are no list of strings.
        QuotaExceeded: no room came free in time. After any error nothing was written.
    """
    return _link().run(_put_many(keys, partition_id, fields, tags, data_parser))


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: rows.Parser = None,
) -> KVBatchMeta:
    """See `kv_batch_put`."""
    return await _link().run_async(_put_many(keys, partition_id, fields, tags, data_parser))


def kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: Names = None
) -> TensorDict:
    """Copies of rows in the order of the keys. Keys that do not exist are left out, and so are
    fields that not all of the others have; where nothing is left of those selected, the batch is
    empty.

    Raises ValueError if there is none of the keys, or nothing selected and no field in common.
    """
    return _link().run(_get(keys, partition_id, select_fields))


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: Names = None
) -> TensorDict:
    """See `kv_batch_get`."""
    return await _link().run_async(_get(keys, partition_id, select_fields))


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Names = None) -> TensorDict:
    """The rows of a batch: the fields selected, else those that it names, else all in common.

    Raises ValueError if the batch names no partition, or does not name what is selected.
    """
    return _link().run(_get(*_of_meta(meta, select_fields)))


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Names = None) -> TensorDict:
    """See `kv_batch_get_by_meta`."""
    return await _link().run_async(_get(*_of_meta(meta, select_fields)))


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Partition -> key -> tag; of one partition or of all. `{}` for one that is not there.

    Only what changed since this process's last listing travels.
    """
    link = _link()
    return link.run(partial(link.listings.all, partition_id=partition_id))


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """See `kv_list`."""
    link = _link()
    return await link.run_async(partial(link.listings.all, partition_id=partition_id))


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Remove rows, tags and values. What does not exist is no error; no keys at all is."""
    _link().run(_clear(keys, partition_id))


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See `kv_clear`."""
    await _link().run_async(_clear(keys, partition_id))


# -- checkpoints -----------------------------------------------------------------------------


def save_checkpoint(
    checkpoint_dir: str | Path,
    *,
    include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write rows, tags and what tasks have consumed to a folder, which is there whole or not at
    all. `metadata` is kept in its metadata.json. RuntimeError before init."""
    from . import checkpoint

    if _TQ_CONTROLLER is None:
        raise NotInitialized
    checkpoint.save(
        get_client(), checkpoint_dir, include_storage=include_storage, metadata=metadata
    )


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace what the instance holds by a checkpoint, whole or not at all. RuntimeError before
    init; FileNotFoundError if there is no checkpoint."""
    from . import checkpoint

    if _TQ_CONTROLLER is None:
        raise NotInitialized
    checkpoint.load(get_client(), checkpoint_dir)


# -- inside ----------------------------------------------------------------------------------


def _link() -> Link:
    client = _TQ_CLIENT
    if client is None:
        from . import instance

        # A process of the cluster that never called init may still use the verbs.
        if not instance.is_running():
            raise NotInitialized
        init()
        client = get_client()
    return client.link


def _put_one(
    key: Any, partition_id: str, fields: Any, tag: dict[str, Any] | None, data_parser: rows.Parser
) -> Any:
    rows.refuse_parser(data_parser)
    if fields is None and tag is None:
        raise InvalidRequest("a put brings fields, a tag or both")
    rows.new_keys([key], partition_id)
    return partial(
        rows.put_one,
        key=key,
        partition_id=partition_id,
        fields=rows.one_row(fields),
        tag=rows.one_tag(tag),
    )


def _put_many(
    keys: Any, partition_id: str, fields: Any, tags: Any, data_parser: rows.Parser
) -> Any:
    rows.refuse_parser(data_parser)
    if fields is None and tags is None:
        raise InvalidRequest("a put brings fields, tags or both")
    keys = rows.new_keys(keys, partition_id)
    return partial(
        rows.put,
        keys=keys,
        partition_id=partition_id,
        fields=rows.many_rows(fields, keys),
        tags=rows.checked_tags(tags, keys),
    )


def _get(keys: Any, partition_id: str, select_fields: Names) -> Any:
    return partial(
        rows.get,
        keys=rows.checked_keys(rows.one_or_many(keys)),
        partition_id=partition_id,
        select=rows.one_or_many(select_fields),
    )


def _of_meta(meta: KVBatchMeta, select_fields: Names) -> tuple[list[str], str, Names]:
    if meta.partition_id is None:
        raise InvalidRequest("the batch names no partition_id: set it, or use kv_batch_get")
    if select_fields is None:
        return meta.keys, meta.partition_id, meta.fields
    wanted: Sequence[str] = rows.one_or_many(select_fields)
    unknown = [name for name in wanted if name not in (meta.fields or ())]
    if unknown:
        raise InvalidRequest(
            f"select_fields {unknown} not found in the batch, which has {meta.fields}"
        )
    return meta.keys, meta.partition_id, list(wanted)


def _clear(keys: Any, partition_id: str) -> Any:
    refuse_partition(partition_id)
    return partial(
        rows.clear, keys=rows.checked_keys(rows.one_or_many(keys)), partition_id=partition_id
    )
