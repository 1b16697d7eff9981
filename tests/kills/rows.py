"""Rows whose bytes follow from their keys, so that every byte of every row can be checked."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from dataplane.client.sync import Client
from tests.deadline import eventually

LARGE = 100_000
"""Bytes of a row that is copied in place: over what a test's planes send through the socket."""


def content(key: str, nbytes: int) -> torch.Tensor:
    """The bytes of a row: other keys have others at every place."""
    chance = np.random.default_rng(zlib.crc32(key.encode()))
    return torch.from_numpy(chance.integers(0, 256, nbytes, np.uint8))


def put(client: Client, partition: str, keys: Sequence[str], nbytes: int = LARGE) -> None:
    """Put rows, each in a block of its own."""
    for key in keys:
        client.kv_put(key, partition, {"x": content(key, nbytes)}, {"nbytes": nbytes})


def check(client: Client, partition: str, keys: Sequence[str]) -> None:
    """Exactly these rows are in a partition, each with all of its own bytes and no others."""
    listing = client.kv_list(partition)
    assert sorted(listing.keys) == sorted(keys)
    sizes = {key: tags["nbytes"] for key, tags in zip(listing.keys, listing.tags, strict=True)}
    got = client.kv_batch_get(list(keys), partition, ["x"], layout="list")
    for key, row in zip(got.keys, got.fields["x"], strict=True):
        assert torch.equal(row, content(key, sizes[key])), key


class Others:
    """Somebody who puts, reads and clears rows of a partition of its own, without a pause, and
    checks each byte. What fails is raised at the end of the block; the partition is dropped."""

    def __init__(self, client: Client, partition: str, seed: int) -> None:
        self._client = client
        self._partition = partition
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="others")
        self.rounds = 0
        """How often all rows that were there were read and some of them cleared."""

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed

    def go_on(self, rounds: int = 3) -> None:
        """Wait until they have done so many rounds more."""
        until = self.rounds + rounds
        eventually(
            lambda: self.rounds >= until or not self._thread.is_alive(),
            "others go on",
            within_s=30.0,
        )
        assert self._failed is None, self._failed

    def _run(self) -> None:
        client, there = self._client, list[str]()
        try:
            while not self._over.is_set():
                keys = [f"o{self.rounds}-{i}" for i in range(4)]
                put(client, self._partition, keys, self._chance.randrange(1000, 2 * LARGE))
                there += keys
                check(client, self._partition, there)
                self._chance.shuffle(there)
                gone, there = there[8:], there[:8]
                client.kv_clear(gone, self._partition)
                self.rounds += 1
            client.kv_drop_partition(self._partition)
        except BaseException as error:
            self._failed = error
