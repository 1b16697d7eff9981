"""What batches are described with, under the names by which others import it.

`kv_batch_meta` and `batch_meta` have the classes: by key, and by index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch.kv_batch_meta import KVBatchMeta

if TYPE_CHECKING:
    from .batch.batch_meta import BatchMeta
    from .batch.field_schema import extract_field_schema

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]


def __getattr__(name: str) -> Any:
    # With tensors, which a process that only passes keys on need not load.
    if name == "BatchMeta":
        from .batch.batch_meta import BatchMeta as value
    elif name == "extract_field_schema":
        from .batch.field_schema import extract_field_schema as value
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
