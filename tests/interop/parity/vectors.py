"""The worked vectors of the protocol, as far as a store has a part in them.

V1 to V12 are the numbers under which the protocol's description lists them; those that need the
trainer's own code (V6 to V9) are in the run of that code.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tests.interop.parity.batches import batch, ints, jagged, objects
from tests.interop.parity.cases import category

case = category("vectors", live=True)


@case
def v1_left_shift(tq: Any, p: str) -> Any:
    keys, lengths = ["a", "b"], [2, 3]
    full = jagged([0, 1, 2, 3, 4], [10, 11, 12, 13], dtype=torch.float32)
    tags = [{"response_len": n} for n in lengths]
    meta = tq.kv_batch_put(keys, p, fields=batch(full=full), tags=tags)
    rows = tq.kv_batch_get_by_meta(meta, ["full"])["full"].unbind()
    cut = [
        row[-n - 1 : -1]
        for row, n in zip(rows, [t["response_len"] for t in meta.tags], strict=True)
    ]
    shifted = torch.nested.nested_tensor(cut, layout=torch.jagged)
    tq.kv_batch_put(keys, p, fields=batch(shifted=shifted))
    return tq.kv_batch_get(keys, p, "shifted")


@case
def v2_padded_to_nested(tq: Any, p: str) -> Any:
    keys = ["a", "b"]
    padded = torch.tensor([[1, 2, 0], [3, 4, 5]])
    tq.kv_batch_put(keys, p, fields=batch(padded=padded, length=ints(2, 3)))
    got = tq.kv_batch_get(keys, p)
    rows = [row[:n] for row, n in zip(got["padded"].unbind(), got["length"].tolist(), strict=True)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return [got, tq.kv_batch_put(keys, p, fields=batch(padded=nested)), tq.kv_batch_get(keys, p)]


@case
def v3_balance(tq: Any, p: str) -> Any:
    lengths = [10, 200, 30, 150, 90, 60, 120, 40]
    keys = [f"u{i}_0_0" for i in range(8)]
    tokens = jagged(*[[i] * n for i, n in enumerate(lengths)])
    meta = tq.kv_batch_put(keys, p, fields=batch(t=tokens), tags=[{"seq_len": n} for n in lengths])
    meta.reorder([2, 3, 5, 6, 0, 1, 4, 7])
    parts = meta.chunk(2)
    sums = [sum(tag["seq_len"] for tag in part.tags) for part in parts]
    fetched = [tq.kv_batch_get_by_meta(part)["t"] for part in parts]
    return [
        parts,
        sums,
        [int(t.values().numel()) for t in fetched],
        [t.values()[0] for t in fetched],
    ]


@case
def v4_sessions(tq: Any, p: str) -> Any:
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0"]
    masks = jagged([1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 1, 1])
    rewards = jagged([0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0.5], dtype=torch.float32)
    meta = tq.kv_batch_put(keys, p, fields=batch(response_mask=masks, rm_scores=rewards))
    got = tq.kv_batch_get_by_meta(meta.select_keys(["u_0_1", "u_1_0", "u_2_0"]))
    outcome = got["rm_scores"].sum(dim=1)
    scaled = ((outcome - outcome.mean()) / (outcome.std() + 1e-6)).round(decimals=4)
    advantage = scaled[torch.tensor([0, 0, 1, 2])]
    mask = tq.kv_batch_get(keys, p, ["response_mask"])["response_mask"]
    rows = [a * row for a, row in zip(advantage, mask.unbind(), strict=True)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    after = tq.kv_batch_put(keys, p, fields=batch(advantages=nested))
    return [got, after, tq.kv_batch_get_by_meta(after, ["advantages"])]


@case
def v5_padding_rows(tq: Any, p: str) -> Any:
    keys = [f"u{i}_0_0" for i in range(45)]
    tags = [{"seq_len": i + 1, "global_steps": 3} for i in range(45)]
    real = tq.kv_batch_put(keys, p, fields=batch(n=torch.arange(45)), tags=tags)
    pads = [f"padff_{i}_0" for i in range(19)]
    pad_tags = [{**tags[0], "is_padding": True, "seq_len": 128} for _ in pads]
    padding = tq.kv_batch_put(
        pads, p, fields=batch(n=torch.zeros(19, dtype=torch.int64)), tags=pad_tags
    )
    whole = tq.KVBatchMeta.concat([real, padding])
    parts = whole.chunk(4)
    flags = [[bool(tag.get("is_padding")) for tag in part.tags] for part in parts]
    tq.kv_clear([k for k, t in zip(whole.keys, whole.tags, strict=True) if t.get("is_padding")], p)
    return [
        len(whole),
        [len(part) for part in parts],
        flags,
        sorted(tq.kv_list(p)[p]) == sorted(keys),
    ]


@case
def v7_what_a_selection_leaves(tq: Any, p: str) -> Any:
    for i in range(5):
        tq.kv_put(f"u{i}", p, tag={"is_prompt": True, "status": "finished", "global_steps": i})
        rows = [f"u{i}_{s}_0" for s in range(2)]
        scores = batch(score=torch.full((2,), float(i)))
        tq.kv_batch_put(rows, p, fields=scores, tags=[{"status": "success", "global_steps": i}] * 2)
    tq.kv_clear(keys=[f"u{i}" for i in range(5)] + ["u4_0_0", "u4_1_0"], partition_id=p)
    left = tq.kv_list()[p]
    return [left, list(left), tq.kv_batch_get(list(left), p, ["score"])]


@case
def v8_stale_groups_are_cleared(tq: Any, p: str) -> Any:
    for i, step in enumerate([1, 1, 5, 6, 7]):
        tq.kv_put(f"u{i}", p, tag={"is_prompt": True, "status": "running", "global_steps": step})
        tq.kv_put(
            f"u{i}_0_0", p, fields={"x": ints(i)}, tag={"status": "success", "global_steps": step}
        )
        tq.kv_put(f"u{i}", p, tag={"status": "finished"})
    groups = {key: tag for key, tag in tq.kv_list(p)[p].items() if tag.get("is_prompt")}
    stale = [key for key, tag in groups.items() if 10 - tag["global_steps"] + 1 > 8]
    tq.kv_clear([key for uid in stale for key in (uid, f"{uid}_0_0")], p)
    return [groups, stale, list(tq.kv_list(p)[p])]


@case
def v10_tag_merge(tq: Any, p: str) -> Any:
    tq.kv_put("u", p, tag={"is_prompt": True, "status": "pending", "global_steps": 7})
    meta = tq.kv_put("u", p, tag={"status": "running"})
    return [meta, meta.fields, tq.kv_list(p)]


@case
def v11_fields_add_up(tq: Any, p: str) -> Any:
    tq.kv_put("a", p, fields={"x": ints(1)})
    tq.kv_put("b", p, fields={"x": ints(2), "y": ints(3)})
    put = tq.kv_batch_put(["a", "b"], p, fields=batch(z=ints(10, 20)))
    both = ["a", "b"]
    return {
        "put": put.fields, "all": sorted(tq.kv_batch_get(both, p).keys()),
        "y and z": tq.kv_batch_get(both, p, ["y", "z"]), "y": tq.kv_batch_get(both, p, ["y"]),
        "repeated": tq.kv_batch_get(["b", "absent", "a", "b"], p, ["z"]),
    }  # fmt: skip


@case
def v11_another_length_and_dtype(tq: Any, p: str) -> Any:
    first = tq.kv_batch_put(
        ["a", "b"], p, fields=batch(x=jagged([0.5, 1.5], [1, 2, 3], dtype=torch.float32))
    )
    second = tq.kv_batch_put(["a", "b"], p, fields=batch(x=torch.arange(10).reshape(2, 5)))
    return [first, second, tq.kv_batch_get(["a", "b"], p)]


@case
def v12_spans_of_versions(tq: Any, p: str) -> Any:
    tag = {"min_global_steps": 7, "max_global_steps": 9}
    tq.kv_put("u_0_0", p, fields={"response_mask": ints(1, 1)}, tag=tag)
    meta = tq.kv_put("u_0_0", p, fields={"extra_fields": {"max_global_steps": 9}})
    found = meta.tags[0]
    return [meta, 10 - found["min_global_steps"], tq.kv_batch_get("u_0_0", p)]


@case
def the_order_of_a_step(tq: Any, p: str) -> Any:
    """Submit, run, put, read, write back, clear: what a trainer sees on the way."""
    uids = ["u0", "u1"]
    tq.kv_batch_put(uids, p, tags=[{"is_prompt": True, "status": "pending", "global_steps": 1}] * 2)
    for uid in uids:
        tq.kv_put(uid, p, tag={"status": "running"})
        keys = [f"{uid}_{s}_0" for s in range(2)]
        rows = TensorDict(
            {"responses": jagged([1, 2], [3]), "response_mask": jagged([1, 1], [1]),
             "num_turns": objects(1, 2), "uid": objects(uid, uid)},
            batch_size=[2],
        )  # fmt: skip
        tq.kv_batch_put(
            keys, p, fields=rows, tags=[{"status": "success", "seq_len": n} for n in (2, 1)]
        )
        tq.kv_put(uid, p, tag={"status": "finished"})
    listing = tq.kv_list()[p]
    keys = [key for key, tag in listing.items() if not tag.get("is_prompt")]
    meta = tq.KVBatchMeta(keys=keys, tags=[listing[key] for key in keys], partition_id=p)
    read = tq.kv_batch_get_by_meta(meta)
    meta = tq.kv_batch_put(keys, p, fields=batch(old_log_probs=jagged([0, 0], [0], [0, 0], [0])))
    tq.kv_clear(list(tq.kv_list(p)[p]), p)
    return [listing, list(listing), read, meta, tq.kv_list(p)]
