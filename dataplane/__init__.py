"""A key-value data plane for reinforcement-learning post-training of language models.

Tags (small, queryable) live apart from values (tensors). Producers put rows, a controller plans
over tags, workers fetch values by key. Start with `init()`; the verbs are `kv_put`,
`kv_batch_put`, `kv_batch_get`, `kv_view`, `kv_list` and `kv_clear`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError("rl-dataplane runs on Linux only: it stands on shared memory and flock")

if TYPE_CHECKING:
    from dataplane.client.aio import AsyncClient, async_connect
    from dataplane.client.results import Listing, Rows
    from dataplane.client.sync import Client
    from dataplane.config import Config
    from dataplane.errors import (
        AlreadyWritten,
        DataplaneError,
        DeadlineExceeded,
        FieldNotFound,
        InternalError,
        InvalidRequest,
        KeyNotFound,
        OutcomeUnknown,
        PartitionNotFound,
        PermissionDenied,
        PlaneLost,
        QuotaExceeded,
        RequestError,
        SchemaMismatch,
        StaleWrite,
        Unauthenticated,
        Unreachable,
        ValueLost,
    )
    from dataplane.session import (
        close,
        connect,
        init,
        kv_batch_get,
        kv_batch_put,
        kv_clear,
        kv_list,
        kv_put,
        kv_view,
    )
    from dataplane.types import FieldSchema, KVBatchMeta, Revision

__all__ = [
    "AlreadyWritten",
    "AsyncClient",
    "Client",
    "Config",
    "DataplaneError",
    "DeadlineExceeded",
    "FieldNotFound",
    "FieldSchema",
    "InternalError",
    "InvalidRequest",
    "KVBatchMeta",
    "KeyNotFound",
    "Listing",
    "OutcomeUnknown",
    "PartitionNotFound",
    "PermissionDenied",
    "PlaneLost",
    "QuotaExceeded",
    "RequestError",
    "Revision",
    "Rows",
    "SchemaMismatch",
    "StaleWrite",
    "Unauthenticated",
    "Unreachable",
    "ValueLost",
    "async_connect",
    "close",
    "connect",
    "init",
    "kv_batch_get",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "kv_view",
]

_HOME = {
    "AsyncClient": "client.aio",
    "async_connect": "client.aio",
    "Listing": "client.results",
    "Rows": "client.results",
    "Client": "client.sync",
    "Config": "config",
    "FieldSchema": "types",
    "KVBatchMeta": "types",
    "Revision": "types",
    **dict.fromkeys(("close", "connect", "init"), "session"),
    **dict.fromkeys((name for name in __all__ if name.startswith("kv_")), "session"),
}
"""Where each public name lives; all others are errors. Names load on first use: a server needs
no torch."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dataplane' has no attribute {name!r}")
    home = _HOME.get(name, "errors")
    value = getattr(importlib.import_module(f"dataplane.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
