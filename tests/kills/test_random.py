"""Processes die at random under load, and throughput comes back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.deadline import eventually
from tests.history.calls import Mix
from tests.history.checker import check
from tests.history.races import in_threads
from tests.history.words import story
from tests.kills.planes import Killed

RANDOM_S = float(os.environ.get("FAULTS_RANDOM_S", "120"))
MIX = Mix(die=0.0, leave=0.0, cut=0.02)
BETWEEN_S = 1.5

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


class Killer:
    """Kills the process of a store now and then, until it is told to stop."""

    def __init__(self, plane: Killed, roles: list[str], seed: int) -> None:
        self._plane = plane
        self._chance = random.Random(seed)
        self._roles = roles
        self._over = threading.Event()
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        try:
            while not self._over.wait(BETWEEN_S * self._chance.random()):
                self._plane.kill(self._chance.choice(self._roles))
        except BaseException as error:
            self.failed = error


def _for_a_while(plane: Killed, roles: list[str], seed: int, seconds: float) -> int:
    """Histories while processes die, all legal; how many processes died."""
    before = plane.kills
    until = time.monotonic() + seconds
    round_ = 0
    with Killer(plane, roles, seed):
        while time.monotonic() < until:
            told = in_threads(plane, seed + round_, MIX, clients=4, calls=40)  # type: ignore[arg-type]
            found = check(told)
            if found is not None:
                print(story(told))
            assert found is None, f"FAULTS_SEED={seed}, round {round_}: {found}"
            round_ += 1
    plane.is_empty()
    kills = plane.kills - before
    print(f"{kills} kills, {round_} histories; back in {median(plane.back_s):.2f} s (median)")
    return kills


def test_one_process_for_both_stores_dies_at_random(one_process: Killed, seed: int) -> None:
    assert _for_a_while(one_process, ["tags"], seed, RANDOM_S / 2)


@pytest.mark.ray
def test_processes_of_either_store_die_at_random(two_processes: Killed, seed: int) -> None:
    assert _for_a_while(two_processes, ["tags", "values"], seed, RANDOM_S / 2)


def test_throughput_comes_back(one_process: Killed) -> None:
    """To 90 % within 15 s of a kill: medians of rates over a second, before and after."""
    client = one_process.client
    row = {"x": torch.arange(1000)}

    def rate(seconds: float) -> float:
        rates: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            for number in range(200):
                client.kv_put(f"k{number}", "rate", row, {"n": number})
            rates.append(200 / (time.monotonic() - began))
        return median(rates)

    rate(1.0)
    before = rate(3.0)
    one_process.kill("tags")
    killed = time.monotonic()
    after = rate(1.0)
    while after < 0.9 * before and time.monotonic() < killed + 15.0:
        after = rate(1.0)
    print(f"{after / before:.2f} of the rate before, {time.monotonic() - killed:.1f} s after")
    client.kv_drop_partition("rate")
    assert after >= 0.9 * before


def _children() -> list[int]:
    """Processes that serve a plane of this process, or are about to."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    serving: list[int] = []
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"dataplane.server.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                serving.append(pid)
    return serving


def test_a_process_that_dies_while_it_comes_back_loses_nothing(
    one_process: Killed, seed: int
) -> None:
    """Ten deaths in a row, most of them before the plane has answered once."""
    chance, client = random.Random(seed), one_process.client
    rows = {f"k{number}": torch.full((2000,), number) for number in range(50)}
    for key, row in rows.items():
        client.kv_put(key, "back", {"x": row}, {"key": key})
    for _ in range(10):
        (pid,) = eventually(_children, "a process is there")
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.random() * 0.9)  # anywhere in its start, and after it
    listing = client.kv_list("back")
    assert sorted(listing.keys) == sorted(rows)
    got = client.kv_batch_get(listing.keys, "back", layout="list")
    for key, row in zip(got.keys, got.fields["x"], strict=True):
        assert torch.equal(row, rows[key])
    client.kv_drop_partition("back")
    one_process.is_empty()
