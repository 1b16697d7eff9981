"""A pack cut along its sequence for ranks that share it (Ulysses): equal slices, one each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.functional import pad

from dataplane.fields import IGNORED
from trainer.materialize.columns import ALL_COLUMNS
from trainer.materialize.pack import PackTensors


def split_sequence(pack: PackTensors, size: int) -> list[PackTensors]:
    """The slices of `size` ranks, in rank order; a pack that does not divide is padded first.

    `cu_seq_lens` stay those of the whole pack, which is what attention sees once ranks have
    exchanged heads for tokens. Multi-token-prediction labels are made before, of the whole.
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"a pack is split for 1 rank or more, not {size!r}")
    more = -pack.size % size
    ends: list[int] = cast("Any", pack.cu_seq_lens).tolist()
    if more and pack.num_padding:
        ends[-1] += more  # the last piece of padding grows
    elif more:
        ends.append(ends[-1] + more)
    total = pack.size + more
    padding = pack.num_padding + more
    shard = total // size

    def cut(tensor: torch.Tensor, dim: int, value: float) -> list[torch.Tensor]:
        behind = tensor.ndim - 1 - dim
        longer = pad(tensor, [0, 0] * behind + [0, more], value=value) if more else tensor
        return [part.contiguous() for part in torch.split(longer, shard, dim)]

    ids = cut(pack.input_ids, 1, 0)
    labels = cut(pack.labels, 1, IGNORED)
    positions = cut(pack.position_ids, pack.position_ids.ndim - 1, 0)
    columns = {
        name: cut(column, 1, ALL_COLUMNS[name].pad if name in ALL_COLUMNS else 0.0)
        for name, column in pack.columns.items()
    }
    routed = _split_experts(pack.routed_experts, more, shard) or [None] * size
    return [
        replace(
            pack,
            input_ids=ids[rank],
            labels=labels[rank],
            position_ids=positions[rank],
            cu_seq_lens=torch.tensor(ends, dtype=torch.int32, device=pack.cu_seq_lens.device),
            max_length=max(b - a for a, b in itertools.pairwise(ends)),
            num_padding=min(max((rank + 1) * shard - (total - padding), 0), shard),
            columns={name: parts[rank] for name, parts in columns.items()},
            routed_experts=routed[rank],
            keys=(),
            lengths=(),
        )
        for rank in range(size)
    ]


def _split_experts(routed: torch.Tensor | None, more: int, shard: int) -> list[torch.Tensor | None]:
    if routed is None:
        return []
    rest = routed.new_zeros((more, *routed.shape[1:]))  # `pad` knows no uint16
    return list(torch.split(torch.cat([routed, rest]), shard))
