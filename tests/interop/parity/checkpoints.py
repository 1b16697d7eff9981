"""Cases of checkpoints: what a load brings back, and what lies in the folder.

They run first, and the last of them last: the peer loads no checkpoint once it holds such rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.interop.parity.batches import batch, ints, jagged, objects
from tests.interop.parity.cases import category, raised, says

case = category("checkpoints", live=True)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "checkpoint")


def _put(tq: Any, p: str) -> Any:
    rows = batch(n=ints(1, 2, 3), v=jagged([1], [], [3, 3]), s=objects("a", {"b": 1}, None))
    return tq.kv_batch_put(["a", "b", "c"], p, fields=rows, tags=[{"i": i} for i in range(3)])


def _held(tq: Any, p: str) -> Any:
    listing = tq.kv_list(p)
    keys = list(listing.get(p, ()))
    return [listing, keys, tq.kv_batch_get(keys, p) if keys else None]


@case
def what_was_cleared_comes_back(tq: Any, p: str) -> Any:
    _put(tq, p)
    with _folder() as folder:
        said = [tq.save_checkpoint(folder)]
        tq.kv_clear(["a", "c"], p)
        said += [_held(tq, p), tq.load_checkpoint(folder)]
    return [*said, _held(tq, p)]


@case
def what_was_overwritten_comes_back(tq: Any, p: str) -> Any:
    _put(tq, p)
    with _folder() as folder:
        tq.save_checkpoint(str(folder))
        tq.kv_batch_put(["b"], p, fields=batch(n=torch.ones(1, 2)), tags=[{"i": 9, "new": True}])
        tq.load_checkpoint(str(folder))
    return _held(tq, p)


@case
def what_was_put_later_is_gone(tq: Any, p: str) -> Any:
    _put(tq, p)
    with _folder() as folder:
        tq.save_checkpoint(folder)
        tq.kv_put("later", p, fields={"n": torch.tensor(4)}, tag={"late": True})
        tq.load_checkpoint(folder)
    return _held(tq, p)


@case
def consumption_comes_back(tq: Any, p: str) -> Any:
    client = tq.get_client()
    _put(tq, p)
    client.get_meta(["n"], 2, p, task_name="train")
    with _folder() as folder:
        tq.save_checkpoint(folder)
        client.get_meta(["n"], 1, p, task_name="train")
        before = client.check_consumption_status("train", p)
        tq.load_checkpoint(folder)
    after = client.check_consumption_status("train", p)
    again = client.get_meta(["n"], 1, p, task_name="train")
    return [before, after, client.get_data(again), again.custom_meta]


@case
def the_caller_metadata(tq: Any, p: str) -> Any:
    _put(tq, p)
    with _folder() as folder:
        tq.save_checkpoint(folder, metadata={"step": 3, "names": ["x"]})
        first = json.loads((folder / "metadata.json").read_text())
        tq.save_checkpoint(folder, include_storage=False)
        second = json.loads((folder / "metadata.json").read_text())
    return [
        {name: file[name] for name in ("storage_saved", "user_metadata")}
        for file in (first, second)
    ]


@case
def a_folder_that_is_none(tq: Any, p: str) -> Any:
    _put(tq, p)
    with _folder() as folder:
        missing = says(lambda: tq.load_checkpoint(folder))
        folder.mkdir()
        empty = says(lambda: tq.load_checkpoint(folder), "metadata.json")
    return [missing, empty, _held(tq, p)]


@case
def rows_of_eight_bit_floats_come_back(tq: Any, p: str) -> Any:
    def save_and_load() -> Any:
        tq.kv_batch_put(["a"], p, fields=batch(x=torch.ones(1, 2).to(torch.float8_e4m3fn)))
        with _folder() as folder:
            tq.save_checkpoint(folder)
            tq.load_checkpoint(folder)
        return _held(tq, p)

    return raised(save_and_load)
