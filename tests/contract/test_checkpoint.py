"""Checkpoints through real planes: what was saved comes back, and work goes on meanwhile."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import dataplane
from dataplane.checkpoint.verify import verify_checkpoint
from dataplane.client.effects import Ask, Run
from dataplane.client.loading import load
from dataplane.client.saving import save
from dataplane.codec.dtypes import DTYPE_NAME
from dataplane.errors import (
    CheckpointDamaged,
    ClaimLost,
    DeadlineExceeded,
    InvalidRequest,
    QuotaExceeded,
    StaleWrite,
)
from dataplane.types import Revision
from dataplane.wire.channel import Broken
from tests.conftest import KINDS
from tests.contract import planes
from tests.contract.planes import Plane, thread_plane
from tests.contract.test_dtypes import SHAPES, bits, filled
from tests.contract.test_scenarios import asks
from tests.deadline import eventually
from tests.repo.tree import ROOT

_numbers = itertools.count(1)

Start = Callable[..., Plane]


def started(
    stack: ExitStack, request: pytest.FixtureRequest, kind: str, settings: dict[str, Any]
) -> Plane:
    """A plane of its own of a kind, which ends with the stack."""
    name = f"checkpoint-{kind}-{os.getpid()}-{next(_numbers)}"
    return stack.enter_context(planes.hosted(kind, name, settings, request))


class Pair(NamedTuple):
    """A plane that is saved, and an empty one of the same kind that it is loaded into."""

    source: Plane
    target: Plane
    path: Path

    def save(self, **options: Any) -> dict[str, Any]:
        return self.source.client.save_checkpoint(self.path, **options)

    def load(self, **options: Any) -> dict[str, Any]:
        return self.target.client.load_checkpoint(self.path, **options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.ray if kind.startswith("ray") else ())
        for kind in KINDS
    ],
)
def both(
    request: pytest.FixtureRequest, plane_settings: dict[str, Any]
) -> Iterator[tuple[Plane, Plane]]:
    with ExitStack() as stack:
        kind = request.param
        yield (
            started(stack, request, kind, plane_settings),
            started(stack, request, kind, plane_settings),
        )


@pytest.fixture
def pair(both: tuple[Plane, Plane], tmp_path: Path) -> Iterator[Pair]:
    source, target = both
    yield Pair(source, target, tmp_path / "saved")
    for plane in both:
        for name in plane.witness.kv_list_partitions():
            plane.witness.kv_drop_partition(name)
        eventually(lambda: not plane.witness.status()["dead_blocks"], "dead blocks are freed")  # noqa: B023
        assert plane.used_bytes() == 0


def rows_of(client: Any, partition: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Tags and fields of every key; tensors as their dtype, shape and bits."""
    listing = client.kv_list(partition)
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for key, tags, names in zip(listing.keys, listing.tags, listing.fields, strict=True):
        fields: dict[str, Any] = {}
        if names:
            got = client.kv_batch_get([key], partition, list(names), layout="list")
            for name in names:
                value = got[name][0]
                if isinstance(value, torch.Tensor):
                    value = (value.dtype, tuple(value.shape), bits(value))
                fields[name] = value
        found[key] = (tags, fields)
    return found


# -- what comes back -------------------------------------------------------------------------


def test_ten_rows_saved_are_ten_rows_restored(pair: Pair) -> None:  # reverb#14
    """Elsewhere a restored server reports rows, and taking them hangs or ends early."""
    client = pair.source.client
    keys = [f"k{i}" for i in range(10)]
    tags = [{"i": i} for i in range(10)]
    client.kv_batch_put(keys, "p", {"x": [torch.arange(i) for i in range(10)]}, tags)
    summary = pair.save()
    assert summary["rows"] == 10
    assert summary["path"] == str(pair.path)
    assert summary["revision"] == pair.source.core.seen
    assert summary["bytes"] == sum(p.stat().st_size for p in pair.path.glob("[0-9]*"))
    assert summary["seconds"] > 0
    loaded = pair.load()
    assert loaded["rows"] == 10
    restored = pair.target.client
    assert restored.kv_list("p").keys == keys
    assert rows_of(restored, "p") == rows_of(client, "p")
    claim = restored.kv_claim("p", "train", count=10, fields=["x"], timeout=5.0)
    assert claim.keys == keys
    restored.kv_commit(claim)
    restored.kv_clear(claim.keys, "p")
    assert restored.status()["bytes_in_use"] == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_shape_comes_back_bit_for_bit(pair: Pair) -> None:
    for dtype, name in DTYPE_NAME.items():
        fields = {f"f{i}": filled(shape, dtype) for i, shape in enumerate(SHAPES[:-1])}
        pair.source.client.kv_put("k", name, fields)
        ragged = [filled((length, 2), dtype) for length in (3, 0, 5)]
        pair.source.client.kv_batch_put(["a", "b", "c"], name, {"ragged": ragged})
    pair.save()
    verify_checkpoint(pair.path)
    pair.load()
    for name in DTYPE_NAME.values():
        assert rows_of(pair.target.client, name) == rows_of(pair.source.client, name)


def test_layers_values_and_keys_of_all_kinds_come_back(pair: Pair) -> None:
    client = pair.source.client
    keys = ["plain", "a/b", "ü\N{SNOWMAN}", "x" * 200]
    client.kv_batch_put(keys, "p", {"x": torch.arange(8).view(4, 2), "y": torch.arange(4)})
    client.kv_batch_put(keys[:2], "p", {"y": torch.arange(2) + 7, "z": ["text", None]})
    client.kv_put(keys[0], "p", {"o": {"t": (1, 2), "b": b"\0", "n": 1 << 70}})
    client.kv_put("large", "p", {"x": torch.arange(100_000)})
    client.kv_put("tags only", "p", tags={"a": None})
    client.kv_clear([keys[3]], "p")
    pair.save()
    pair.load()
    assert rows_of(pair.target.client, "p") == rows_of(client, "p")
    schema = [plane.client.kv_list_partitions()["p"]["schema"] for plane in pair[:2]]
    assert schema[0] == schema[1]


def test_tags_come_back_bit_for_bit(pair: Pair) -> None:
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    tags = [
        {"i": 1, "f": -0.0, "b": True, "s": "", "mixed": 1, "none": None},
        {"i": -(1 << 63), "f": float("inf"), "b": False, "s": "null", "mixed": 1.0},
        {"i": (1 << 63) - 1, "f": nan, "mixed": True, "big": (1 << 64) - 1},
        {"f": 5e-324, "mixed": "1", "deep": {"a": [1, 1.0, {"$float": [nan, None]}], "": {}}},
        {"mixed": [], "key": "k", "revision": 1.5, "attempt": [1]},
        {},
    ]
    keys = [f"k{i}" for i in range(len(tags))]
    pair.source.client.kv_batch_put(keys, "p", None, tags)
    pair.save()
    pair.load()
    for key, before in zip(keys, tags, strict=True):
        (after,) = pair.target.client.kv_list("p", where={}).tags[keys.index(key) :][:1]
        assert packed(after) == packed(before)


def packed(tags: dict[str, Any]) -> list[Any]:
    """Tags so that any two different values differ, NaNs and zeros too."""

    def exact(value: Any) -> Any:
        if isinstance(value, float):
            return ("f", struct.pack(">d", value))
        if isinstance(value, list):
            return [exact(item) for item in value]
        if isinstance(value, dict):
            return {name: exact(item) for name, item in value.items()}
        return (type(value).__name__, value)

    return sorted((name, repr(exact(value))) for name, value in tags.items())


def test_a_task_that_committed_6_of_10_gets_exactly_the_other_4(pair: Pair) -> None:
    client = pair.source.client
    keys = [f"k{i}" for i in range(10)]
    for key in keys:
        client.kv_put(key, "p", {"x": torch.zeros(2)}, {"done": True})
    client.kv_seal_partition("p")
    first = client.kv_claim("p", "train", count=6, fields=["x"], where={"done": True})
    client.kv_commit(first)
    other = client.kv_claim("p", "log", count=3)
    client.kv_release(other)
    pair.save()
    pair.load()
    restored = pair.target.client
    second = restored.kv_claim("p", "train", count=4, fields=["x"], where={"done": True}, timeout=5)
    assert second.keys == keys[6:]
    assert second.deliveries == [1] * 4
    restored.kv_commit(second)
    assert restored.kv_claim("p", "train", count=1, fields=["x"], timeout=5).end
    again = restored.kv_claim("p", "log", count=10, timeout=5)
    assert again.keys == keys
    assert again.deliveries == [2] * 3 + [1] * 7


def test_an_open_claim_is_one_of_a_client_that_is_away(pair: Pair) -> None:
    client = pair.source.client
    keys = [f"k{i}" for i in range(6)]
    client.kv_batch_put(keys, "p", {"x": torch.zeros(6, 2)})
    kept = client.kv_claim("p", "train", count=2, lease_s=600.0)
    lost = client.kv_claim("p", "train", count=2, lease_s=0.2)
    pair.save()
    pair.load()
    restored = pair.target.client
    claim = restored.kv_claim("p", "train", count=4, timeout=10.0)
    assert sorted(claim.keys) == keys[2:]  # what nobody held, and what came back
    assert sorted(claim.deliveries) == [1, 1, 2, 2]
    with pytest.raises(ClaimLost):
        restored.kv_commit(lost)
    restored.kv_commit(kept)  # it goes on where it was
    restored.kv_commit(claim)
    restored.kv_put("late", "p", {"x": torch.zeros(2)})
    last = restored.kv_claim("p", "train", count=1, timeout=5.0)
    assert last.keys == ["late"]
    assert last.claim_id > max(kept.claim_id, lost.claim_id, claim.claim_id)


def _holds(plane: Plane) -> int:
    return sum(store["holds"] for store in plane.client.status()["values"].values())


def test_an_open_attempt_goes_on_and_a_closed_one_stays_closed(pair: Pair) -> None:
    client = pair.source.client
    client.kv_create_partition("p", quota={"bytes": 1 << 20, "rows": 10, "group_bytes": 10_000})
    opened = client.begin_group("u1", "p", n=3, declared_bytes=100_000)
    client.kv_put("u1_0", "p", {"x": torch.arange(3)}, {"uid": "u1"}, attempt=opened)
    closed = client.begin_group("u2", "p", n=1)
    client.kv_put("u2_0", "p", {"x": torch.arange(3)}, {"uid": "u2"}, attempt=closed)
    client.end_group(closed, "finished")
    retired = client.begin_group("u3", "p", n=1)
    client.kv_clear(["u3"], "p", retire=True)
    pair.save()
    pair.load()
    restored = pair.target.client
    held = [plane.client.kv_list_partitions()["p"]["held_bytes"] for plane in pair[:2]]
    assert held[1] >= held[0] > 90_000  # rows of one block shared its page
    eventually(lambda: _holds(pair.target) == 1, "a value store keeps room for the open group")
    restored.kv_put("u1_1", "p", {"x": torch.arange(2)}, {"uid": "u1"}, attempt=opened)
    for late in (closed, retired):
        with pytest.raises(StaleWrite) as refused:
            restored.kv_put("late", "p", {"x": torch.arange(2)}, attempt=late)
        assert refused.value.attempt == late
    whole = restored.kv_wait("p", {"uid": {"exists": True}, "is_prompt": {"exists": False}},
                             count=1, group_by="uid", timeout=5.0)  # fmt: skip
    assert whole.keys == ["u2_0"]
    restored.end_group(opened, "finished")
    both = restored.kv_wait("p", {"is_prompt": {"exists": False}}, count=2, group_by="uid",
                            timeout=5.0)  # fmt: skip
    assert sorted(both.keys) == ["u1_0", "u1_1", "u2_0"]
    # A new attempt is later than all there were, and takes the place of the old one.
    assert restored.begin_group("u1", "p", n=1) > max(opened, closed, retired)
    assert sorted(restored.kv_list("p").keys) == ["u1", "u2", "u2_0"]


def test_settings_of_partitions_come_back(pair: Pair) -> None:
    client = pair.source.client
    client.kv_create_partition("quota", quota={"rows": 2})
    client.kv_batch_put(["a", "b"], "quota", {"x": torch.zeros(2, 1)})
    client.kv_create_partition("weights", retention={"versions": 1})
    client.kv_put("w", "weights@1", {"x": torch.zeros(1)})
    client.kv_seal_partition("weights@1")
    client.kv_create_partition("empty", schema={"x": ("int8", 1, 0)})
    before = client.kv_list_partitions()
    pair.save()
    pair.load()
    restored = pair.target.client
    after = restored.kv_list_partitions()
    for about in (*before.values(), *after.values()):
        about.pop("revision")
        about.pop("used_bytes")  # blocks are others
    assert after == before
    with pytest.raises(QuotaExceeded):
        restored.kv_put("c", "quota", {"x": torch.zeros(1)}, timeout=1.0)
    with pytest.raises(InvalidRequest, match="sealed"):
        restored.kv_put("new", "weights@1", {"x": torch.zeros(1)})
    restored.kv_put("w", "weights@2", {"x": torch.zeros(1)})
    restored.kv_seal_partition("weights@2")
    assert "weights@1" not in restored.kv_list_partitions()


def test_rows_of_an_open_schema_keep_the_dtype_of_each(pair: Pair) -> None:
    client = pair.source.client
    client.kv_create_partition("p", schema="open")
    client.kv_put("a", "p", {"x": torch.arange(3, dtype=torch.int8)})
    client.kv_put("b", "p", {"x": torch.zeros(2, 2)})
    client.kv_put("c", "p", {"x": torch.arange(3, dtype=torch.int8)})
    pair.save()
    assert verify_checkpoint(pair.path)["rows"] == 3
    pair.load()
    assert pair.target.client.kv_list_partitions()["p"]["open_schema"]
    pair.target.client.kv_batch_get(["b"], "p", layout="list")
    pair.target.client.kv_put("d", "p", {"x": torch.zeros(1, dtype=torch.int64)})


def test_what_is_older_than_the_checkpoint_is_told_so(pair: Pair) -> None:
    client = pair.source.client
    client.kv_put("a", "p", tags={"v": 1})
    old = client.kv_list("p").revision
    client.kv_put("b", "p", tags={"v": 2})
    pair.save()
    saved = pair.source.core.seen
    revision = pair.load()["revision"]
    restored = pair.target.client
    assert revision == pair.target.core.seen
    assert revision.epoch == saved.epoch + 1
    assert revision.n > saved.n
    for since in (old, saved, Revision(saved.epoch + 1, saved.n - 1)):
        listing = restored.kv_list("p", since=since)
        assert listing.full
        assert sorted(listing.keys) == ["a", "b"]
    now = restored.kv_list("p").revision
    restored.kv_put("c", "p", tags={"v": 3})
    listing = restored.kv_list("p", since=now)
    assert (listing.full, listing.keys) == (False, ["c"])


@pytest.mark.ray
@pytest.mark.parametrize(("before", "after"), [("embedded-sync", "ray-remote"), ("ray-remote", "embedded-async")])  # fmt: skip  # noqa: E501
def test_rows_are_spread_over_as_many_value_stores_as_there_are(
    request: pytest.FixtureRequest,
    plane_settings: dict[str, Any],
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    with ExitStack() as stack:
        source = started(stack, request, before, plane_settings)
        target = started(stack, request, after, plane_settings)
        for i in range(40):
            source.client.kv_batch_put(
                [f"k{i}-{j}" for j in range(2)], "p", {"x": torch.full((2, 40_000), i)}
            )
        source.client.save_checkpoint(tmp_path / "saved")
        target.client.load_checkpoint(tmp_path / "saved")
        values = target.client.status()["values"]
        used = sorted(store["used_bytes"] for store in values.values())
        assert len(used) == (2 if after == "ray-remote" else 1)
        assert sum(used) >= 40 * 2 * 40_000 * 8
        assert used[0] > 0.4 * sum(used) or len(used) == 1
        listing = target.client.kv_list("p")
        got = target.client.kv_batch_get(listing.keys, "p", layout="list")["x"]
        for key, row in zip(listing.keys, got, strict=True):
            assert row.unique().tolist() == [int(key[1:].partition("-")[0])]


# -- work goes on ----------------------------------------------------------------------------


def saving(plane: Plane, path: Path, **options: Any) -> Any:
    return save(plane.core, path, options.get("overwrite", False), plane.deadline())


def test_a_clear_while_it_is_saved_is_in_it_wholly_or_not_at_all(pair: Pair) -> None:
    """A clear in the background, in the middle of every step of a save."""  # NeMo#3837
    client, witness = pair.source.client, pair.source.witness
    seen: set[int] = set()
    for step in range(6):
        keys = [f"k{step}-{i}" for i in range(30)]
        client.kv_batch_put(keys, "p", {"x": torch.zeros(30, 100)}, [{"s": step}] * 30)
        count = itertools.count()

        def before(effect: Any) -> None:
            if next(count) == step:  # noqa: B023
                assert witness.kv_clear(None, "p", where={"s": step}) == 30  # noqa: B023

        path = pair.path.with_name(f"saved-{step}")
        pair.source.step(saving(pair.source, path), before=before)
        assert client.kv_list("p").keys == []
        pair.target.client.load_checkpoint(path)
        found = pair.target.client.kv_list("p").keys
        assert found in ([], keys)
        seen.add(len(found))
        if found:
            rows_of(pair.target.client, "p")
        for name in pair.target.client.kv_list_partitions():
            pair.target.client.kv_drop_partition(name)
    assert seen == {0, 30}


def test_clears_within_a_save_neither_hang_nor_fail_and_bytes_come_back_after_it(
    pair: Pair,
) -> None:  # NeMo#3925
    client, witness = pair.source.client, pair.source.witness
    keys = [f"k{i}" for i in range(50)]
    client.kv_batch_put(keys, "p", {"x": torch.zeros(50, 1000)})
    client.kv_put("kept", "p", {"x": torch.zeros(10)})
    left = iter(keys)
    during: list[int] = []

    def before(effect: Any) -> None:
        key = next(left, None)
        if asks(effect, "checkpoint_rows"):
            witness.kv_clear(keys, "p")
            values = witness.status()["values"].values()
            during.append(sum(store["used_bytes"] for store in values))
        elif key is not None:
            witness.kv_clear([key], "p")
            witness.kv_put("kept", "p", tags={"at": key})

    pair.source.step(saving(pair.source, pair.path), before=before)
    assert min(during) >= 50 * 1000 * 4  # nothing that is being saved was freed
    pair.source.settle()
    assert pair.source.used_bytes() == 4096
    pair.load()
    found = pair.target.client.kv_list("p").keys
    assert "kept" in found
    assert len(found) > 40
    assert set(rows_of(pair.target.client, "p")) == set(found)


def test_writes_overwrites_and_claims_go_on_and_are_not_in_it(pair: Pair) -> None:
    client, witness = pair.source.client, pair.source.witness
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 50_000)}, [{"v": 1}] * 2)
    moment = rows_of(client, "p")
    numbers = itertools.count()

    def before(effect: Any) -> None:
        if asks(effect, "checkpoint_rows", "pin", "read"):
            i = next(numbers)
            witness.kv_put("a", "p", {"x": torch.full((50_000,), i / 1)}, {"v": 2 + i})
            witness.kv_put(f"new{i}", "p", {"x": torch.zeros(50_000)})
            witness.kv_put(f"elsewhere{i}", "made later", {"x": torch.zeros(2)})
            witness.kv_commit(witness.kv_claim("p", "train", count=1))

    summary = pair.source.step(saving(pair.source, pair.path), before=before)
    assert next(numbers) > 2
    assert summary["revision"].n < client.kv_list("p").revision.n
    pair.load()
    assert list(pair.target.client.kv_list_partitions()) == ["p"]
    assert rows_of(pair.target.client, "p") == moment
    claim = pair.target.client.kv_claim("p", "train", count=2, timeout=5.0)
    assert claim.deliveries == [1, 1]


def test_a_partition_that_is_dropped_while_it_is_saved_is_in_it(pair: Pair) -> None:
    client, witness = pair.source.client, pair.source.witness
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 50_000)}, [{"v": 1}] * 2)
    moment = rows_of(client, "p")

    def before(effect: Any) -> None:
        if asks(effect, "checkpoint_state"):
            witness.kv_drop_partition("p")
            witness.kv_put("c", "p", {"x": torch.zeros(70_000)})

    pair.source.step(saving(pair.source, pair.path), before=before)
    assert client.kv_list("p").keys == ["c"]
    pair.load()
    assert rows_of(pair.target.client, "p") == moment


def test_nobody_sees_a_load_before_it_is_whole(pair: Pair) -> None:
    client = pair.source.client
    for i in range(5):
        client.kv_batch_put([f"k{i}-{j}" for j in range(10)], "p", {"x": torch.zeros(10, 60_000)})
    pair.save()
    witness = pair.target.witness
    seen: list[int] = []
    waiting = dataplane.connect(pair.target.name, config=pair.target.settings)
    woken: list[Any] = []

    def wait() -> None:
        woken.append(waiting.kv_wait("p", count=1, timeout=30.0))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: witness.status()["waiting"]["partitions"] == 1, "somebody waits for it")

    def before(effect: Any) -> None:
        seen.append(len(witness.kv_list_partitions()))

    verb = load(pair.target.core, pair.path, pair.target.deadline())
    pair.target.step(verb, before=before)
    thread.join(30.0)
    waiting.close()
    assert set(seen) == {0}
    assert len(seen) > 10
    assert len(witness.kv_list("p")) == 50
    assert len(woken[0].keys) == 50


# -- what fails ------------------------------------------------------------------------------


def test_a_plane_with_partitions_takes_no_checkpoint(pair: Pair) -> None:
    pair.source.client.kv_put("a", "p", tags={})
    pair.save()
    pair.target.client.kv_create_partition("there")
    with pytest.raises(InvalidRequest, match="'there'"):
        pair.load()
    assert list(pair.target.client.kv_list_partitions()) == ["there"]


def test_a_partition_made_during_a_load_stays_and_the_load_fails(pair: Pair) -> None:
    pair.source.client.kv_put("a", "p", {"x": torch.zeros(1000)})
    pair.save()

    def before(effect: Any) -> None:
        if asks(effect, "restore_end"):
            pair.target.witness.kv_put("b", "other", {"x": torch.zeros(1)})

    with pytest.raises(InvalidRequest, match=r"'other'.*nothing was loaded"):
        pair.target.step(load(pair.target.core, pair.path, pair.target.deadline()), before=before)
    assert list(pair.target.client.kv_list_partitions()) == ["other"]
    pair.target.settle()
    assert pair.target.used_bytes() == 4096


@pytest.mark.parametrize("name", ["0-tags.parquet", "0-values-0.arrow", "manifest.json"])
def test_a_damaged_checkpoint_is_never_served(pair: Pair, name: str) -> None:
    pair.source.client.kv_put("a", "p", {"x": torch.zeros(10)}, {"v": 1})
    pair.save()
    file = pair.path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    for use in (pair.load, lambda: verify_checkpoint(pair.path)):
        with pytest.raises(CheckpointDamaged) as damaged:
            use()
        assert damaged.value.file == name
        assert damaged.value.path == str(pair.path)
    assert pair.target.client.kv_list_partitions() == {}


def test_a_checkpoint_is_refused_where_one_is_unless_it_is_to_be_replaced(pair: Pair) -> None:
    client = pair.source.client
    client.kv_put("a", "p", tags={"v": 1})
    pair.save()
    client.kv_put("a", "p", tags={"v": 2})
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        pair.save()
    pair.save(overwrite=True)
    pair.load()
    assert pair.target.client.kv_list("p").tags == [{"v": 2}]
    assert os.listdir(pair.path.parent) == ["saved"]


def test_a_save_and_a_load_out_of_time_leave_nothing(pair: Pair) -> None:
    pair.source.client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 300_000)})
    with pytest.raises(DeadlineExceeded):
        pair.save(timeout=0.0001)
    assert os.listdir(pair.path.parent) == []
    pair.save()
    with pytest.raises(DeadlineExceeded):
        pair.load(timeout=0.002)
    eventually(lambda: pair.target.used_bytes() == 0, "what had come is freed")
    assert pair.target.client.kv_list_partitions() == {}
    pair.load()
    assert len(pair.target.client.kv_list("p")) == 2


def breaks(verb: str, broken: list[str]) -> Callable[..., None]:
    """Breaks the connection of the first request of this name, which is noted then."""

    def cut(effect: Any, _: Any = None) -> None:
        if asks(effect, verb) and not broken:
            broken.append(verb)
            if hasattr(effect.at, "close"):
                effect.at.close()  # what the server held for it ends with it
            raise Broken("cut by the test")

    return cut


class Interrupted(BaseException):
    """As Ctrl-C, or the cancellation of a task."""


def interrupting(at: int) -> Callable[[Any], None]:
    """Interrupts a verb at its n-th request or piece of work; its last words it may say."""
    count = itertools.count()

    def before(effect: Any) -> None:
        if type(effect) not in (Ask, Run) or asks(effect, "checkpoint_close", "restore_abort"):
            return
        if next(count) == at:
            if type(effect) is Ask and hasattr(effect.at, "close"):
                effect.at.close()  # who is interrupted in a call does not use its connection again
            raise Interrupted

    return before


def test_a_save_that_is_interrupted_anywhere_leaves_nothing(pair: Pair) -> None:
    client = pair.source.client
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 1000)})
    client.kv_put("other", "q", {"x": torch.zeros(1)})
    for at in itertools.count():
        try:
            pair.source.step(saving(pair.source, pair.path), before=interrupting(at))
        except Interrupted:
            if pair.path.exists():
                break  # it was in its place already
            assert os.listdir(pair.path.parent) == []
            client.kv_clear(["other"], "q")
            pair.source.settle()  # no checkpoint is open that would keep it
            client.kv_put("other", "q", {"x": torch.zeros(1)})
        else:
            break
    assert at > 10
    assert verify_checkpoint(pair.path)["rows"] == 3


def test_a_load_that_is_interrupted_anywhere_leaves_the_plane_empty(pair: Pair) -> None:
    client = pair.source.client
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 1000)})
    client.kv_put("other", "q", {"x": torch.zeros(1)})
    pair.save()
    for at in itertools.count():
        verb = load(pair.target.core, pair.path, pair.target.deadline())
        try:
            pair.target.step(verb, before=interrupting(at))
        except Interrupted:
            assert pair.target.client.kv_list_partitions() == {}
            eventually(lambda: not pair.target.used_bytes(), "what had come is freed")
        else:
            break
    assert at > 10
    assert rows_of(pair.target.client, "p") == rows_of(client, "p")


@pytest.mark.parametrize("verb", ["checkpoint_open", "checkpoint_state", "checkpoint_rows", "pin",
                                  "read", "checkpoint_close"])  # fmt: skip
def test_a_connection_that_breaks_in_a_save_is_no_matter(pair: Pair, verb: str) -> None:
    client = pair.source.client
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 1000)})
    broken: list[str] = []
    pair.source.step(saving(pair.source, pair.path), after=breaks(verb, broken))
    if not broken:
        pytest.skip(f"this kind of plane does not ask {verb!r}")
    pair.load()
    assert rows_of(pair.target.client, "p") == rows_of(client, "p")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "verb",
    "restore_begin restore_partition restore_rows reserve commit put_block restore_state "
    "restore_end".split(),
)
def test_a_connection_that_breaks_in_a_load_is_no_matter(pair: Pair, verb: str, when: str) -> None:
    client = pair.source.client
    attempt = client.begin_group("u", "p", n=2)
    client.kv_put("u_0", "p", {"x": torch.zeros(1000)}, attempt=attempt)
    client.kv_commit(client.kv_claim("p", "train", count=1))
    client.kv_claim("p", "train", count=1)
    pair.save()
    broken: list[str] = []
    hooks: dict[str, Any] = {when: breaks(verb, broken)}
    pair.target.step(load(pair.target.core, pair.path, pair.target.deadline()), **hooks)
    if not broken:
        pytest.skip(f"this kind of plane does not ask {verb!r}")
    restored = pair.target.client
    assert rows_of(restored, "p") == rows_of(client, "p")
    status = restored.status()
    assert status["bytes_in_use"] == 4000
    pair.target.settle()
    assert pair.target.used_bytes() == 4096


def test_a_load_in_place_of_rows_replaces_them_at_one_revision(pair: Pair) -> None:
    client, target = pair.source.client, pair.target.client
    client.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2, 1000)}, [{"v": 1}, {"v": 2}])
    client.kv_put("of the source", "own", tags={"source": True})
    pair.save()
    target.kv_batch_put(["b", "c"], "p", {"x": torch.zeros(2, 1000)}, [{"old": 1}] * 2)
    target.kv_put("d", "q", {"x": torch.zeros(1000)})
    target.kv_put("of the target", "own", {"x": torch.arange(3)})
    own, before = rows_of(target, "own"), target.kv_list("p")
    states: list[dict[str, Any]] = []

    def look(effect: Any) -> None:
        states.append(pair.target.witness.kv_list_partitions())

    verb = load(pair.target.core, pair.path, pair.target.deadline(), stay=["own"])
    pair.target.step(verb, before=look)
    assert {frozenset(state) for state in states} == {frozenset({"p", "q", "own"})}
    assert set(target.kv_list_partitions()) == {"p", "own"}
    assert rows_of(target, "p") == rows_of(client, "p")
    assert rows_of(target, "own") == own
    since = target.kv_list("p", since=before.revision)
    assert since.full
    assert since.keys == ["a", "b"]
    target.kv_put("e", "own", tags={"works": True})
    pair.target.settle()
    assert pair.target.used_bytes() == 3 * 4096


def test_a_load_in_place_of_rows_that_fails_changes_nothing(pair: Pair) -> None:
    client, target = pair.source.client, pair.target.client
    client.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2, 1000)})
    pair.save()
    target.kv_batch_put(["b", "c"], "p", {"x": torch.zeros(2, 1000)})
    before = rows_of(target, "p")
    for at in itertools.count():
        verb = load(pair.target.core, pair.path, pair.target.deadline(), stay=[])
        try:
            pair.target.step(verb, before=interrupting(at))
        except Interrupted:
            assert rows_of(target, "p") == before
        else:
            break
    assert at > 10
    assert rows_of(target, "p") == rows_of(client, "p")


def test_a_load_into_too_little_memory_fails_and_leaves_the_plane_empty(
    request: pytest.FixtureRequest, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        source = started(stack, request, "embedded-sync", plane_settings)
        small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
        target = started(stack, request, "embedded-sync", small)
        for i in range(8):
            source.client.kv_put(f"k{i}", "p", {"x": torch.zeros(250_000)})
        source.client.save_checkpoint(tmp_path / "saved")
        with pytest.raises(QuotaExceeded, match="nothing was loaded"):
            target.client.load_checkpoint(tmp_path / "saved", timeout=2.0)
        assert target.client.kv_list_partitions() == {}
        target.settle()
        assert target.used_bytes() == 0
        target.client.kv_put("a", "p", {"x": torch.zeros(10)})


# -- clients that are gone -------------------------------------------------------------------


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataplane.server import checkpointing

    monkeypatch.setattr(checkpointing, "GONE_S", 0.05)


@pytest.mark.usefixtures("short_patience")
def test_a_save_whose_client_dies_holds_no_bytes(
    plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        client.kv_put("a", "p", {"x": torch.zeros(1000)})
        saver = plane.connect()
        verb = save(saver._core, tmp_path / "saved", False, saver._deadline(None))
        _until(saver, verb, "checkpoint_rows")
        client.kv_clear(["a"], "p")
        assert client.status()["dead_blocks"] == 1
        assert client.status()["values"]["local"]["used_bytes"] == 4096
        saver.close()
        eventually(lambda: not client.status()["dead_blocks"], "the dead block is freed")
        assert client.status()["values"]["local"]["used_bytes"] == 0
        _forsake(verb)


@pytest.mark.usefixtures("short_patience")
def test_a_load_whose_client_dies_leaves_the_plane_empty(
    plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        client.kv_put("a", "p", {"x": torch.zeros(1000)})
        client.save_checkpoint(tmp_path / "saved")
        client.kv_drop_partition("p")
        loader = plane.connect()
        verb = load(loader._core, tmp_path / "saved", loader._deadline(None))
        _until(loader, verb, "restore_state")
        assert client.status()["values"]["local"]["used_bytes"] == 4096
        with pytest.raises(InvalidRequest, match="another client is loading"):
            client.load_checkpoint(tmp_path / "saved")
        loader.close()
        eventually(
            lambda: client.status()["values"]["local"]["used_bytes"] == 0, "the block is freed"
        )
        assert client.kv_list_partitions() == {}
        client.load_checkpoint(tmp_path / "saved")
        assert client.kv_list("p").keys == ["a"]
        _forsake(verb)


def _until(client: Any, verb: Any, name: str) -> None:
    """Drive a verb up to the first request of this name, which is not made any more."""

    def steps() -> Iterator[Any]:
        effect = verb.send(None)
        while not asks(effect, name):
            effect = verb.send((yield effect))

    client._drive(steps(), client._deadline(None))


def _forsake(verb: Any) -> None:
    """End a verb of a client that is closed: nothing that it asks for is done any more."""
    gone = dataplane.PlaneLost("the client is closed")
    with pytest.raises(dataplane.PlaneLost):
        effect = verb.throw(gone)
        while True:
            effect = verb.send(effect.work()) if type(effect) is Run else verb.throw(gone)


def test_a_save_without_a_plane_is_refused_before_anything_is_written(
    plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    with thread_plane(plane_settings) as plane:
        client = plane.connect()
        client.close()
        with pytest.raises(dataplane.PlaneLost):
            client.save_checkpoint(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_the_documented_lines_of_plain_pyarrow_read_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    weights = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    pair.source.client.kv_put("a", "p", {"w": weights, "x": torch.arange(3)}, {"v": 1, "n": None})
    pair.save()
    script = pair.path.with_name("read.py")
    script.write_text(code)
    monkeypatch.setattr(sys, "argv", ["read.py", str(pair.path)])
    read = runpy.run_path(str(script))
    assert read["tags"]["key"].to_pylist() == ["a"]
    assert read["tags"]["tag.v"].to_pylist() == [1]
    assert read["tags"]["tag.n"].to_pylist() == ["null"]
    assert read["values"]["x"].to_pylist() == [[0, 1, 2]]
    assert read["values"]["w.shape"].to_pylist() == [[1, 2]]
    row = torch.tensor(read["values"]["w"][0].as_py(), dtype=torch.uint16).view(torch.bfloat16)
    assert torch.equal(row.view(1, 2), weights)
