"""From rows of a plane to the tensors of packs: what a worker does between a plan and a model.

Owns the shift by one token, padding, positions, and which fields a pack has. It says what is to be
got and takes what came back; it never gets anything itself, keeps nothing between calls, and draws
no random number that its arguments did not decide.

    part = plan.for_rank(dp_rank).in_pack_order()
    members = part.take(selection.trajectories)
    fetched = Fetched([(read, client.kv_batch_get(read.keys, "train", **read.arguments))
                       for read in reads_for(members, spec)])
    numbers = part.take(result.values)
    for step in pack_plan(part, members, fetched, spec, advantages=numbers, memory=memory):
        for pack in step:
            logits = model(**pack.model_inputs()).logits
"""

from __future__ import annotations

from trainer.materialize.build import pack_plan, pack_rows
from trainer.materialize.columns import COLUMNS, Column
from trainer.materialize.memory import PackMemory
from trainer.materialize.pack import PackTensors
from trainer.materialize.reading import Fetched, Read, new_buffers, reads_for
from trainer.materialize.sequence_parallel import split_sequence
from trainer.materialize.spec import Experts, Freshness, PackSpec, Teacher

__all__ = [
    "COLUMNS",
    "Column",
    "Experts",
    "Fetched",
    "Freshness",
    "PackMemory",
    "PackSpec",
    "PackTensors",
    "Read",
    "Teacher",
    "new_buffers",
    "pack_plan",
    "pack_rows",
    "reads_for",
    "split_sequence",
]
