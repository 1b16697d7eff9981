"""Rows of many lengths in a plane, works over them, and a client that notes what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dataplane import Client
from tests.trainer.materials import Sample, sample
from trainer.plan import RankPlan
from trainer.ranks.types import RankWork
from trainer.trajectory import BatchTraits

PARTITION = "train"


class NotingClient:
    """A client of a plane that notes keys and fields of gets, and runs something before each."""

    def __init__(self, client: Client, before: Callable[[list[str]], None] | None = None) -> None:
        self._client = client
        self._before = before
        self._lock = threading.Lock()
        self.keys: list[str] = []
        self.fields: set[str] = set()
        self.puts: list[tuple[list[str], set[str]]] = []

    def kv_batch_get(self, keys: Sequence[str], *args: Any, **named: Any) -> Any:
        if self._before is not None:
            self._before(list(keys))
        rows = self._client.kv_batch_get(keys, *args, **named)
        with self._lock:
            self.keys += keys
            self.fields |= set(named["select_fields"])
        return rows

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Any, **named: Any
    ) -> Any:
        done = self._client.kv_batch_put(keys, partition_id, fields, **named)
        with self._lock:
            self.puts.append((list(keys), set(fields)))
        return done

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._client.stage(name)

    def span(
        self, name: str, partition_id: str, *, uids: Iterable[str]
    ) -> AbstractContextManager[None]:
        return self._client.span(name, partition_id, uids=uids)

    def close(self) -> None:
        self._client.close()


def rows(count: int, *, uid: str, words: int = 61, seed: int = 0) -> list[Sample]:
    """Rows of 4 to 12 tokens with log-probs."""
    chance = np.random.default_rng([seed, count])
    made: list[Sample] = []
    for session in range(count):
        prompt, response = int(chance.integers(2, 5)), int(chance.integers(2, 8))
        made.append(
            sample(
                chance.integers(1, words, prompt).tolist(),
                chance.integers(1, words, response).tolist(),
                logprobs=chance.uniform(-4, -2, response).tolist(),
                uid=uid,
                session=session,
            )
        )
    return made


def put(client: Client, samples: Sequence[Sample], partition_id: str = PARTITION) -> None:
    for one in samples:
        client.kv_put(one.row.key, partition_id, one.fields)


def work_of(
    samples: Sequence[Sample],
    packs: Sequence[Sequence[Sequence[int]]],  # [optimizer_step][pack] -> places in samples
    *,
    batch: Sequence[Sample] | None = None,
    global_tokens: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    **more: Any,
) -> RankWork:
    """The work of a rank that has these rows of a batch (all of it, unless that is given)."""
    steps = [[list(pack) for pack in step] for step in packs]
    chosen = [place for step in steps for pack in step for place in pack]
    numbers = list(advantages) if advantages is not None else [1.0] * len(samples)
    part = RankPlan(list(range(len(samples))), steps)
    ordered = RankPlan(chosen, part.in_pack_order().packs)
    tokens = [
        sum(samples[place].row.policy_len for pack in step for place in pack) for step in steps
    ]
    return RankWork(
        partition_id=more.pop("partition_id", PARTITION),
        train_step=more.pop("train_step", 1),
        members=[samples[place].row for place in chosen],
        part=ordered,
        advantages=[numbers[place] for place in chosen],
        global_tokens=list(global_tokens if global_tokens is not None else tokens),
        traits=BatchTraits.of([one.row for one in batch or samples]),
        **more,
    )
