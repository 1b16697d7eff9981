"""A key-value data plane for reinforcement-learning post-training of language models.

Tags (small, queryable) live apart from values (tensors). Producers put rows, a controller plans
over tags, workers fetch values by key. Start with `init()`. Rows: `kv_put`, `kv_batch_put`,
`kv_batch_get`, `kv_view`, `kv_list`, `kv_clear`. Consumers: `kv_wait`, `kv_watch`, `kv_claim`,
`kv_commit`, `kv_release`. Producers of groups: `begin_group`, `end_group`. All of it:
`kv_create_partition` and its siblings, `explain`, `save_checkpoint`, `load_checkpoint`. Weights of
a model: `publish_weights`, `newest_version`, `read_weights`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError("rl-dataplane runs on Linux only: it stands on shared memory and flock")

if TYPE_CHECKING:
    from dataplane.checkpoint.verify import verify_checkpoint
    from dataplane.client.aio import AsyncClient
    from dataplane.client.results import Listing, Rows
    from dataplane.client.sync import Client
    from dataplane.config import Config
    from dataplane.errors import (
        AlreadyWritten,
        CheckpointDamaged,
        ClaimLost,
        DataplaneError,
        DeadlineExceeded,
        FieldNotFound,
        InternalError,
        InvalidRequest,
        JournalDamaged,
        KeyNotFound,
        OutcomeUnknown,
        OutOfRange,
        PartitionNotFound,
        PermissionDenied,
        PlaneLost,
        QuotaExceeded,
        RateLimited,
        RequestError,
        SchemaMismatch,
        StaleWrite,
        TooOld,
        Unauthenticated,
        Unreachable,
        ValueLost,
        WeightsNotFound,
    )
    from dataplane.lineage.rows import Trace
    from dataplane.metrics.client import serve_metrics
    from dataplane.report.record import PlaneRecord
    from dataplane.report.write import keep_record, write_report
    from dataplane.session import (
        async_connect,
        begin_group,
        close,
        connect,
        end_group,
        explain,
        init,
        kv_batch_get,
        kv_batch_put,
        kv_claim,
        kv_clear,
        kv_commit,
        kv_create_partition,
        kv_drop_partition,
        kv_list,
        kv_list_partitions,
        kv_put,
        kv_release,
        kv_seal_partition,
        kv_view,
        kv_wait,
        kv_watch,
        load_checkpoint,
        request_outcome,
        save_checkpoint,
        stage,
        trace,
    )
    from dataplane.types import (
        Change,
        Claim,
        Explanation,
        FieldSchema,
        KVBatchMeta,
        Quota,
        Retention,
        Revision,
    )
    from dataplane.weights import Weights, newest_version, publish_weights, read_weights

__all__ = [
    "AlreadyWritten",
    "AsyncClient",
    "Change",
    "CheckpointDamaged",
    "Claim",
    "ClaimLost",
    "Client",
    "Config",
    "DataplaneError",
    "DeadlineExceeded",
    "Explanation",
    "FieldNotFound",
    "FieldSchema",
    "InternalError",
    "InvalidRequest",
    "JournalDamaged",
    "KVBatchMeta",
    "KeyNotFound",
    "Listing",
    "OutOfRange",
    "OutcomeUnknown",
    "PartitionNotFound",
    "PermissionDenied",
    "PlaneLost",
    "PlaneRecord",
    "Quota",
    "QuotaExceeded",
    "RateLimited",
    "RequestError",
    "Retention",
    "Revision",
    "Rows",
    "SchemaMismatch",
    "StaleWrite",
    "TooOld",
    "Trace",
    "Unauthenticated",
    "Unreachable",
    "ValueLost",
    "Weights",
    "WeightsNotFound",
    "async_connect",
    "begin_group",
    "close",
    "connect",
    "end_group",
    "explain",
    "init",
    "keep_record",
    "kv_batch_get",
    "kv_batch_put",
    "kv_claim",
    "kv_clear",
    "kv_commit",
    "kv_create_partition",
    "kv_drop_partition",
    "kv_list",
    "kv_list_partitions",
    "kv_put",
    "kv_release",
    "kv_seal_partition",
    "kv_view",
    "kv_wait",
    "kv_watch",
    "load_checkpoint",
    "newest_version",
    "publish_weights",
    "read_weights",
    "request_outcome",
    "save_checkpoint",
    "serve_metrics",
    "stage",
    "trace",
    "verify_checkpoint",
    "write_report",
]

_HOME = {
    "AsyncClient": "client.aio",
    "Listing": "client.results",
    "Rows": "client.results",
    "Trace": "lineage.rows",
    "Client": "client.sync",
    "Config": "config",
    "PlaneRecord": "report.record",
    "keep_record": "report.write",
    "write_report": "report.write",
    "serve_metrics": "metrics.client",
    "verify_checkpoint": "checkpoint.verify",
    **dict.fromkeys(
        (
            "Change",
            "Claim",
            "Explanation",
            "FieldSchema",
            "KVBatchMeta",
            "Quota",
            "Retention",
            "Revision",
        ),
        "types",
    ),
    **dict.fromkeys(
        (
            "async_connect",
            "begin_group",
            "close",
            "connect",
            "end_group",
            "explain",
            "init",
            "load_checkpoint",
            "request_outcome",
            "save_checkpoint",
            "stage",
            "trace",
        ),
        "session",
    ),
    **dict.fromkeys((name for name in __all__ if name.startswith("kv_")), "session"),
    **dict.fromkeys(("Weights", "newest_version", "publish_weights", "read_weights"), "weights"),
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
