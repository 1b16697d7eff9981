"""Trainers die between claim and commit, with the tag store or without: each row is trained once.

A lease's term runs only while its client has no connection. Who is killed has none; nor has who is
stopped when the tag store dies, since it cannot make another one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait

import pytest

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import ClaimLost
from dataplane.tags.journal import COMMIT
from tests.dataplane.journal_file import read
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker
from tests.kills.planes import Killed
from tests.kills.rows import check, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

TRIALS = (0, 1, 2)
LEASE_S = 1.0
BACK_S = 6.0
"""Within which a row is offered again after a lease has ended, on a busy machine on which the tag
store may have to come back before."""


def train(
    speaker: Speaker, joined: Joined, config: Config, partition: str, count: int, lease_s: float
) -> None:
    """Claim rows and say which; commit them when told to and say what came of it; again and again,
    until there are none."""
    with Client(joined, config) as client:
        while True:
            claim = client.kv_claim(
                partition, "train", count=count, fields=["x"], lease_s=lease_s, timeout=60
            )
            speaker.say((claim.keys, claim.deliveries, claim.end))
            if claim.end:
                return
            speaker.hear()
            rows = client.kv_batch_get(claim.keys, partition, ["x"], layout="list")
            assert rows.keys == claim.keys
            try:
                client.kv_commit(claim)
            except ClaimLost as lost:
                speaker.say(lost)
            else:
                speaker.say("committed")


def start(plane: Killed, partition: str, count: int, lease_s: float = LEASE_S) -> Process:
    return Process(train, plane.elsewhere(), plane.config, partition, count, lease_s)


@pytest.mark.parametrize("dies", ["alone", "before the tag store", "after the tag store"])
def test_rows_of_a_trainer_that_dies_are_offered_again_once_after_its_lease(
    killed: Killed, dies: str
) -> None:
    partition = f"dies {dies}"
    keys = [f"k{i}" for i in range(6)]
    put(killed.client, partition, keys, 100)
    killed.client.kv_seal_partition(partition)
    with start(killed, partition, 2) as dead, start(killed, partition, 2, 30) as alive:
        lost, deliveries, _ = dead.says()
        assert deliveries == [1, 1]
        kept, _, _ = alive.says()
        alone = time.monotonic()
        if dies == "after the tag store":
            # It does not get to say a word to the next one: its lease runs from when that came.
            dead.stop()
            killed.kill("tags")
        dead.kill()
        if dies == "before the tag store":
            killed.kill("tags")
        # The other one commits under the claim that it has, whichever store granted it.
        alive.hears("commit")
        assert alive.says() == "committed"
        offered: dict[int, list[str]] = {}
        waited = 0.0
        for _ in range(2):  # the tag store may take longer to come back than the lease lasts
            some, deliveries, _ = alive.says()
            offered[deliveries[0]] = some
            if deliveries == [2, 2]:
                waited = time.monotonic() - alone
            alive.hears("commit")
            if len(offered) == 1:
                assert alive.says() == "committed"
        assert offered[2] == lost
        assert sorted(lost + kept + offered[1]) == keys
        assert LEASE_S - 0.05 < waited < LEASE_S + BACK_S
        assert alive.says() == "committed"
        assert alive.says() == ([], [], True)
    check(killed.client, partition, keys)
    killed.client.kv_drop_partition(partition)
    killed.is_empty()


def test_a_trainer_that_computes_while_the_tag_store_is_restarted_keeps_its_claim(
    killed: Killed,
) -> None:
    """It makes no call for far longer than its lease."""
    partition = "computes"
    put(killed.client, partition, ["a", "b"], 100)
    killed.client.kv_seal_partition(partition)
    lease_s = 0.5
    with start(killed, partition, 2, lease_s) as trainer:
        keys, _, _ = trainer.says()
        killed.kill("tags")
        back = time.monotonic()
        eventually(lambda: time.monotonic() - back > 3 * lease_s, "a step is computed")
        trainer.hears("commit")
        assert trainer.says() == "committed"
        assert keys == ["a", "b"]
        assert trainer.says() == ([], [], True)
    killed.client.kv_drop_partition(partition)


def test_a_trainer_that_is_stopped_when_the_tag_store_dies_loses_its_claim_after_its_lease(
    killed: Killed,
) -> None:
    partition = "stopped"
    keys = [f"k{i}" for i in range(3)]
    put(killed.client, partition, keys, 100)
    killed.client.kv_seal_partition(partition)
    with start(killed, partition, 2) as stopped, killed.another() as other:
        held, _, _ = stopped.says()
        stopped.hears("commit")
        stopped.stop()
        alone = time.monotonic()
        killed.kill("tags")
        rest = other.kv_claim(partition, "train", count=1, lease_s=60, timeout=20)
        assert rest.deliveries == [1]
        claim = other.kv_claim(partition, "train", count=2, lease_s=60, timeout=20)
        waited = time.monotonic() - alone
        assert (claim.keys, claim.deliveries) == (held, [2, 2])
        assert LEASE_S - 0.05 < waited < LEASE_S + BACK_S
        other.kv_commit(claim)
        stopped.resume()
        refused = stopped.says()
        assert isinstance(refused, ClaimLost)
        assert sorted(refused.keys) == sorted(held)
        other.kv_commit(rest)
        assert stopped.says() == ([], [], True)
    killed.client.kv_drop_partition(partition)


# -- a whole run ---------------------------------------------------------------------------------

ROWS = 400
TRAINERS = 4


def spoken(trainers: list[Process], at_once: bool) -> list[Process]:
    """Those who have something to say: now, or as soon as any has."""
    pipes = {t._ours: t for t in trainers}  # pyright: ignore[reportPrivateUsage]
    heard = wait(list(pipes), 0 if at_once else 20)
    assert heard or at_once
    return [pipes[pipe] for pipe in heard]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("trial", TRIALS)
def test_over_a_run_in_which_trainers_and_the_plane_are_killed_each_row_is_committed_once(
    own_plane: Callable[..., Plane], trial: int, seed: int
) -> None:
    """What was committed is what the journal says, in which nothing is taken back."""
    plane, chance = own_plane(), random.Random(seed + trial)
    keys = [f"k{i}" for i in range(ROWS)]
    put(plane.client, "p", keys, 100)
    plane.client.kv_seal_partition("p")
    kills = Counter[str]()
    with ExitStack() as stack:

        def enter() -> Process:
            return stack.enter_context(
                Process(train, plane.joined, plane.config, "p", 5, LEASE_S / 4)
            )

        running = [enter() for _ in range(TRAINERS)]
        holding: list[Process] = []
        while running:
            # Whoever holds a claim waits for its word; the others may wait for what those hold.
            for trainer in spoken([p for p in running if p not in holding], bool(holding)):
                word = trainer.says()
                if isinstance(word, tuple):
                    (running.remove if word[2] else holding.append)(trainer)
                else:
                    assert word == "committed" or isinstance(word, ClaimLost)
            if not holding:
                continue
            trainer = holding.pop(chance.randrange(len(holding)))
            if chance.random() < 0.08:
                trainer.kill()
                kills["trainer"] += 1
                running.remove(trainer)
                running.append(enter())
                continue
            if chance.random() < 0.04:
                plane.kill()
                kills["plane"] += 1
            trainer.hears("commit")
    commits = Counter[str]()
    for path in sorted((plane.folders.runtime / "journal").glob("journal-*")):
        for kind, _, _, body in read(path)[1]:
            if kind == COMMIT:
                commits.update(body[3])
    assert commits == Counter(keys)
    assert kills["trainer"]
    print(f"\n{dict(kills)} kills")
