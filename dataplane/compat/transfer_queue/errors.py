"""What this face raises beside the plane's own errors.

All errors of the plane are RuntimeErrors, which is what TransferQueue raises where a server
refuses; where it raises ValueError, TypeError or KeyError, so does this face.
"""

from __future__ import annotations

from typing import Any

from dataplane.errors import InvalidRequest, KeyNotFound, PlaneLost


class NotInitialized(PlaneLost, AssertionError):
    """`init()` has not been called in this process, or `close()` has."""

    def __init__(self) -> None:
        super().__init__(
            "TransferQueue is not initialized: it has not been initialized yet in this process, "
            "or it was closed. Call transfer_queue.init() first"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NotInitialized, ()


class StorageKeyNotFoundError(KeyNotFound):
    """Rows that were asked for by their indexes are not there (any more)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_found, (self.message, self.partition_id, self.keys)


def _not_found(message: str, partition_id: str, keys: list[str]) -> StorageKeyNotFoundError:
    return StorageKeyNotFoundError(message, partition_id=partition_id, keys=keys)


def unsupported(what: str, instead: str) -> InvalidRequest:
    """The error of a setting that only TransferQueue has."""
    return InvalidRequest(f"{what} is TransferQueue's own: {instead}")
