"""TransferQueue's storage units, by name: the plane's value stores do their work."""

from __future__ import annotations

from ..errors import StorageKeyNotFoundError
from .simple_storage import SimpleStorageUnit

__all__ = ["SimpleStorageUnit", "StorageKeyNotFoundError"]
