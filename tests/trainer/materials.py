"""Rows with values for tests of packs, and a stand-in for the plane that they would be got from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataplane import Rows
from dataplane.fields import IGNORED, KNOWN_FIELDS, pad_value
from tests.trainer.rows import tags
from trainer.materialize import Fetched, PackSpec, PackTensors, Read, pack_rows, reads_for
from trainer.trajectory import BatchTraits, Trajectory


@dataclass(frozen=True)
class Sample:
    """A canonical row: fields of length N, and its tags."""

    fields: dict[str, Any]
    row: Trajectory


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    *,
    uid: str = "u",
    session: int = 0,
    fields: dict[str, Any] | None = None,
    **more: Any,
) -> Sample:
    """A row of a prompt and a response, of which `mask` says what the policy generated."""
    ids = [*prompt, *response]
    keep = [1] * len(response) if mask is None else list(mask)
    labels = [IGNORED] * len(prompt)
    labels += [token if flag else IGNORED for token, flag in zip(response, keep, strict=True)]
    values: dict[str, Any] = {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }
    if logprobs is not None:
        values["logprobs"] = torch.tensor([0.0] * len(prompt) + list(logprobs), dtype=torch.float32)
    values |= fields or {}
    its = tags(
        uid,
        session,
        prompt=len(prompt),
        response=len(response),
        **{"policy_len": sum(label != IGNORED for label in labels[1:]), **more},
    )
    row = Trajectory.of(f"{uid}_{session}_0", its, tuple(values))
    return Sample(values, row)


def ex_2_1(**more: Any) -> Sample:
    """Prompt of 3, response of 3."""
    return sample([10, 11, 12], [20, 21, 22], logprobs=[-0.1, -0.2, -0.3], **more)


def ex_2_2(**more: Any) -> Sample:
    """Two turns with a tool's answer of two tokens in between."""
    return sample(
        [10, 11],
        [20, 21, 90, 91, 22, 2],
        [1, 1, 0, 0, 1, 1],
        [-0.1, -0.2, 0, 0, -0.3, -0.4],
        **{"session": 1, **more},
    )


def members(samples: Sequence[Sample]) -> list[Trajectory]:
    """What a controller knows of them."""
    return [one.row for one in samples]


def spec_of(samples: Sequence[Sample], cap: int = 16, **more: Any) -> PackSpec:
    """The spec of a batch that is these rows."""
    return PackSpec(cap=cap, traits=BatchTraits.of(members(samples)), **more)


def got(samples: Sequence[Sample], read: Read) -> Rows:
    """What a plane that holds these rows answers."""
    by_key = {one.row.key: one.fields for one in samples}
    arguments = read.arguments
    rows = Rows(list(read.keys), {})
    for name in arguments["select_fields"]:
        column = [by_key[key][name] for key in read.keys]
        if arguments["layout"] == "list":
            rows.fields[name] = column
            continue
        known = KNOWN_FIELDS[name]
        dim = 0 if known.ragged_dim == 0 else column[0].ndim - 1
        head, tail = arguments.get("trim", {}).get(name, (0, 0))
        cut = [v.narrow(dim, head, v.shape[dim] - head - tail) for v in column]
        starts = [0, *itertools.accumulate(v.shape[dim] for v in cut)]
        joined = torch.cat(cut, dim)
        if (total := arguments.get("total")) is not None:
            rest = torch.full((total - starts[-1], *joined.shape[1:]), pad_value(name))
            joined = torch.cat([joined, rest.to(joined.dtype)])
        if name in arguments.get("out", {}):
            joined = arguments["out"][name].copy_(joined)
        rows.fields[name] = joined
        rows.cu_seqlens[name] = torch.tensor(starts, dtype=torch.int32)
    return rows


def fetch(samples: Sequence[Sample], spec: PackSpec, **options: Any) -> Fetched:
    """The rows, got as their reads ask."""
    reads = reads_for(members(samples), spec, **options)
    return Fetched([(read, got(samples, read)) for read in reads])


def packed(
    samples: Sequence[Sample], spec: PackSpec | None = None, *, cap: int = 16, **options: Any
) -> PackTensors:
    """A pack of them; of `places` alone if given."""
    spec = spec or spec_of(samples, cap)
    options.setdefault("advantages", [1.0] * len(samples))
    return pack_rows(members(samples), fetch(samples, spec), spec, **options)
