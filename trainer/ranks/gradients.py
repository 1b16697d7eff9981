"""Gradients of an optimizer step: added up over ranks, measured, and cut to a norm.

Every rank's loss already weighs a token 1 / G, so what follows is a sum and never a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor

from trainer.ranks.collectives import Peers

BUCKET_BYTES: Final = 64 << 20
"""Added up at a time, a larger gradient aside."""


def fill_missing(parameters: Iterable[torch.Tensor]) -> None:
    """A gradient of 0 for what took no part, so that all ranks have the same ones."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def add_up(parameters: Sequence[torch.Tensor], peers: Peers) -> None:
    """The sum over ranks, in place. Shards have been added up in the backward pass already."""
    if peers.world_size == 1:
        return
    whole = [_grad(p) for p in parameters if not isinstance(p, DTensor)]
    for bucket in _buckets(whole):
        flat = peers.all_reduce_sum(torch.cat([grad.reshape(-1) for grad in bucket]))
        at = 0
        for grad in bucket:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()


@torch.no_grad()
def clip(parameters: Sequence[torch.Tensor], max_norm: float | None, peers: Peers) -> float:
    """The norm of all gradients together, over shards too; they are cut to `max_norm` if longer.

    A norm that is no finite number cuts nothing.
    """
    grads = [_grad(parameter) for parameter in parameters]
    shards = torch.zeros((), dtype=torch.float64, device=peers.device)
    whole = torch.zeros_like(shards)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        length: torch.Tensor = cast("Any", torch.linalg).vector_norm(local, dtype=torch.float32)
        (shards if isinstance(grad, DTensor) else whole).add_(length.double() ** 2)
    norm = math.sqrt(float(peers.all_reduce_sum(shards) + whole))
    if max_norm is not None and max_norm < norm < math.inf:
        for grad in grads:
            grad.mul_(max_norm / norm)
    return norm


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient: `fill_missing` comes first")
    return parameter.grad


def _buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype, some at a time."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault(grad.dtype, []).append(grad)
    for members in kinds.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for grad in members:
            if bucket and size + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        yield bucket
