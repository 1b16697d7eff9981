"""Weights of a model in one piece, in host memory of rank 0: those of shards gathered, an adapter
merged. What the plane, an export and a checkpoint are made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.ranks.collectives import Peers
from trainer.ranks.model import add_adapter, base_of
from trainer.ranks.types import ModelSettings

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def gathered(tensors: Tensors, peers: Peers) -> dict[str, torch.Tensor]:
    """Each tensor whole, on rank 0; elsewhere nothing. Every rank enters.

    One tensor under two names comes as one again. What is whole in host memory already is not
    copied.
    """
    known: dict[int, torch.Tensor] = {}
    for tensor in distinct(tensors).values():
        plain = tensor.detach()
        whole = plain.full_tensor() if isinstance(plain, DTensor) else plain
        if peers.rank == 0:
            known[id(tensor)] = whole.cpu()
    return {name: known[id(t)] for name, t in tensors.items() if id(t) in known}


@torch.no_grad()
def spread(target: torch.Tensor, whole: torch.Tensor | None, peers: Peers) -> None:
    """Fill a tensor of every rank, or its shard of it, from the whole one that rank 0 has."""
    if whole is None:
        whole = torch.empty(target.shape, dtype=target.dtype)
    whole = peers.broadcast(whole.to(target.dtype).contiguous()).to(target.device)
    if isinstance(target, DTensor):
        # Every rank has it by now: each cuts its own piece, and nothing more is sent.
        whole = distribute_tensor(
            whole, target.device_mesh, target.placements, src_data_rank=None
        )  # fmt: skip
    target.copy_(whole)


def distinct(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Each tensor once, by the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def full_weights(model: Any, settings: ModelSettings, peers: Peers) -> dict[str, torch.Tensor]:
    """All weights by the names that the model has without an adapter; on rank 0, elsewhere nothing.

    Without an adapter they may be the model's own memory: read them before it is trained on.
    """
    found = gathered(model.state_dict(keep_vars=True), peers)
    if settings.adapter is None or not found:
        return found
    copies = {id(tensor): tensor.clone() for tensor in found.values()}
    shell = add_adapter(empty_shell(base_of(model)), settings)
    shell.load_state_dict({name: copies[id(tensor)] for name, tensor in found.items()}, assign=True)
    merged: dict[str, torch.Tensor] = shell.merge_and_unload().state_dict()
    return merged


def empty_shell(model: Any) -> Any:
    """A model of the same kind without memory, for weights to be put into."""
    import transformers

    automatic: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        shell = automatic.from_config(copy.deepcopy(model.config), dtype=model.dtype)
    shell.generation_config = copy.deepcopy(model.generation_config)
    # How names of the file differ from those of the model.
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        shell._weight_conversions = conversions
    return shell
