"""`SimpleStorageUnit`, by name only."""

from __future__ import annotations

from typing import Any

from ..errors import StorageKeyNotFoundError, unsupported

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]


class SimpleStorageUnit:
    """TransferQueue's storage actor, which this plane has no use for.

    Values lie in shared memory, in one value store per node, which starts with the node's first
    client. The name is here for code that imports it to set options of the actor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_units()

    @classmethod
    def options(cls, *args: Any, **kwargs: Any) -> type[SimpleStorageUnit]:
        """The class itself: there is no actor for the options."""
        return cls

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises InvalidRequest."""
        raise _no_units()


def _no_units() -> Exception:
    return unsupported(
        "SimpleStorageUnit",
        "the plane's value stores hold the values, one per node, started with init(); set "
        "dataplane.capacity_bytes for their size",
    )
