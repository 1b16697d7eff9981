"""Cases of a process whose instance was closed: they run last, after `close()`."""

from __future__ import annotations

from typing import Any

from tests.deadline import eventually
from tests.interop.parity.cases import category, says

case = category("closed", live=False)


def _closed(tq: Any) -> None:
    """Close, and wait until Ray has let go of the named actor."""
    import ray

    def gone() -> bool:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            return True
        return False

    tq.close()
    eventually(gone, "the named actor is gone after close()")


@case
def close_twice(tq: Any) -> Any:
    _closed(tq)
    return [tq.close(), tq.close()]


@case
def the_client(tq: Any) -> Any:
    _closed(tq)
    return says(tq.get_client, "initialize")


@case
def verbs(tq: Any) -> Any:
    _closed(tq)
    calls = (
        lambda: tq.kv_put("a", "p", tag={}),
        lambda: tq.kv_batch_put(["a"], "p", tags=[{}]),
        lambda: tq.kv_batch_get("a", "p"),
        lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}], "p")),
        lambda: tq.kv_list(),
        lambda: tq.kv_clear("a", "p"),
    )
    return [says(call, "has not been initialized yet") for call in calls]


@case
def checkpoints(tq: Any) -> Any:
    _closed(tq)
    calls = (lambda: tq.save_checkpoint("/nonexistent"), lambda: tq.load_checkpoint("/nonexistent"))
    return [says(call, "not initialized") for call in calls]


@case
def metrics(tq: Any) -> Any:
    _closed(tq)
    return tq.get_metrics_endpoint()
