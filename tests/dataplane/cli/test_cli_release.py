"""`dataplane release`: claims of consumers that will not give them back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Claim, ClaimLost, Client
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.terminal import asked
from tests.deadline import eventually

_numbers = itertools.count(1)


@pytest.fixture
def claimed(plane: Client, here: dict[str, Any]) -> Iterator[tuple[str, Claim]]:
    """A partition where `actor` holds two claims of this client, and `judge` one of a client that
    left while its term of an hour runs; and the first of the former."""
    partition = f"claimed-{next(_numbers)}"
    keys = [f"k{i}" for i in range(4)]
    plane.kv_batch_put(keys, partition, {"x": torch.zeros(4, 3)})
    first = plane.kv_claim(partition, "actor", count=2, fields=["x"])
    plane.kv_claim(partition, "actor", count=1, fields=["x"])
    gone = dataplane.connect("train", config=here)
    gone.kv_claim(partition, "judge", count=1, fields=["x"], lease_s=3600)
    gone.close()
    eventually(
        lambda: [c for c in plane.claims(partition) if not any(h.alive for h in c.holders)],
        "its consumer is gone",
    )
    yield partition, first
    plane.kv_drop_partition(partition)


def held(plane: Client, partition: str) -> list[tuple[str, int]]:
    return sorted((claim.task, len(claim.keys)) for claim in plane.claims(partition))


ALL = [("actor", 1), ("actor", 2), ("judge", 1)]


def test_a_dry_run_shows_claims_and_changes_nothing(
    plane: Client, operator: Operator, claimed: tuple[str, Claim]
) -> None:
    partition, _ = claimed
    found = operator.ask("release", partition, "--dry-run", "-o", "json").json
    assert [(row["task"], row["rows"], row["outcome"]) for row in found] == [
        ("actor", 2, "held"),
        ("actor", 1, "held"),
        ("judge", 1, "held"),
    ]
    assert [len(row["keys"]) for row in found] == [2, 1, 1]
    assert found[2]["holders"][0]["alive"] is False
    assert 0 < found[2]["left_s"] <= 3600
    text = operator.ask("release", partition, "--dry-run").out
    assert "(no connection)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert held(plane, partition) == ALL


def test_the_claims_of_dead_consumers_go_back_and_their_rows_are_offered_again(
    plane: Client, operator: Operator, claimed: tuple[str, Claim]
) -> None:
    partition, _ = claimed
    said = operator.ask("release", partition, "--dead", "--yes", "-o", "json").json
    assert [(row["task"], row["outcome"]) for row in said] == [("judge", "released")]
    assert held(plane, partition) == ALL[:2]
    again = plane.kv_claim(partition, "judge", count=4, fields=["x"], timeout=10)
    assert sorted(again.deliveries) == [1, 1, 1, 2]
    plane.kv_release(again)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--task", "actor"], ALL[2:]),
        (["--task", "nobody"], ALL),
        (["--claim", "999999"], ALL),
        (["--client", "nobody"], ALL),
        ([], []),
    ],
    ids=str,
)
def test_what_is_chosen_is_released(
    plane: Client, operator: Operator, claimed: tuple[str, Claim], words: list[str], left: Any
) -> None:
    partition, _ = claimed
    said = operator.ask("release", partition, *words, "--yes")
    assert held(plane, partition) == left
    assert ("no such claim" in said.out) is (left == ALL)


def test_one_claim_or_one_client_is_chosen(
    plane: Client, operator: Operator, claimed: tuple[str, Claim]
) -> None:
    partition, first = claimed
    operator.ask("release", partition, "--claim", str(first.claim_id), "--yes")
    assert held(plane, partition) == [("actor", 1), ("judge", 1)]
    with pytest.raises(ClaimLost):
        plane.kv_commit(first)
    operator.ask("release", partition, "--client", plane.client_id, "--yes")
    assert held(plane, partition) == [("judge", 1)]


def test_it_asks_at_a_terminal_and_refuses_without_one(
    plane: Client, operator: Operator, claimed: tuple[str, Claim]
) -> None:
    partition, _ = claimed
    said = operator.run("release", partition, ok=False)
    assert said.code == 2
    assert "claim" in said.err
    assert held(plane, partition) == ALL
    with asked(operator, "release", partition, "--dead") as question:
        assert "held" in question.answer("n\n").out
    assert held(plane, partition) == ALL
    with asked(operator, "release", partition, "--dead") as question:
        assert "released" in question.answer("y\n").out
    assert held(plane, partition) == ALL[:2]


def test_a_claim_that_ends_between_question_and_answer_is_said(
    plane: Client, operator: Operator, claimed: tuple[str, Claim]
) -> None:
    partition, first = claimed
    with asked(operator, "release", partition, "--claim", str(first.claim_id)) as question:
        plane.kv_commit(first)
        said = question.answer("y\n")
    assert said.code == 0, said.err
    assert "ended meanwhile" in " ".join(said.out.split())


def test_a_partition_that_is_not_there_is_said(operator: Operator) -> None:
    assert operator.ask("release", "nowhere", "--yes", ok=False).code == 3
