"""The processes of a subject: one long-lived child per role, told what to do over a pipe.

The clock is read in the child, around the call only; the pipe is not in any figure.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.bench import baselines, subjects
from tests.bench.subjects import Subject
from tests.bench.workload import Scale, Workload

SUBJECTS: dict[str, type[Subject]] = {
    cls.name: cls
    for cls in (
        subjects.Dataplane,
        subjects.Embedded,
        subjects.TransferQueue,
        subjects.DropIn,
        baselines.Redis,
        baselines.RayActor,
        baselines.Memcpy,
    )
}


class StepFailed(RuntimeError):
    """A step raised in its process; the text is that process's traceback."""


def _serve(
    pipe: Connection, subject_name: str, workloads: list[type[Workload]], scale: Scale
) -> None:
    """A child's life: do what the pipe says until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch 2.13 warns there about a call of tensordict 0.15's, once per process.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    subject = SUBJECTS[subject_name]()
    loaded: dict[str, Workload] = {}
    known = {cls.name: cls for cls in workloads}
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if what == "load":
                workload = loaded[arguments["name"]] = known[arguments["name"]](scale)
                answer: Any = workload.load()
            elif what == "unload":
                answer = loaded.pop(arguments["name"], None) and None
            elif what == "step":
                name, step = arguments.pop("workload"), arguments.pop("step")
                answer = getattr(loaded[name], step)(subject, **arguments)
            else:
                answer = getattr(subject, what)(**arguments)
            pipe.send((True, answer))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Player:
    """One child process, seen from the runner."""

    def __init__(
        self, subject: str, role: str, workloads: list[type[Workload]], scale: Scale
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.role = f"{subject} {role}"
        self._process = context.Process(
            target=_serve, args=(theirs, subject, workloads, scale), name=self.role, daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, what: str, **arguments: object) -> None:
        """Begin something there."""
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        """Wait for what `send` began."""
        try:
            fine, value = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise StepFailed(
                f"{self.role}: the process died (exit code {self._process.exitcode})"
            ) from None
        if not fine:
            raise StepFailed(f"{self.role}:\n{value}")
        return value

    def call(self, what: str, **arguments: object) -> Any:
        """`send` and `answer`."""
        self.send(what, **arguments)
        return self.answer()

    def end(self) -> None:
        """Close the pipe and see the process out."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Ensemble:
    """All processes of one subject; `workloads.Cast` of the workload that is on."""

    def __init__(self, name: str, workloads: list[type[Workload]], scale: Scale) -> None:
        self.name = name
        self._workloads, self._scale = workloads, scale
        self._on = ""
        self._address: str | None = None
        self._players = [Player(name, "writer", workloads, scale)]
        # Only a bare copy has no second process to read from.
        self._reader = self._players[0]
        if name != "memcpy":
            self._reader = Player(name, "reader", workloads, scale)

    def open(self, ray: str) -> None:
        """Start the system in the writer's process, and join it from the reader's."""
        self._address = self._players[0].call("start", address=ray)
        if self._reader is not self._players[0]:
            self._reader.call("join", address=self._address)

    def begin(self, workload: type[Workload]) -> None:
        """Make that workload's data everywhere, with as many writers as it needs."""
        self._on = workload.name
        extra = min(workload.writers_needed, self._scale.writers) - len(self._players)
        if extra > 0:
            new = [
                Player(self.name, f"writer {i + 1}", self._workloads, self._scale)
                for i in range(extra)
            ]
            _together(new, "join", address=self._address)
            self._players += new
        _together(self._everyone(), "load", name=self._on)

    def finish(self) -> None:
        """Drop the data, and the writers that only this workload needed."""
        _together(self._everyone(), "unload", name=self._on)
        for player in self._players[1:]:
            player.call("close", destroy=False)
            player.end()
        del self._players[1:]

    def close(self) -> None:
        """End the processes and the system."""
        everyone = self._everyone()
        if self._address is not None:
            for player in reversed(everyone):
                player.call("close", destroy=player is everyone[0])
        for player in everyone:
            player.end()

    def writer(self, step: str, **arguments: object) -> Any:
        return self._players[0].call("step", workload=self._on, step=step, **arguments)

    def reader(self, step: str, **arguments: object) -> Any:
        return self._reader.call("step", workload=self._on, step=step, **arguments)

    def writers(self, step: str, **arguments: object) -> list[Any]:
        for index, player in enumerate(self._players):
            player.send("step", workload=self._on, step=step, index=index, **arguments)
        return [player.answer() for player in self._players]

    def _everyone(self) -> list[Player]:
        alone = self._reader is self._players[0]
        return self._players if alone else [*self._players, self._reader]


def _together(players: list[Player], what: str, **arguments: object) -> None:
    for player in players:
        player.send(what, **arguments)
    for player in players:
        player.answer()


def start_ray() -> str:
    """Start a Ray of this run's own, and return its address.

    Logical CPUs: the peer asks for one for its controller and one per storage unit.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The peer's default is 8 threads; it lowers that to the cores there are, with a warning each.
    os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count() or 1))
    # Workers that Ray starts must find this package too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    import ray

    context = ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=2 << 30,
        log_to_driver=False,
        logging_level="ERROR",
    )
    return context.address_info["address"]
