"""Checkpoints on the disk: whole or not there, counted, and found again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.killed_saves import export, fill, save
from trainer.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointUnusable,
    TrainState,
    disk,
    manifest,
    random_states,
    restore_random_states,
)

CHILD_S = 120


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory: a disk takes tens of milliseconds to sync, and these sync a lot."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir="/dev/shm") as folder:
        yield Path(folder)


def begun(folder: Path, run_id: str = "run", **settings: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **settings)
    checkpoints.begin(run_id)
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer_meta.json").read_text())


def step_of(checkpoints: Checkpoints) -> int | None:
    latest = checkpoints.latest().checkpoint
    return None if latest is None else latest.step


# -- saving and finding --------------------------------------------------------------------------


def test_a_checkpoint_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path)
    state = TrainState(
        cur_step=40, model_step=38, run_id="run", seed=7,
        random=random_states(), progress={"warmed_up": True, "milestones": {"a": 0.25}},
    )  # fmt: skip
    with checkpoints.saving(40) as saving:
        fill(saving.folder, 40)
        saving.plane.mkdir()
        saving.write_state(state)
        saving.write_rollouts({"tasks": {"sums": {"step": 40, "epoch": 2}}})
        assert step_of(checkpoints) is None  # nothing counts before it is published
        assert saving.publish() == tmp_path / "checkpoints" / "ckpt-step-40"
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert found.state == state
    assert found.step == 40
    assert found.rollouts == {"tasks": {"sums": {"step": 40, "epoch": 2}}}
    assert (found.weights / "model.safetensors").read_bytes() == b"weights 40" * 20
    assert found.plane == found.path / "plane"
    assert names(found.path) == [
        "manifest.json", "manifest.json.sha256", "plane", "rollouts.json", "train_state.json",
        "weights",
    ]  # fmt: skip
    plain = json.loads((found.path / "train_state.json").read_text())
    assert {"cur_step": 40, "model_step": 38, "run_id": "run", "seed": 7}.items() <= plain.items()


def test_what_was_not_saved_is_none(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path)
    with checkpoints.saving(1) as saving:
        saving.write_state(TrainState(cur_step=1, model_step=1, run_id="run", seed=7))
        saving.publish()
    found = checkpoints.latest().checkpoint
    assert found is not None
    assert found.rollouts is found.plane is None


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path)
    save(checkpoints, 2)
    with pytest.raises(RuntimeError, match="a rank died"), checkpoints.saving(4) as saving:
        fill(saving.folder, 4)
        raise RuntimeError("a rank died")
    with checkpoints.saving(4):
        pass  # never published
    assert names(tmp_path / "checkpoints") == ["ckpt-step-2"]
    assert step_of(checkpoints) == 2


@pytest.mark.parametrize(
    "state",
    [
        None,
        TrainState(cur_step=3, model_step=3, run_id="run", seed=7),
        TrainState(cur_step=4, model_step=4, run_id="other", seed=7),
    ],
)
def test_a_state_of_something_else_is_not_published(
    state: TrainState | None, tmp_path: Path
) -> None:
    checkpoints = begun(tmp_path)
    unusable = pytest.raises(CheckpointUnusable, match=r"train_state\.json")
    with unusable, checkpoints.saving(4) as saving:
        if state is not None:
            saving.write_state(state)
        saving.publish()
    assert names(tmp_path / "checkpoints") == []


def test_saving_needs_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="begin one before saving"):
        Checkpoints(tmp_path).saving(4)


def test_numbers_that_json_has_none_for_are_refused(tmp_path: Path) -> None:
    state = TrainState(
        cur_step=4, model_step=4, run_id="run", seed=7, progress={"reward": float("nan")}
    )
    with pytest.raises(ValueError, match="JSON"), begun(tmp_path).saving(4) as saving:
        saving.write_state(state)


# -- which of them stay --------------------------------------------------------------------------


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path, keep=2, keep_exports=1)
    for step in (2, 4, 6, 10):
        save(checkpoints, step)
        export(checkpoints, step)
    assert names(tmp_path / "checkpoints") == ["ckpt-step-10", "ckpt-step-6"]
    assert names(tmp_path / "hf") == ["hf-step-10"]
    assert record(tmp_path)["experiments"] == [
        {"run_id": "run", "checkpoints": [6, 10], "exports": [10]}
    ]
    assert step_of(checkpoints) == 10  # by number, not by name


def test_all_are_kept_by_default(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path)
    for step in (2, 4, 6):
        save(checkpoints, step)
    assert checkpoints.saved.numbers() == [2, 4, 6]


def test_the_latest_experiment_counts(tmp_path: Path) -> None:
    first = begun(tmp_path, "first")
    save(first, 2, "first")
    save(first, 4, "first")
    second = begun(tmp_path, "second")
    assert second.run_id == "second"
    assert step_of(second) is None  # never that of another experiment
    save(second, 2, "second")
    assert step_of(second) == 2
    assert record(tmp_path)["experiments"] == [
        {"run_id": "first", "checkpoints": [4], "exports": []},
        {"run_id": "second", "checkpoints": [2], "exports": []},
    ]
    second.begin("first")  # and back
    assert step_of(second) == 4


def test_what_was_saved_beyond_the_step_that_is_saved_again_goes(tmp_path: Path) -> None:
    """Training went back to step 2, so 4 and 6 are of another past."""
    checkpoints = begun(tmp_path)
    for step in (2, 4, 6):
        save(checkpoints, step)
        export(checkpoints, step)
    save(checkpoints, 3)
    export(checkpoints, 3)
    assert checkpoints.saved.numbers() == checkpoints.exported.numbers() == [2, 3]
    assert step_of(checkpoints) == 3


def test_a_lost_record_is_made_again_from_what_is_there(tmp_path: Path) -> None:
    times = iter([10.0, 20.0, 30.0])
    first = begun(tmp_path, "first", clock=lambda: next(times))
    save(first, 2, "first")
    first.begin("second")
    save(first, 4, "second")
    export(first, 4)
    (tmp_path / "trainer_meta.json").unlink()
    found = Checkpoints(tmp_path)
    assert step_of(found) == 4
    found.recover()
    assert record(tmp_path)["experiments"] == [
        {"run_id": "first", "checkpoints": [2], "exports": []},
        {"run_id": "second", "checkpoints": [4], "exports": [4]},
    ]


def test_a_damaged_record_is_refused_with_what_to_do(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path)
    save(checkpoints, 2)
    (tmp_path / "trainer_meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer_meta\.json.* move it away"):
        checkpoints.latest()


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    checkpoints = begun(tmp_path, keep=1)
    save(checkpoints, 2)
    others = ["ckpt-step-2x", "ckpt-step-2.old", "notes", "ckpt-step-2.partial-zz"]
    for name in others:
        (tmp_path / "checkpoints" / name).mkdir()
    assert checkpoints.recover() == []
    save(checkpoints, 4)
    assert names(tmp_path / "checkpoints") == sorted([*others, "ckpt-step-4"])


# -- damage --------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _rewrite(path: Path) -> None:
    """Another version, under a checksum that fits."""
    data = json.loads(path.read_bytes())
    data["version"] = 9
    content = json.dumps(data).encode()
    path.write_bytes(content)
    checksum = manifest._checksum_line(content)  # pyright: ignore[reportPrivateUsage]
    path.with_name("manifest.json.sha256").write_bytes(checksum)


@pytest.mark.parametrize(
    ("file", "harm", "reason"),
    [
        ("manifest.json", _flip, "its manifest is not what was written"),
        ("manifest.json", Path.unlink, "its manifest cannot be read"),
        ("manifest.json.sha256", Path.unlink, "its manifest cannot be read"),
        ("manifest.json", _rewrite, "it has version 9, and this program reads version 1"),
        ("weights/model.safetensors", _flip, "weights/model.safetensors has changed"),
        ("weights/model.safetensors", Path.unlink, "weights/model.safetensors cannot be read"),
        (
            "weights/rank0/optimizer.safetensors",
            lambda path: path.write_bytes(b""),
            "optimizer.safetensors has 0 bytes and was saved with 9",
        ),
        ("train_state.json", _flip, "train_state.json has changed"),
        ("plane/rows", Path.unlink, "plane/rows cannot be read"),
    ],
)
def test_a_damaged_one_is_refused_and_the_one_before_is_offered(
    file: str, harm: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    checkpoints = begun(tmp_path)
    save(checkpoints, 2)
    save(checkpoints, 4)
    path = tmp_path / "checkpoints" / "ckpt-step-4"
    harm(path / file)
    latest = checkpoints.latest()
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 2
    (refused,) = latest.refused
    assert refused.path == path
    assert reason in refused.reason
    assert str(path) in str(refused)
    save(checkpoints, 4)  # training gets there again
    assert step_of(checkpoints) == 4


def test_large_files_are_known_by_their_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "HASHED_BYTES", 100)
    checkpoints = begun(tmp_path)
    save(checkpoints, 2)
    weights = tmp_path / "checkpoints" / "ckpt-step-2" / "weights" / "model.safetensors"
    _flip(weights)
    assert step_of(checkpoints) == 2
    weights.write_bytes(weights.read_bytes()[:-1])
    assert step_of(checkpoints) is None


# -- kills and power -----------------------------------------------------------------------------


def test_a_kill_at_any_step_leaves_the_previous_or_the_new_one_whole(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.trainer.killed_saves", str(tmp_path)],
        capture_output=True, text=True, timeout=CHILD_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    seen = {(line["scene"], line["killed_in"], line["halfway"]) for line in lines}
    for scene in ("next", "again"):
        for step in ("write", "sync_file", "sync_folder", "rename", "remove"):
            assert {(scene, step, False), (scene, step, True)} <= seen
    for line in lines:
        where = f"{line['scene']} {line['count']} in {line['killed_in']}"
        before, after, later = line["before"], line["after"], line["later"]
        assert before["refused"] == after["refused"] == later["refused"] == [], where
        assert after["step"] in (2, 4), where
        assert later["step"] == 6, where
        assert line["again"] == line["broken"] == [], where
        folders = [name for name in line["left"] if name.startswith("ckpt")]
        if line["scene"] == "next":
            assert before["step"] == after["step"], where
            assert folders == [f"ckpt-step-{after['step']}"], where
        else:
            assert after["step"] == 4, where  # one that was set aside is put back
            assert folders == ["ckpt-step-2", "ckpt-step-4"], where
        others = [name for name in line["left"] if name not in folders]
        assert others in (["hf-step-2"], ["hf-step-4"], []), where
    of_next = [
        [
            line["after"]["step"]
            for line in lines
            if line["scene"] == "next" and line["halfway"] is h
        ]
        for h in (False, True)
    ]
    for steps in of_next:
        assert steps == sorted(steps)  # once it is there it stays
        assert set(steps) == {2, 4}


def test_everything_is_on_the_disk_before_it_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = begun(tmp_path, keep=1)
    save(checkpoints, 2)
    done: list[tuple[str, str]] = []

    def watch(name: str) -> None:
        real = getattr(disk, name)

        def step(*paths: Any) -> None:
            done.append((name, Path(paths[-1] if name == "rename" else paths[0]).name))
            real(*paths)

        monkeypatch.setattr(disk, name, step)

    for name in ("sync_file", "sync_folder", "rename", "remove"):
        watch(name)
    save(checkpoints, 4)
    whole = done.index(("rename", "ckpt-step-4"))
    before = done[:whole]
    assert {name for what, name in before if what == "sync_file"} == {
        "model.safetensors", "optimizer.safetensors", "rows", "train_state.json", "rollouts.json",
        "manifest.json", "manifest.json.sha256",
    }  # fmt: skip
    folders = [name for what, name in before if what == "sync_folder"]
    assert sorted(folders[:-1]) == ["plane", "rank0", "weights"]
    assert folders[-1].startswith("ckpt-step-4.partial-")  # after those in it
    assert before[-1] == ("sync_folder", folders[-1])
    assert done[whole + 1] == ("sync_folder", "checkpoints")
    recorded = done.index(("rename", "trainer_meta.json"))
    assert done[recorded - 1][0] == "sync_file"
    assert done[recorded + 1] == ("sync_folder", tmp_path.name)
    assert whole + 1 < recorded
    gone = [at for at, (_, name) in enumerate(done) if name.startswith("ckpt-step-2")]
    assert min(gone) > recorded + 1


# -- random states -------------------------------------------------------------------------------


def _drawn() -> list[float]:
    return [random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]


def test_random_states_go_through_json_and_go_on() -> None:
    before = random_states()
    try:
        _drawn()
        states = json.loads(json.dumps(random_states()))
        expected = [_drawn() for _ in range(3)]
        restore_random_states(states)
        assert [_drawn() for _ in range(3)] == expected
    finally:
        restore_random_states(before)


@pytest.mark.parametrize("harm", ["python", "numpy", "torch"])
def test_states_that_are_none_change_nothing(harm: str) -> None:
    before = random_states()
    other = {"python": [3, [1, 2], None], "numpy": ["MT19937", [1], 0, 0, 0.0], "torch": "AAAA"}
    for value in (other[harm], None):
        with pytest.raises(ValueError, match="no states of random generators"):
            restore_random_states({**before, harm: value})
    assert random_states() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("cur_step", "4"), ("cur_step", True), ("run_id", None), ("random", []), ("progress", 3)],
)
def test_a_state_is_checked(name: str, value: object) -> None:
    data = TrainState(cur_step=4, model_step=4, run_id="run", seed=7).as_data()
    assert TrainState.from_data(data).cur_step == 4
    with pytest.raises(ValueError, match=name):
        TrainState.from_data({**data, name: value})
