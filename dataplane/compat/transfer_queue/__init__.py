"""TransferQueue's public interface, served by this plane. See docs/migration.md.

Key-value verbs in two forms (`kv_put`, `async_kv_put`, …), the batches that they answer with
(`KVBatchMeta`, `BatchMeta`), the low-level client behind `get_client()`, samplers, streaming.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import TransferQueueClient
    from .dataloader import StreamingDataLoader, StreamingDataset
    from .errors import StorageKeyNotFoundError
    from .interface import (
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_clear,
        async_kv_list,
        async_kv_put,
        close,
        get_client,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_clear,
        kv_list,
        kv_put,
        load_checkpoint,
        save_checkpoint,
    )
    from .metadata import BatchMeta, KVBatchMeta
    from .sampler import (
        BaseSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
    )

__version__ = "0.1.11+dataplane"
"""The release whose interface this is; the part behind the plus says whose it is."""

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_HOME = {
    "BaseSampler": "sampler",
    "BatchMeta": "metadata",
    "GRPOGroupNSampler": "sampler",
    "KVBatchMeta": "metadata",
    "RankAwareSampler": "sampler",
    "SeqlenBalancedSampler": "sampler",
    "SequentialSampler": "sampler",
    "StorageKeyNotFoundError": "errors",
    "StreamingDataLoader": "dataloader",
    "StreamingDataset": "dataloader",
    "TransferQueueClient": "client",
}
"""Where the names live that are not in `interface`. They load on first use: a worker that only
unpickles a batch needs neither Ray nor a plane."""

_MODULES = (
    "client", "controller", "dataloader", "interface", "metadata", "sampler", "storage", "utils",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME.get(name, "interface")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
