"""The folder of a run: who holds it, what is set aside, what is written down of where it ran."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from pathlib import Path

import pytest
import torch

from trainer.environment import VARIABLES, environment
from trainer.run_folder import RunFolder, RunFolderInUse


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path), pytest.raises(RunFolderInUse, match="another run writes to"):
        RunFolder(path).take()
    with RunFolder(path):
        pass  # let go


def test_a_child_does_not_hold_the_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path):
        inherited = [
            int(fd)
            for fd in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path / ".lock")
        ]
        assert len(inherited) == 1
        assert fcntl.fcntl(inherited[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_nothing_is_made_before_it_is_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", keep=1)
    assert folder.checkpoints.latest().checkpoint is None
    assert not folder.path.exists()
    with pytest.raises(RuntimeError, match="no run has begun"):
        _ = folder.run_id


def test_what_an_earlier_run_wrote_is_set_aside(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        with RunFolder(tmp_path) as folder:
            folder.begin(f"run-{number}")
            assert folder.run_id == f"run-{number}"
            assert folder.trajectories.is_dir()
            assert not folder.metrics.exists()
            folder.metrics.write_text(f"of run {number}")
            folder.model.mkdir()
            folder.write_summary({"reward": 0.5})
            folder.checkpoints.exported.path(number).mkdir(parents=True)
    assert (tmp_path / "earlier" / "1" / "metrics.jsonl").read_text() == "of run 1"
    assert (tmp_path / "earlier" / "2" / "metrics.jsonl").read_text() == "of run 2"
    assert (tmp_path / "metrics.jsonl").read_text() == "of run 3"
    assert len(list((tmp_path / "hf").iterdir())) == 3  # they belong to the record


def test_a_resumed_run_goes_on_where_it_wrote(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin("run")
        folder.metrics.write_text("a line")
    with RunFolder(tmp_path) as folder:
        folder.go_on()
        assert folder.run_id == "run"
        assert folder.metrics.read_text() == "a line"
    assert not (tmp_path / "earlier").exists()


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin("run")
    left = [
        tmp_path / ".summary.json.0123456789ab",
        tmp_path / "logs" / ".env.json.0123456789ab",
        tmp_path / "checkpoints" / "ckpt-step-4.partial-0123456789ab" / "weights",
        tmp_path / ".model.0123456789ab" / "weights",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    with RunFolder(tmp_path):
        assert [path for path in left if path.exists()] == []
        assert (tmp_path / "trainer_meta.json").exists()


def test_a_summary_holds_finite_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary({"reward": 0.25, "seed": 42})
    assert json.loads(folder.summary.read_text()) == {"reward": 0.25, "seed": 42}
    with pytest.raises(ValueError, match="JSON"):
        folder.write_summary({"reward": float("nan")})
    assert json.loads(folder.summary.read_text()) == {"reward": 0.25, "seed": 42}
    assert files(tmp_path) == {"summary.json"}


def test_the_environment_is_versions_and_listed_variables() -> None:
    found = environment(
        {
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": "ray://me:planted-secret@host:1000",
            "HF_TOKEN": "planted-secret",
            "SOME_SETTING": "planted-setting",
            "LANG": "planted-secret too",
        }
    )
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert set(found["packages"]) >= {"torch", "ray", "transformers", "peft"}
    assert found["variables"] == {
        "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "ray://***@host:1000", "LANG": "*** too",
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found
    assert "planted" not in json.dumps(found)
    assert not [name for name in VARIABLES if "TOKEN" in name and name != "TOKENIZERS_PARALLELISM"]
