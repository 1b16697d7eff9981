"""What files of batches may hold: plain containers, plain values, dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch


class PlainData:
    """Takes values over one by one, and counts the bytes of their tensors."""

    def __init__(self) -> None:
        self.nbytes = 0

    def of(self, value: Any) -> Any:
        """The value as files hold it: numpy's arrays and numbers are tensors and numbers.

        Raises:
            TypeError: it, or a part of it, is something else.
            ValueError: a tensor claims more elements than it has bytes for.
        """
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, torch.Tensor):
            return self._dense(value)
        if isinstance(value, np.ndarray):
            return self._dense(torch.tensor(value))
        if isinstance(value, np.generic):
            return cast("Any", value).item()
        if isinstance(value, list | tuple):
            parts = [self.of(part) for part in cast("Sequence[Any]", value)]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            mapping = cast("dict[Any, Any]", value)
            return {text(name): self.of(part) for name, part in mapping.items()}
        raise TypeError(f"a {type(value).__name__} is no plain data")

    def map(self, value: Any) -> dict[str, Any]:
        """The value, which is a map; TypeError if it is none."""
        found = self.of(value)
        if not isinstance(found, dict):
            raise TypeError(f"{value!r:.40} is no map")
        return cast("dict[str, Any]", found)

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            raise TypeError(f"a tensor is dense and on the CPU, not {tensor.layout}")
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor of shape {list(tensor.shape)} has bytes for less")
        self.nbytes += nbytes
        return tensor.detach()


def text(value: Any) -> str:
    """The value, which is text; TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
