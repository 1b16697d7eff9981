"""Traces of live planes: the life of a group from its submission to its clear, and after."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client, InvalidRequest, StaleWrite, Trace
from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.retry import ask_again
from dataplane.lineage.rows import TraceRow
from tests.contract.planes import SETTINGS
from tests.dataplane.lineage.story import key_of, tags_of
from tests.deadline import eventually

TRAIN = "train"
PADDING = {"uid": "pad9", "session_id": 0, "index": 0, "is_padding": True, "policy_len": 0}


@pytest.fixture(scope="module")
def here(roots: dict[str, Path]) -> dict[str, Any]:
    return {**SETTINGS, **roots, "host": "embedded"}


@pytest.fixture
def plane(here: dict[str, Any]) -> Iterator[Client]:
    client = dataplane.init({**here, "label": "agentloop"}, name="traced")
    yield client
    client.close(destroy=True)


@pytest.fixture
def trainer(plane: Client, here: dict[str, Any]) -> Iterator[Client]:
    with dataplane.connect("traced", config={**here, "label": "actor dp1"}) as client:
        yield client


def tokens(size: int = 23) -> dict[str, torch.Tensor]:
    ids = torch.arange(size)
    return {"input_ids": ids, "labels": ids.clone(), "logprobs": torch.zeros(size)}


def produce(client: Client, uid: str = "7c1e") -> list[str]:
    """A group of two, and the keys of its trajectories."""
    submitted = {"is_prompt": True, "status": "pending", "uid": uid, "global_steps": 12, "n": 2}
    client.kv_put(uid, TRAIN, tags=submitted)
    attempt = client.begin_group(uid, TRAIN, n=2)
    keys = [f"{uid}_{session}_0" for session in range(2)]
    for session, key in enumerate(keys):
        client.kv_put(key, TRAIN, tokens(), tags_of(session, uid=uid), attempt=attempt)
    client.end_group(attempt, "finished")
    return keys


def train(client: Client, keys: list[str]) -> None:
    """A step on these rows: claimed, read, written back, committed."""
    mine = {"session_id": {"exists": True}, "is_padding": {"exists": False}}
    claim = client.kv_claim(TRAIN, "train", count=2, where=mine)
    with client.stage("update_actor"):
        client.kv_batch_get(keys, TRAIN, ["input_ids", "labels"])
        column = [torch.zeros(23)] * 2
        client.kv_batch_put(keys[:2], TRAIN, {"old_logprobs": column}, must_exist=True)
    client.kv_commit(claim)


def of(trace: Trace, **columns: Any) -> list[TraceRow]:
    return [
        row for row in trace.rows
        if all(getattr(row, name) == value for name, value in columns.items())
    ]  # fmt: skip


def test_the_whole_life_of_a_group(plane: Client, trainer: Client) -> None:
    keys = produce(plane)
    plane.kv_put("pad9_0_0", TRAIN, tokens(128), PADDING)
    train(trainer, [*keys, "pad9_0_0"])
    listing = plane.kv_list(TRAIN, where={"uid": "7c1e", "session_id": {"exists": True}})
    before = plane.trace(uid="7c1e")
    for field in ("input_ids", "labels", "logprobs", "old_logprobs"):
        written = [
            row for key in listing.keys for row in of(before, key=key, op="put", field=field)
        ]
        assert [row.len for row in written] == list(listing.lengths(field))
        assert [row.mask_sum for row in written] == [tags["policy_len"] for tags in listing.tags]
    with trainer.stage("clear"):
        trainer.kv_clear([*keys, "pad9_0_0", "7c1e"], TRAIN, retire=True)
    with pytest.raises(StaleWrite):
        plane.kv_put(keys[0], TRAIN, tokens(), attempt=of(before, op="begin")[0].n)

    trace = plane.trace(uid="7c1e")
    assert [(row.stage, row.op) for row in of(trace, key=keys[0]) if row.field != "*tags*"] == [
        ("rollout", "put"), ("rollout", "put"), ("rollout", "put"), ("sample", "claim"),
        ("update_actor", "get"), ("update_actor", "get"), ("old_log_prob", "put"),
        ("clear", "commit"), ("clear", "clear"), ("", "refuse"),
    ]  # fmt: skip
    (late,) = of(trace, op="refuse")
    assert (late.status, late.producer, late.session_id) == ("StaleWrite", "agentloop", 0)
    (read,) = of(trace, key=keys[1], op="get", field="labels")
    assert (read.producer, read.consumer, read.len) == ("agentloop", "actor dp1", 23)
    padding = of(trace, key="pad9_0_0")
    assert {row.is_padding for row in padding} == {True}
    assert {row.mask_sum for row in padding} == {0}
    assert not of(trace, key="pad9_0_0", stage="metrics")
    assert (trace.status, trace.sessions, trace.partition_id) == ("finished", (2, 2), TRAIN)
    assert trace.never_read == ["logprobs", "old_logprobs"]
    assert (trace.present, trace.open_keys, trace.failed, trace.gone) == ([], [], [], 0)
    assert [row.n for row in trace.rows] == sorted(row.n for row in trace.rows)


def test_of_a_batch_only_the_rows_of_the_group_are_told(plane: Client) -> None:
    names = [f"row{i}" for i in range(512)]
    tags = [{"uid": f"u{i // 2}", "session_id": i % 2, "index": 0} for i in range(512)]
    plane.kv_batch_put(names, TRAIN, {"input_ids": [torch.arange(i + 1) for i in range(512)]}, tags)
    plane.kv_batch_get(names, TRAIN)
    trace = plane.trace(uid="u100")
    assert {row.key for row in trace.rows} == {"row200", "row201"}
    assert [row.len for row in of(trace, op="get")] == [201, 202]
    assert [row.session_id for row in of(trace, op="get")] == [0, 1]
    assert {row.key for row in plane.trace(key="row7").rows} == {"row7"}
    everything = plane.trace(TRAIN)
    assert len({row.key for row in everything.rows}) == 512


def test_a_clear_by_predicate_is_told_of_the_rows_that_it_removed(plane: Client) -> None:
    produce(plane, "a")
    produce(plane, "b")
    plane.kv_clear(None, TRAIN, where={"uid": "a"}, retire=True)
    assert {row.key for row in of(plane.trace(uid="a"), op="clear")} == {"a", "a_0_0", "a_1_0"}
    assert not of(plane.trace(uid="b"), op="clear")


def test_what_a_restarted_tag_store_has_in_its_journal_is_known(
    plane: Client, trainer: Client
) -> None:
    keys = produce(plane)
    with trainer.stage("update_actor"):
        trainer.kv_batch_get(keys, TRAIN, ["input_ids"])
        pid = plane.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: plane.status()["pid"] != pid, "another child serves", within_s=60)
        trainer.kv_batch_get(keys, TRAIN, ["labels"])
    trace = plane.trace(uid="7c1e")
    assert [row.op for row in of(trace, field="*plane*")] == ["start"]
    assert len(of(trace, op="put", field="input_ids", stage="rollout")) == 2
    assert not of(trace, op="get", field="input_ids")  # what was read is in no journal
    assert [row.stage for row in of(trace, op="get", field="labels")] == ["update_actor"] * 2
    assert (trace.status, trace.failed) == ("finished", [])


def test_stages_nest_and_end_with_errors(plane: Client) -> None:
    def put() -> None:
        plane.kv_put("k", TRAIN, {"x": torch.zeros(3)})

    with plane.stage("outer"):
        with pytest.raises(RuntimeError), plane.stage("inner"):
            put()
            raise RuntimeError
        put()
    put()
    assert [row.stage for row in of(plane.trace(key="k"), op="put")] == ["inner", "outer", ""]
    for wrong in ("x" * 65, "a\nb", 3):
        with pytest.raises(InvalidRequest, match="a stage is a printable word"), plane.stage(wrong):  # pyright: ignore[reportArgumentType]
            pass


def test_both_faces_tell_the_same(plane: Client, here: dict[str, Any]) -> None:
    keys = produce(plane)

    async def ask() -> Trace:
        async with await dataplane.async_connect("traced", config=here) as client:
            async with client.stage("metrics"):
                await client.kv_batch_get(keys, TRAIN, ["labels"])
            return await client.trace(uid="7c1e")

    told = asyncio.run(ask())
    assert asdict(told) == asdict(plane.trace(uid="7c1e"))
    assert {row.stage for row in of(told, op="get")} == {"metrics"}


def test_refusals_of_every_kind_are_told(plane: Client, trainer: Client) -> None:
    keys = produce(plane)
    claim = trainer.kv_claim(TRAIN, "train", count=2, where={"session_id": {"exists": True}})
    plane.kv_clear(keys[:1], TRAIN)
    asked = [
        lambda: trainer.kv_commit(claim),
        lambda: plane.kv_put(keys[0], TRAIN, {"x": torch.zeros(1)}, must_exist=True),
        lambda: plane.kv_put(keys[1], TRAIN, tags={"x": 1}, if_absent=True),
        lambda: plane.kv_batch_get(keys, TRAIN),
        lambda: plane.kv_batch_get(keys[1:], TRAIN, ["absent"]),
        lambda: plane.kv_put(keys[1], TRAIN, {"labels": torch.zeros(23)}),
        lambda: plane.end_group(of(plane.trace(uid="7c1e"), op="begin")[0].n, "finished"),
    ]
    for ask in asked:
        with pytest.raises(dataplane.DataplaneError):
            ask()
    told = [
        (row.status, row.detail.split(":")[0]) for row in of(plane.trace(uid="7c1e"), op="refuse")
    ]
    assert set(told) == {
        ("ClaimLost", "claim_commit"), ("KeyNotFound", "put"), ("AlreadyWritten", "put"),
        ("KeyNotFound", "get"), ("FieldNotFound", "get"), ("SchemaMismatch", "put"),
        ("StaleWrite", "end_group"),
    }  # fmt: skip


# -- settings --------------------------------------------------------------------------------


def test_off_keeps_nothing_and_changes_no_result(here: dict[str, Any]) -> None:
    results: list[list[Any]] = []
    for lineage in ("off", "on", "previews"):
        with dataplane.init({**here, "lineage": lineage}, name=f"l-{lineage}") as client:
            with client.stage("x"):
                keys = produce(client)
                train(client, keys)
            rows = client.kv_batch_get(keys, TRAIN, layout="list")
            listed = client.kv_list(TRAIN)
            results.append([
                rows.keys,
                {name: [row.tolist() for row in column] for name, column in rows.fields.items()},
                listed.keys, listed.tags, listed.revision,
            ])  # fmt: skip
            if lineage == "off":
                with pytest.raises(InvalidRequest, match="keeps no lineage"):
                    client.trace(uid="7c1e")
            client.close(destroy=True)
    assert results[0] == results[1] == results[2]


def test_hashes_prove_that_values_came_back_as_they_were(here: dict[str, Any]) -> None:
    with dataplane.init({**here, "lineage": "previews"}, name="l-hashes") as client:
        keys = produce(client)
        rows = client.kv_batch_get(keys, TRAIN, ["labels"], layout="padded", pad=-100)
        back = [
            row[:length] for row, length in zip(rows["labels"], rows.lengths["labels"], strict=True)
        ]
        client.kv_batch_put(keys, TRAIN, {"labels": back}, must_exist=True)
        client.kv_batch_get(keys, TRAIN, ["labels"], layout="packed", trim={"labels": (1, 0)})
        trace = client.trace(uid="7c1e")
        client.close(destroy=True)
    labels = of(trace, key=keys[0], field="labels")
    assert [(row.op, row.valid_len) for row in labels] == [
        ("put", 23),
        ("get", 23),
        ("put", 23),
        ("get", 23),
    ]
    assert len({row.hash for row in labels[:3]}) == 1
    assert labels[0].hash
    assert labels[3].hash == ""  # what is cut is other bytes
    assert labels[0].preview == "0 1 2 3 4 5 6 7"
    said = {finding.rule: finding.status for finding in trace.findings}
    assert (said[5], said[8]) == ("ok", "ok")


def test_what_has_fallen_out_is_counted_and_rows_that_are_here_are_found(
    here: dict[str, Any],
) -> None:
    with dataplane.init({**here, "lineage_bytes": 64 << 10}, name="l-small") as client:
        keys = produce(client)
        for i in range(2000):
            client.kv_put("other", TRAIN, tags={"i": i})
        client.kv_batch_get(keys, TRAIN, ["labels"])
        trace = client.trace(uid="7c1e")
        client.close(destroy=True)
    assert trace.gone > 0
    assert {row.key for row in trace.rows} == set(keys)
    assert {row.session_id for row in trace.rows} == {0, 1}
    assert trace.present == sorted(["7c1e", *keys])


# -- requests --------------------------------------------------------------------------------


MALFORMED: list[tuple[str, list[Any]]] = [
    ("trace", ["train", "u", "k", 0, 1]),
    ("trace", ["train", None, None, -1, 1]),
    ("trace", ["train", None, None, 0, 0]),
    ("trace", ["train", None, None, 0, 1, "train"]),
    ("trace", [7, None, None, 0, 1]),
    ("stage", ["a" * 100]),
    ("stage", [b"a"]),
    ("note", ["put", 1, "train", ["k"], ["f"], [[b"123456789"]], []]),
    ("note", ["put", 1, "train", ["k"], ["f"], [[b"1", b"2"]], []]),
    ("note", ["put", 1, "train", ["k"], ["f"], [], []]),
    ("note", ["put", 1, "train", ["k"], ["f"], [[b"1"]], [["x" * 500]]]),
    ("note", ["clear", 1, "train", ["k"], ["f"], [[b"1"]], []]),
    ("note", []),
]


def test_malformed_requests_are_refused(plane: Client) -> None:
    for verb, body in MALFORMED:

        def ask(core: Core, deadline: float, verb: str = verb, body: Any = body) -> Verb[Any]:
            return (yield from ask_again(core, verb, body, deadline))

        with pytest.raises(InvalidRequest):
            plane.run(ask)
    assert plane.trace().rows == []


def test_key_of_another_group_is_no_part_of_it(plane: Client) -> None:
    """Keys are never parsed: a key that looks like the uid's belongs to whom its tags say."""
    plane.kv_put(key_of(0), TRAIN, tokens(), {"uid": "other", "session_id": 0, "index": 0})
    assert plane.trace(uid="7c1e").rows == []
    assert {row.key for row in plane.trace(uid="other").rows} == {key_of(0)}
