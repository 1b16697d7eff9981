"""Rows of every dtype with arbitrary bits, and the bits of what came back."""

from __future__ import annotations

import math

import torch

from dataplane.codec.dtypes import DTYPE_NAME

DTYPES = sorted(DTYPE_NAME, key=str)

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "scalar": [(), (), ()],
    "ragged": [(0,), (3,), (2000,)],
    "matrix": [(2, 0), (1, 4), (3, 4)],
}
"""Field: the shapes of its three rows."""


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of arbitrary bits, NaNs with a payload among them; of valid ones for bool."""
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def rows_of(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Three rows of each field."""
    return {name: [filled(shape, dtype) for shape in shapes] for name, shapes in SHAPES.items()}


def bits(value: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    flat = value.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def width(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
