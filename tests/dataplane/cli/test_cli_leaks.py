"""`dataplane leaks`: what keeps memory and rows for nobody."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client
from tests.contract.planes import thread_plane
from tests.dataplane.cli.conftest import Operator, environment_of
from tests.dataplane.cli.small_run import HOSTILE_KEY, TRAIN
from tests.deadline import eventually

_numbers = itertools.count(1)


@pytest.fixture
def partition(plane: Client) -> Iterator[str]:
    name = f"leaks-{next(_numbers)}"
    yield name
    if name in plane.kv_list_partitions():
        plane.kv_drop_partition(name)


def found(operator: Operator, *words: str) -> list[dict[str, Any]]:
    return operator.ask("leaks", *words, "-o", "json").json


def of(rows: list[dict[str, Any]], kind: str, where: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind and where in row["where"]]


def test_an_open_group_whose_producer_is_gone_is_one(operator: Operator) -> None:
    (leak,) = of(found(operator, "--older-than", "0s"), "group", f"{TRAIN}, group u3")
    assert leak["count"] == 1
    assert leak["bytes"] > 0
    assert leak["age_s"] >= 0
    text = operator.ask("leaks", "--older-than", "0s").out
    assert "--orphans" in text
    assert f"{TRAIN}, group u2" not in text  # its producer is here


def test_what_is_young_is_passed_over_and_check_ends_with_1(operator: Operator) -> None:
    said = operator.ask("leaks", "--older-than", "1d", "--check")
    assert said.code == 0
    assert not of(found(operator, "--older-than", "1d"), "group", "")
    assert operator.ask("leaks", "--older-than", "0s", "--check", ok=False).code == 1
    assert operator.ask("leaks", "--older-than", "soon", ok=False).code == 2


def test_a_claim_whose_consumer_is_gone_is_one(
    plane: Client, operator: Operator, here: dict[str, Any], partition: str
) -> None:
    plane.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 3)})
    gone = dataplane.connect("train", config=here)
    gone.kv_claim(partition, "actor", count=2, fields=["x"], lease_s=3600)
    assert not of(found(operator, "--older-than", "0s"), "claim", partition)
    gone.close()
    (leak,) = eventually(
        lambda: of(found(operator, "--older-than", "0s"), "claim", partition), "it is told"
    )
    assert leak["count"] == 2
    assert f"{partition}, task actor" in leak["where"]
    assert "release" in leak["advice"]


def test_rows_that_every_task_has_committed_are_one(
    plane: Client, operator: Operator, partition: str
) -> None:
    plane.kv_batch_put(["a", "b", "c"], partition, {"x": torch.zeros(3, 5)})
    for task in ("actor", "judge"):
        plane.kv_commit(plane.kv_claim(partition, task, count=2, fields=["x"]))
    _let_a_moment_pass(plane, partition)
    (leak,) = of(found(operator, "--older-than", "0s"), "committed", partition)
    assert leak["count"] == 1  # at least: of three, each has committed two
    plane.kv_commit(plane.kv_claim(partition, "actor", count=1, fields=["x"]))
    plane.kv_commit(plane.kv_claim(partition, "judge", count=1, fields=["x"]))
    (leak,) = of(found(operator, "--older-than", "0s"), "committed", partition)
    assert (leak["count"], leak["bytes"]) == (3, 60)
    plane.kv_clear(["a", "b", "c"], partition)
    assert not of(found(operator, "--older-than", "0s"), "committed", partition)


def _let_a_moment_pass(plane: Client, partition: str) -> None:
    def has_passed() -> bool:
        plane.kv_put("tick", "ticks", tags={"n": time.time()})
        before = plane.revision_before(0.0)
        return before is not None and before >= plane.kv_list(partition).revision

    eventually(has_passed, "the rows are in the past")


def _one_dead(operator: Operator) -> Callable[[], list[dict[str, Any]]]:
    return lambda: of(found(operator), "dead blocks", "local")


def test_who_reads_is_told_and_dead_memory_is_a_leak(
    plane: Client, operator: Operator, partition: str
) -> None:
    plane.kv_put("a", partition, {"x": torch.zeros(100_000)})
    with plane.kv_view(["a"], partition, ["x"], layout="list") as rows:
        (reader,) = eventually(lambda: of(found(operator), "reading", "local"), "it is told")
        assert reader["bytes"] >= 400_000
        assert 0 < reader["age_s"] < 60
        assert not _one_dead(operator)()
        plane.kv_clear(["a"], partition)
        (dead,) = eventually(_one_dead(operator), "it is dead and pinned")
        assert dead["bytes"] >= 400_000
        assert dead["who"]
        assert "who reads them lets go" in " ".join(operator.ask("leaks").out.split())
        del rows
    eventually(lambda: not _one_dead(operator)(), "it is freed")


def test_a_block_that_no_row_refers_to_is_one(here: dict[str, Any]) -> None:
    with thread_plane(here) as made, made.connect() as client:
        operator = Operator(environment_of(here, client))
        client.kv_put("a", "p", {"x": torch.zeros(1000)})
        assert not of(found(operator), "orphan blocks", "local")
        assert made.server.values is not None
        blocks = made.server.values.store.blocks

        def lose() -> int:
            """What a fault of the plane would leave: published, and in no row."""
            extent = blocks.allocate(5000, "nobody")
            assert extent is not None
            blocks.seal(extent.block, "nobody")
            assert blocks.publish(extent.block)
            return extent.block

        lost = made.call(lose)
        (leak,) = of(found(operator), "orphan blocks", "local")
        assert (leak["count"], leak["bytes"]) == (1, 5000)
        (store,) = client.holdings()
        assert store.orphans == [{"block": lost, "bytes": 5000}]
        assert operator.ask("leaks", "--check", ok=False).code == 1
        client.kv_clear(["a"], "p")
        made.call(lambda: blocks.kill([lost]))
        eventually(lambda: not of(found(operator), "orphan blocks", "local"), "it is freed")


def test_hostile_names_print_safely(
    plane: Client, operator: Operator, here: dict[str, Any]
) -> None:
    gone = dataplane.connect("train", config=here)
    gone.begin_group(HOSTILE_KEY, "p [red]\u202e", n=1)
    gone.close()
    eventually(lambda: of(found(operator, "--older-than", "0s"), "group", "[red]"), "it is told")
    text = operator.ask("leaks", "--older-than", "0s").out
    assert all(line.isprintable() for line in text.splitlines())
    plane.kv_drop_partition("p [red]\u202e")
