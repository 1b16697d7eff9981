"""What clients do while a process dies, and what must be true of it afterwards.

For verbs whose histories the checker knows, random clients in threads; for the others one client
that keeps account of what it was told.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dataplane.errors import (
    DataplaneError,
    InvalidRequest,
    OutcomeUnknown,
)
from tests.history.calls import Mix
from tests.history.checker import check
from tests.history.races import in_threads
from tests.history.words import story
from tests.kills.planes import Killed

Work = Callable[[Killed, int], None]

QUIET = Mix(die=0.0, leave=0.0, cut=0.02)
PUTTING = QUIET._replace(put=12, clear=3, get=2, begin=0, end=0, claim=0, settle=0, large=0.5)
CLEARING = QUIET._replace(put=8, clear=8, get=1, begin=1, end=0, claim=0, settle=0)
GROUPING = QUIET._replace(put=6, begin=6, end=6, attempt=0.7, claim=0, settle=0)
CLAIMING = QUIET._replace(put=8, clear=1, get=0, begin=0, end=0, claim=10, settle=10, release=0.5)
READING = QUIET._replace(put=6, clear=2, get=12, claim=0, settle=0, large=0.6, remote=0.4)
MIXES = {
    "put": PUTTING, "clear": CLEARING, "begin_group": GROUPING, "end_group": GROUPING,
    "claim": CLAIMING, "commit": CLAIMING, "release": CLAIMING,
    "reserve": PUTTING,
    "allocate": PUTTING, "publish": PUTTING, "abort": PUTTING._replace(exact=0.8),
    "pin": READING, "unpin": READING, "read": READING._replace(remote=1.0), "free": CLEARING,
}  # fmt: skip
"""What random clients do most, by the verb in whose midst a process dies."""


def history(mix: Mix) -> Work:
    """Random clients, whatever they are told being legal."""

    def work(plane: Any, seed: int) -> None:
        told = in_threads(plane, seed, mix, clients=3, calls=14)
        found = check(told)
        if found is not None:
            print(story(told))
        assert found is None, f"seed {seed}: {found}"

    return work


class Account:
    """One client's rows of one partition: what is there for sure, and what may be."""

    def __init__(self, plane: Killed, seed: int, name: str) -> None:
        self.client = plane.client
        self.partition = f"{name}-{seed}-{plane.kills}"
        self.rows: dict[str, torch.Tensor] = {}
        self.prompts: list[str] = []
        """Rows without values."""
        self._chance = random.Random(seed)

    def put(self, key: str, nbytes: int, **named: Any) -> None:
        """Put a row of random bytes, which is there from then on."""
        data = torch.tensor(list(self._chance.randbytes(64)), dtype=torch.uint8)
        row = data.repeat(-(-nbytes // 64))[:nbytes]
        self.client.kv_put(key, self.partition, {"x": row}, {"n": nbytes}, **named)
        self.rows[key] = row

    def clear(self, keys: list[str]) -> None:
        """Clear rows, none of which is there from then on."""
        self.client.kv_clear(keys, self.partition)
        for key in keys:
            self.rows.pop(key, None)

    def check(self) -> None:
        """All rows that are there for sure are, bit for bit, and no others."""
        assert sorted(self.client.kv_list(self.partition).keys) == sorted(
            [*self.rows, *self.prompts]
        )
        got = self.client.kv_batch_get(list(self.rows), self.partition, ["x"], layout="list")
        for key, row in zip(got.keys, got.fields["x"], strict=True):
            assert torch.equal(row, self.rows[key]), key

    def drop(self) -> None:
        self.client.kv_drop_partition(self.partition)


MiB = 1 << 20
SNAPSHOT_S = 10.0
"""Within which a snapshot is taken of a journal that grows."""


def repack(plane: Killed, seed: int) -> None:
    """A full store in which most of each block is dead."""
    client, account = plane.client, Account(plane, seed, "repack")
    rows = 4
    for number in range(12):
        keys = [f"{number}-{i}" for i in range(rows)]
        data = torch.randint(0, 255, (rows, MiB // rows), dtype=torch.uint8)
        client.kv_batch_put(keys, account.partition, {"x": data})
        account.rows |= dict(zip(keys, data, strict=True))
        account.clear(keys[1:])
    for number in range(3):  # 12 MiB are taken and 3 of them are in use
        account.put(f"large-{number}", 3 * MiB)
    account.check()
    account.drop()


def hold(plane: Killed, seed: int) -> None:
    """Groups that have room kept for what they declare."""
    account = Account(plane, seed, "hold")
    for number in range(4):
        attempt = plane.client.begin_group(f"g{number}", account.partition, n=2, declared_bytes=MiB)
        account.prompts.append(f"g{number}")
        for session in range(2):
            account.put(f"g{number}_{session}", 200_000, attempt=attempt)
        plane.client.end_group(attempt, "finished")
    account.check()
    account.drop()


def snapshots(plane: Killed, seed: int) -> None:
    """So much is journaled that a snapshot is taken."""
    client, account = plane.client, Account(plane, seed, "snapshot")
    before, until = _newest_snapshot(plane), time.monotonic() + SNAPSHOT_S
    while time.monotonic() < until and _newest_snapshot(plane) == before:
        for number in range(20):
            account.put(f"k{number}", 300)
            tags = [{"text": "x" * 4000, "number": number}]
            client.kv_batch_put([f"k{number}"], account.partition, tags=tags)
    account.check()
    account.drop()


def _newest_snapshot(plane: Killed) -> str:
    return max((path.name for path in plane.runtime.glob("journal/snapshot-????????")), default="")


def save(plane: Killed, seed: int) -> None:
    """A checkpoint is saved, which is whole or not there; and can be loaded if it is."""
    account = Account(plane, seed, "save")
    for number in range(20):
        account.put(f"k{number}", 3000)
    folder = Path(tempfile.mkdtemp(prefix="dataplane-"))
    path = folder / "saved"
    try:
        with suppress(DataplaneError):
            plane.client.save_checkpoint(path)
        account.check()
        if not path.exists():
            plane.client.save_checkpoint(path)
        account.drop()
        plane.client.load_checkpoint(path)
        account.check()
        account.drop()
    finally:
        shutil.rmtree(folder)


def load(plane: Killed, seed: int) -> None:
    """A checkpoint is loaded, all of it or nothing."""
    client, account = plane.client, Account(plane, seed, "load")
    attempt = client.begin_group("g", account.partition, n=2)
    for number in range(20):
        account.put(f"k{number}", 3000, **({"attempt": attempt} if number < 2 else {}))
    client.kv_clear(["g"], account.partition)
    folder = Path(tempfile.mkdtemp(prefix="dataplane-"))
    path = folder / "saved"
    try:
        client.save_checkpoint(path)
        account.drop()
        try:
            client.load_checkpoint(path)
        except (InvalidRequest, OutcomeUnknown):
            if account.partition not in client.kv_list_partitions():
                client.load_checkpoint(path)
        account.check()
        account.drop()
    finally:
        shutil.rmtree(folder)


def through_the_socket(plane: Killed, seed: int) -> None:
    """A client of another node puts what does not arrive in one piece."""
    account = Account(plane, seed, "socket")
    with plane.another(same_node_reads=False) as far:
        account.client = far
        for number in range(6):
            account.put(f"k{number}", MiB + number)
        account.check()
    account.client = plane.client
    account.check()
    account.drop()


_OTHERS: dict[str, Work] = {
    "put_block": through_the_socket, "repack": repack, "hold": hold, "snapshot": snapshots,
}  # fmt: skip


def work_for(verb: str) -> Work:
    """What clients do when a process is to die in the midst of a verb."""
    if verb in MIXES:
        return history(MIXES[verb])
    if verb in _OTHERS:
        return _OTHERS[verb]
    return save if verb.startswith("save_") else load
