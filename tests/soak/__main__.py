"""`python -m tests.soak`: a plane under load, sampled; exit status 1 if anything has grown.

The load: groups with small and large puts and write-backs, claims that are committed or released,
reads and views, clears that retire, partitions that come and go, clients that come, are killed and
fork, and snapshots every few seconds; with `--kills` the plane's own processes are killed too. At
the end everything is cleared, everybody leaves, and what is held must be what was held at first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from typing import Any

from dataplane.errors import DataplaneError
from tests.deadline import eventually
from tests.faults.processes import Process
from tests.soak.load import USERS, visit
from tests.soak.planes import Soaked, running
from tests.soak.samples import Sample, line, take
from tests.soak.verdict import growth, leaks, refusals, table

SAMPLE_S = 5.0
VISIT_S = 4.0
KILL_S = 60.0
END_S = 60.0
"""How long it may take until nothing is held any more."""


class Soak:
    """One run."""

    def __init__(self, plane: Soaked, seed: int, *, kills: bool) -> None:
        self._plane = plane
        self._chance = random.Random(seed)
        self._kills = kills
        self._stack = contextlib.ExitStack()
        self._users: dict[str, Process] = {}
        self._visitors: list[tuple[Process, float]] = []
        """Each with the moment at which it is killed; those that left by then are not."""
        self.visits = self.killed_visitors = 0
        self.counts: dict[str, Counter[str]] = {}

    def run(self, seconds: float) -> tuple[Sample, list[Sample], Sample]:
        """The sample before all, those under load, and the one after all."""
        plane = self._plane
        plane.client.kv_put("first", "first", None, {"n": 1})
        plane.client.kv_drop_partition("first")  # an answer is kept, as it is after the last clear
        first = take(plane, [], 0.0)
        with self._stack:
            for number, (name, (function, pace_s)) in enumerate(USERS.items()):
                arguments = plane.address, plane.settings, number, pace_s
                self._users[name] = self._stack.enter_context(Process(function, *arguments))
            samples = self._under_load(seconds)
            self._leave()
        last = self._emptied(first)
        return first, samples, last

    def _under_load(self, seconds: float) -> list[Sample]:
        began = time.monotonic()
        samples: list[Sample] = []
        sample_at, visit_at, kill_at = SAMPLE_S, 0.0, KILL_S
        while (now := time.monotonic() - began) < seconds:
            for name, user in self._users.items():
                if user._ours.poll(0):
                    raise AssertionError(f"{name} ended early: {user.says()}")
            self._kill_visitors(time.monotonic())
            if now >= visit_at:
                self._visit()
                visit_at += VISIT_S
            if self._kills and now >= kill_at:
                self._plane.kill(self._plane.kills)
                kill_at += KILL_S
            if now >= sample_at:
                pids = [user.pid for user in self._users.values()]
                try:
                    samples.append(take(self._plane, pids, now))
                    print(line(samples[-1]), flush=True)
                except (DataplaneError, KeyError) as error:
                    print(f"{now:6.0f} s  no sample: {error}", flush=True)
                sample_at += SAMPLE_S
            time.sleep(0.1)
        return samples

    def _visit(self) -> None:
        self.visits += 1
        turns = self._chance.randint(1, 10)
        arguments = self._plane.address, self._plane.settings, 1000 + self.visits, turns
        process = Process(visit, *arguments)
        dies_at = time.monotonic() + (self._chance.uniform(0.3, 2.0) if turns % 2 else 20.0)
        self._visitors.append((process, dies_at))

    def _kill_visitors(self, now: float) -> None:
        left: list[tuple[Process, float]] = []
        for process, dies_at in self._visitors:
            if process._ours.poll(0):
                self.counts.setdefault("visitors", Counter()).update(process.says())
            elif now < dies_at:
                left.append((process, dies_at))
                continue
            else:
                self.killed_visitors += 1
            with process:
                pass  # killed if it is there, and reaped
        self._visitors = left

    def _leave(self) -> None:
        for name, user in self._users.items():
            user.hears("leave")
            self.counts[name] = user.says(60.0)
            user.ends()
        self._kill_visitors(time.monotonic() + 1e6)

    def _emptied(self, first: Sample) -> Sample:
        """Clear everything; the sample of when nothing is held, or of when that was given up."""
        client = self._plane.client
        for name in client.status()["partitions"]:
            client.kv_clear(None, name, where={}, retire=True)
            client.kv_drop_partition(name)
        last = take(self._plane, [], 0.0)
        with contextlib.suppress(AssertionError):
            last = eventually(lambda: self._none_held(first), "nothing is held", within_s=END_S)
        return last if not any(f.over for f in leaks(first, last)) else take(self._plane, [], 0.0)

    def _none_held(self, first: Sample) -> Sample | None:
        now = take(self._plane, [], 0.0)
        return None if any(finding.over for finding in leaks(first, now)) else now


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-s", type=float, help="default: a sixth of it, at least a minute")
    parser.add_argument("--ray", action="store_true", help="hosted by Ray, not in a child process")
    parser.add_argument("--kills", action="store_true", help="kill a store's process every minute")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    # Imported once: processes that come and go are there in milliseconds.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.soak.load"])
    seconds = 60 * asked.minutes
    warm_up_s = asked.warm_up_s or max(60.0, seconds / 6)

    with running("ray" if asked.ray else "embedded") as plane:
        soak = Soak(plane, asked.seed, kills=asked.kills)
        first, samples, last = soak.run(seconds)
        print(f"at first  {line(first)}\nat last   {line(last)}")
    warm = [sample for sample in samples if sample.at_s >= warm_up_s]
    said: dict[str, Any] = {name: dict(counts) for name, counts in soak.counts.items()}
    print(
        f"\n{len(samples)} samples, {len(warm)} of them after {warm_up_s:.0f} s; {soak.visits} "
        f"visitors, {soak.killed_visitors} killed; {plane.kills} kills of the plane's processes"
    )
    for name, counts in said.items():
        print(f"  {name}: {counts}")
    findings = growth(warm, kills=asked.kills) + leaks(first, last)
    findings += refusals(soak.counts, kills=asked.kills)
    print("\n" + table(findings))
    over = [finding.what for finding in findings if finding.over]
    print(f"\nover: {', '.join(over)}" if over else f"\nnothing grew, of {len(findings)} things")
    return bool(over)


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.exit(main())
