"""Producers outside a cluster: rows and trajectories go to a data plane through its gateway.

`Producer` is for threads, `AsyncProducer` for coroutines; both have the same verbs. Needs grpcio,
protobuf and numpy only.
"""

from __future__ import annotations

from dataplane.producer.access import Access
from dataplane.producer.aio import AsyncProducer
from dataplane.producer.batching import BatchPolicy
from dataplane.producer.results import Arrays, Listing
from dataplane.producer.retry import RetryPolicy
from dataplane.producer.sending import Rejected
from dataplane.producer.sync import Producer
from dataplane.producer.trajectory import (
    PolicySpan,
    TrajectoriesPut,
    Trajectory,
    TrajectoryResult,
)

__all__ = [
    "Access",
    "Arrays",
    "AsyncProducer",
    "BatchPolicy",
    "Listing",
    "PolicySpan",
    "Producer",
    "Rejected",
    "RetryPolicy",
    "TrajectoriesPut",
    "Trajectory",
    "TrajectoryResult",
]
