"""Trackers: strict lines, optional packages, and none of them in training's way."""

from __future__ import annotations

import builtins
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.deadline import eventually
from trainer.report import (
    Tracker,
    TrackerNotInstalled,
    Trackers,
    jsonl,
    open_trackers,
    read_metrics,
    tensorboard,
    trackio,
    wandb,
)


class Kept:
    """A tracker that keeps what it is told; it waits for `gate` before each call, if there is one,
    and raises what it is given."""

    def __init__(
        self, *, gate: threading.Event | None = None, error: BaseException | None = None
    ) -> None:
        self.calls: list[tuple[dict[str, float], int]] = []
        self.asked = 0
        self.closed = 0
        self._gate = gate
        self._error = error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.asked += 1
        if self._gate is not None:
            assert self._gate.wait(60)
        if self._error is not None:
            raise self._error
        self.calls.append((dict(values), step))

    def close(self) -> None:
        self.closed += 1


# -- several at once -------------------------------------------------------------------------


def test_every_tracker_gets_every_call_in_order() -> None:
    one, other = Kept(), Kept()
    trackers = Trackers({"one": one, "other": other})
    values = {"a": 1.0}
    for step in range(50):
        values["a"] = float(step)  # the caller's own, and changed after the call
        trackers.log(values, step)
    trackers.close()
    expected = [({"a": float(step)}, step) for step in range(50)]
    assert one.calls == other.calls == expected
    assert (one.closed, other.closed) == (1, 1)
    assert trackers.dropped == trackers.failures == {"one": 0, "other": 0}


def test_a_tracker_that_hangs_delays_nobody_and_loses_its_oldest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    slow, fast = Kept(gate=gate), Kept()
    trackers = Trackers({"slow": slow, "fast": fast}, capacity=4)
    try:
        trackers.log({"a": 0.0}, 0)
        eventually(lambda: slow.asked == 1, "the slow tracker has its first call")
        for step in range(1, 11):  # returns although nobody takes them
            trackers.log({"a": float(step)}, step)
            eventually(lambda step=step: len(fast.calls) == step + 1, "the fast one has it")
        assert trackers.dropped == {"slow": 6, "fast": 0}
    finally:
        gate.set()
    trackers.close()
    assert [step for _, step in slow.calls] == [0, 7, 8, 9, 10]
    assert sum("too slow" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("error", [RuntimeError("no quota"), SystemExit(3)], ids=repr)
def test_a_tracker_that_raises_is_complained_of_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Kept(error=error), Kept()
    trackers = Trackers({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            trackers.log({"a": 1.0}, step)
        trackers.close()
    assert len(good.calls) == bad.asked == trackers.failures["bad"] == 5
    (record,) = caplog.records
    assert "bad" in record.message
    assert str(error) in record.message
    assert bad.closed == 1


def test_closing_is_bounded_and_what_comes_after_it_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    hung = Kept(gate=gate)
    trackers = Trackers({"hung": hung})
    for step in range(3):
        trackers.log({"a": 1.0}, step)
    eventually(lambda: hung.asked == 1, "it hangs in its first call")
    trackers.close(timeout_s=0.05)
    trackers.log({"a": 1.0}, 3)
    assert trackers.dropped == {"hung": 3}
    assert "2 calls are lost" in caplog.text
    gate.set()
    eventually(lambda: hung.closed, "its thread ends in the end")


# -- lines of JSON ---------------------------------------------------------------------------


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def test_a_line_is_strict_json_and_counts_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    tracker = jsonl(path)
    tracker.log({"a": 1.5, "n": 3, "nan": math.nan, "inf": -math.inf, "prüfung": 0.1}, 7)
    tracker.log({}, 8)
    tracker.close()
    tracker.close()
    first, second = map(strict, path.read_text(encoding="utf-8").splitlines())
    assert first["step"] == 7
    assert first["non_finite"] == 2
    assert first["values"] == {"a": 1.5, "n": 3, "nan": None, "inf": None, "prüfung": 0.1}
    assert first["time"] <= second["time"]
    assert (second["values"], second["non_finite"]) == ({}, 0)
    read = list(read_metrics(path))
    assert [line.step for line in read] == [7, 8]
    assert read[0].values == {"a": 1.5, "n": 3, "prüfung": 0.1}


@pytest.mark.parametrize("torn", ['{"step":2,"ti', '{"step":2}' + " " * 70_000])
def test_a_run_that_is_resumed_cuts_off_a_torn_line_and_goes_on(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    before = jsonl(path)
    before.log({"a": 1.0}, 1)
    before.close()
    with path.open("a") as file:
        file.write(torn)
    assert [line.step for line in read_metrics(path)] == [1]
    after = jsonl(path)
    after.log({"a": 2.0}, 2)
    after.close()
    assert [strict(text)["step"] for text in path.read_text().splitlines()] == [1, 2]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    path = tmp_path / "metrics.jsonl"
    tracker = jsonl(path)
    tracker.log({"a": 1.0}, 1)
    real = os.pwrite

    def half(file: int, data: memoryview, at: int) -> int:
        if at == path.stat().st_size and len(data) > 20:
            return real(file, data[:20], at)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="No space"):
            tracker.log({"a": 2.0}, 2)
    assert [strict(text)["step"] for text in path.read_text().splitlines()] == [1]
    tracker.log({"a": 3.0}, 3)
    tracker.close()
    assert [strict(text)["step"] for text in path.read_text().splitlines()] == [1, 3]


# -- packages --------------------------------------------------------------------------------


def test_tensorboard_has_the_points(tmp_path: Path) -> None:
    tracker = tensorboard(tmp_path / "tb")
    for step in (1, 2):
        tracker.log({"response/rewards/mean": step / 4}, step)
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    points = events.Scalars("response/rewards/mean")
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.5)]


class StandIn(ModuleType):
    """A package with the face of wandb or trackio, whose runs keep what they are told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.finished = 0
        self.threads: set[str] = set()

    def init(self, **arguments: Any) -> StandIn:
        self.begun.append(arguments)
        self.threads.add(threading.current_thread().name)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_begins_off_line_in_its_own_thread_and_may_go_back_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = wandb("p", name="run", folder=tmp_path, config={"seed": 1}, run_id="r1", offline=True)
    assert package.begun == []  # it may ask a network: not in the caller's thread
    trackers = Trackers({"wandb": tracker})
    trackers.log({"loss": 1.0}, 40)
    trackers.log({"reward": 0.5}, 10)
    trackers.close()
    (begun,) = package.begun
    assert begun == {
        "project": "p", "name": "run", "dir": str(tmp_path), "config": {"seed": 1},
        "id": "r1", "resume": "allow", "mode": "offline",
    }  # fmt: skip
    assert package.threads == {"tracker-wandb"}
    assert package.metrics == [("step", None), ("*", "step")]
    assert package.logged == [
        ({"loss": 1.0, "step": 40}, None),
        ({"reward": 0.5, "step": 10}, None),
    ]
    assert package.finished == 1


def test_trackio_logs_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    package = StandIn("trackio")
    monkeypatch.setitem(sys.modules, "trackio", package)
    tracker = trackio("p", name="run")
    tracker.log({"loss": 1.0}, 3)
    tracker.close()
    assert package.begun == [{"project": "p", "name": "run", "config": {}, "resume": "allow"}]
    assert package.logged == [({"loss": 1.0}, 3)]
    assert package.finished == 1


def test_a_run_that_never_began_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    package = StandIn("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    wandb("p").close()
    assert package.finished == 0


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("wandb", lambda _: wandb("p")),
        ("trackio", lambda _: trackio("p")),
        ("tensorboard", tensorboard),
    ],
)
def test_a_package_that_is_not_there_is_named(
    name: str, make: Callable[[Path], Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(wanted: str, *rest: Any) -> Any:
        if wanted.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(wanted, *rest)

    for module in list(sys.modules):
        if module.split(".")[0] == name or module.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TrackerNotInstalled, match=f"pip install {name}"):
        make(tmp_path)


# -- by settings -----------------------------------------------------------------------------


def test_trackers_are_opened_by_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, local = StandIn("wandb"), StandIn("trackio")
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setitem(sys.modules, "trackio", local)
    trackers = open_trackers(
        [
            ("jsonl", {}),
            ("tensorboard", {"path": "tb"}),
            ("wandb", {"project": "mine", "offline": True}),
            ("trackio", {}),
        ],
        tmp_path,
        name="quickstart",
        config={"seed": 1},
    )
    trackers.log({"a": 1.0}, 1)
    trackers.close()
    assert trackers.failures == dict.fromkeys(["jsonl", "tensorboard", "wandb", "trackio"], 0)
    assert [line.values for line in read_metrics(tmp_path / "metrics.jsonl")] == [{"a": 1.0}]
    assert list((tmp_path / "tb").iterdir())
    assert service.begun[0]["project"] == "mine"
    assert service.begun[0]["dir"] == str(tmp_path)
    assert local.begun[0]["name"] == "quickstart"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([("mlflow", {})], "'mlflow' is none of jsonl, tensorboard, wandb, trackio"),
        ([("jsonl", {}), ("jsonl", {})], "'jsonl' is there twice"),
        ([("jsonl", {"fodler": 1})], "no setting fodler"),
        ([("wandb", {"fodler": 1})], "fodler"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    wanted: list[tuple[str, dict[str, Any]]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        open_trackers(wanted, tmp_path, name="run")
