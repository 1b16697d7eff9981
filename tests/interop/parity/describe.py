"""What came back, as plain JSON: container kind, dtype, ragged axis, rows, order of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from tests.interop.parity.cases import Raised

_PLAIN = (bool, int, float, str, type(None))


def describe(value: Any) -> Any:
    """The value for `json.dumps`; two values are alike only if these are, text by text."""
    if isinstance(value, Raised):
        return {"raises": value.names[0], "is a": value.names}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, NonTensorStack | NonTensorData):
        return {"kind": type(value).__name__, "rows": describe(value.tolist())}
    if isinstance(value, TensorDictBase):
        return _batch(value)
    if isinstance(value, np.ndarray):
        return {"kind": "numpy", "dtype": str(value.dtype), "values": describe(value.tolist())}
    if isinstance(value, np.generic):
        return {"kind": "numpy scalar", "dtype": str(value.dtype), "value": describe(value.item())}
    if isinstance(value, torch.Size):
        return {"kind": "Size", "values": list(value)}
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    if type(value) is list:
        return [describe(item) for item in value]
    if isinstance(value, list | tuple | set | frozenset):
        return {"kind": type(value).__name__, "values": [describe(item) for item in value]}
    if isinstance(value, bytes):
        return {"kind": "bytes", "hex": value.hex()}
    return _meta(value)


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    said: dict[str, Any] = {"dtype": str(tensor.dtype)}
    if not tensor.is_nested:
        return {"kind": "dense", **said, "shape": list(tensor.shape), "values": _numbers(tensor)}
    rows = tensor.unbind()
    said["shapes"] = [list(row.shape) for row in rows]
    said["rows"] = [_numbers(row) for row in rows]
    if tensor.layout == torch.jagged:
        return {"kind": "jagged", "ragged axis": tensor._ragged_idx, **said}  # type: ignore[attr-defined]
    return {"kind": "strided", **said}


def _numbers(tensor: torch.Tensor) -> Any:
    """Nested lists; each of the small float types has its exact double."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).tolist()
    if tensor.is_floating_point():
        return tensor.to(torch.float64).tolist()
    return tensor.tolist()


def _batch(batch: TensorDictBase) -> dict[str, Any]:
    """Leaves by name, in the order of the names; a non-tensor leaf in each form it is got in."""
    leaves: dict[str, Any] = {}
    for name, leaf in batch.items():
        leaves[name] = describe(leaf)
        if not isinstance(leaf, torch.Tensor):
            got = batch[name]
            leaves[name] = {
                "items()": leaves[name],
                "[name]": type(got).__name__,
                "a list": isinstance(got, list),
                "rows": [describe(row) for row in got],
            }
    return {
        "kind": type(batch).__name__,
        "batch size": list(batch.batch_size),
        "names": [str(name) for name in batch.keys()],  # noqa: SIM118  (a batch iterates its rows)
        "leaves": leaves,
    }


def _mapping(value: Mapping[Any, Any]) -> Any:
    kind = {} if type(value) is dict else {"kind": type(value).__name__}
    if all(type(key) is str for key in value):
        plain = {key: describe(item) for key, item in value.items()}
        return {**kind, "values": plain} if kind else plain
    return {
        "kind": type(value).__name__,
        "pairs": [[describe(k), describe(v)] for k, v in value.items()],
    }


def _meta(value: Any) -> dict[str, Any]:
    kind = type(value).__name__
    if kind == "KVBatchMeta":
        named = ("keys", "tags", "partition_id", "fields", "extra_info", "size")
    elif kind == "BatchMeta":
        named = (
            "global_indexes", "partition_ids", "field_schema", "production_status", "extra_info",
            "custom_meta", "size", "field_names", "is_ready",
        )  # fmt: skip
    else:
        return {"kind": kind}
    return {
        "kind": kind,
        "len": len(value),
        **{name: describe(getattr(value, name)) for name in named},
    }
