"""What the processes of a soak do: each is one kind of user of a plane, at an even pace.

Each function runs in a process of its own until its parent says something, or for so many turns.
What a plane may refuse (a group that was cleared meanwhile, no room in time) is counted; anything
else ends the process with its error.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensordict  # noqa: F401 (imported once, by whoever these processes are forked from)
import torch

from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import (
    ClaimLost,
    DeadlineExceeded,
    KeyNotFound,
    OutcomeUnknown,
    PartitionNotFound,
    QuotaExceeded,
    StaleWrite,
    Unreachable,
)
from dataplane.host.embedded import attach_address
from tests.faults.processes import Speaker

MiB = 1 << 20
TRAIN = "train"
SESSIONS = 4
LARGE = 0.1
"""Share of trajectories that are copied in place."""
DECLARED_BYTES = 5 * MiB
"""By each group: what it takes if all of its trajectories are large."""
STALE_S = 15.0
"""Rows of producers that died are cleared when they are older."""
MAY_BE = (
    ClaimLost, DeadlineExceeded, KeyNotFound, OutcomeUnknown, PartitionNotFound, QuotaExceeded,
    StaleWrite, Unreachable,
)  # fmt: skip


class User:
    """A client of the plane, a source of chance, and when it is over."""

    def __init__(self, pipe: Speaker, address: str, settings: dict[str, Any], seed: int) -> None:
        torch.set_num_threads(1)
        config = Config(**settings)
        self.client = Client(attach_address(address, config), config)
        self.chance = random.Random(seed)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._over = threading.Event()
        self._pipe = pipe
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            self._pipe.hear()
        self._over.set()

    def every(self, pace_s: float, turn: Callable[[int], None], turns: int = 1 << 60) -> None:
        """Take turns until it is over, one in so many seconds; then say what came of them."""
        for number in range(turns):
            began = time.monotonic()
            try:
                turn(number)
                self.counts["turns"] += 1
            except MAY_BE as error:
                self.counts[type(error).__name__] += 1
            if self._over.wait(max(0.0, pace_s - (time.monotonic() - began))):
                break
        self.client.close()
        self._pipe.say(self.counts)

    def row(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Fields and tags of a trajectory: what it holds can be seen by its tags."""
        large = self.chance.random() < LARGE
        size = self.chance.randint(32 << 10, 64 << 10) if large else self.chance.randint(10, 2000)
        value = self.chance.randrange(1 << 30)
        fields = {"input_ids": torch.full((size,), value), "logprobs": torch.zeros(size)}
        return fields, {"size": size, "value": value, "at": time.time(), "text": "x" * 100}


def produce(pipe: Speaker, address: str, settings: dict[str, Any], seed: int, pace: float) -> None:
    """Whole groups, with a write-back of each row."""
    user = User(pipe, address, settings, seed)
    user.every(pace, lambda number: _group(user, f"{seed}-{number}"))


def _group(user: User, uid: str) -> None:
    client = user.client
    attempt = client.begin_group(uid, TRAIN, n=SESSIONS, declared_bytes=DECLARED_BYTES, timeout=5)
    for session in range(SESSIONS):
        fields, tags = user.row()
        key = f"{uid}_{session}_0"
        client.kv_put(key, TRAIN, fields, {**tags, "uid": uid}, attempt=attempt, timeout=10)
        more = {"entropy": fields["logprobs"] + session}
        client.kv_put(key, TRAIN, more, {"score": 0.5}, must_exist=True, timeout=10)
    client.end_group(attempt, "finished")


def consume(pipe: Speaker, address: str, settings: dict[str, Any], seed: int, pace: float) -> None:
    """Claims of whole groups: read, committed and cleared, or released."""
    user = User(pipe, address, settings, seed)

    def turn(number: int) -> None:
        client = user.client
        fields = ["input_ids", "entropy"]
        claim = client.kv_claim(
            TRAIN, "train", count=2, fields=fields, groups=True, lease_s=2.0, timeout=2.0
        )
        tags = dict(zip(claim.keys, claim.tags, strict=True))
        keys = [key for key in claim.keys if "size" in tags[key]]
        layout = user.chance.choice(["nested", "padded", "list", "packed"])
        client.kv_batch_get(keys, TRAIN, ["input_ids"], layout=layout)
        with client.kv_view(keys, TRAIN, ["input_ids"], layout="list") as rows:
            for key, row in zip(rows.keys, rows.fields["input_ids"], strict=True):
                found = len(row), int(row[0]), int(row[-1])
                value = tags[key]["value"]
                assert found == (tags[key]["size"], value, value), (key, found)
            del row, rows
        if user.chance.random() < 0.1:
            client.kv_release(claim)
            return
        client.kv_commit(claim)
        uids = sorted({tags[key]["uid"] for key in keys})
        client.kv_clear([*claim.keys, *uids], TRAIN, retire=True)

    user.every(pace, turn)


def read(pipe: Speaker, address: str, settings: dict[str, Any], seed: int, pace: float) -> None:
    """Listings of changes, waits, views that last, and an end to what dead producers left."""
    user = User(pipe, address, settings, seed)
    client = user.client
    since: Any = None
    first_seen: dict[str, float] = {}

    def turn(number: int) -> None:
        nonlocal since, first_seen
        changes = client.kv_list(TRAIN, since=since)
        since = changes.revision
        client.kv_wait(TRAIN, {"size": {">": 10}}, count=1, timeout=1.0)
        client.explain(TRAIN, task="train")
        if number % 10:
            return
        listing = client.kv_list(TRAIN)
        now = time.time()
        prompts = {
            key for key, tags in zip(listing.keys, listing.tags, strict=True) if "size" not in tags
        }
        first_seen = {key: first_seen.get(key, now) for key in prompts}
        old = [key for key, seen in first_seen.items() if seen < now - STALE_S]
        client.kv_clear(old, TRAIN, retire=True)
        client.kv_clear(None, TRAIN, where={"at": {"<": now - STALE_S}}, retire=True)
        keys = [key for key in listing.keys if key not in prompts][:8]
        if keys:
            rows = client.kv_batch_get(keys, TRAIN, ["input_ids"], on_missing="drop")
            assert len(rows.keys) <= len(keys)

    user.every(pace, turn)


def partition(
    pipe: Speaker, address: str, settings: dict[str, Any], seed: int, pace: float
) -> None:
    """Partitions that come and go: versions that are sealed, and scratch that is dropped."""
    user = User(pipe, address, settings, seed)
    client = user.client

    def turn(number: int) -> None:
        if number == 0:
            client.kv_create_partition("weights", retention={"versions": 2})
        name = f"weights@{number}"
        client.kv_put("w", name, {"w": torch.full((MiB // 4,), float(number))})
        client.kv_seal_partition(name)
        scratch = f"scratch-{seed}-{number}"
        keys = [f"k{i}" for i in range(50)]
        client.kv_batch_put(keys, scratch, {"x": torch.arange(50)}, [{"i": i} for i in range(50)])
        client.kv_claim(scratch, "t", count=10, timeout=5)
        client.kv_drop_partition(scratch)

    user.every(pace, turn)


def fork(pipe: Speaker, address: str, settings: dict[str, Any], seed: int, pace: float) -> None:
    """Forked children use the client that they inherited; some leave without a word."""
    user = User(pipe, address, settings, seed)

    def turn(number: int) -> None:
        user.client.kv_put("parent", "forks", {"x": torch.arange(10)}, {"n": number})
        pid = os.fork()
        if not pid:
            code = 1
            try:
                user.client.kv_put(f"child{number % 10}", "forks", {"x": torch.arange(1000)})
                user.client.kv_batch_get(["parent"], "forks")
                if number % 2:
                    user.client.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the forked child ended with {status}"

    user.every(pace, turn)


def visit(pipe: Speaker, address: str, settings: dict[str, Any], seed: int, turns: int) -> None:
    """A client that is here for a short while: groups, and claims that it may take along."""
    user = User(pipe, address, settings, seed)

    def turn(number: int) -> None:
        if user.chance.random() < 0.5:
            _group(user, f"visit-{seed}-{number}")
        else:
            user.client.kv_claim(
                TRAIN, "train", count=1, fields=["input_ids"], groups=True, lease_s=1.0, timeout=1.0
            )

    user.every(0.05, turn, turns)


USERS: dict[str, tuple[Callable[..., None], float]] = {
    "producer 1": (produce, 0.15), "producer 2": (produce, 0.2), "consumer 1": (consume, 0.15),
    "consumer 2": (consume, 0.2), "reader": (read, 0.5), "partitions": (partition, 0.5),
    "forks": (fork, 2.0),
}  # fmt: skip
"""Who is there all the time, and how many seconds a turn of each takes at least.

Of each client that was here the tag store remembers for a while who it was (some 300 bytes, of the
last 16,384; where it ran, of the last 50,000). So that what grows is seen, few of them come."""
