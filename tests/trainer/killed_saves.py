"""Saves that are killed before, or in the middle of, every one of their steps on the disk.

`python -m tests.trainer.killed_saves FOLDER` prints what was found after each, as lines of JSON.
One process forks itself for every kill: it loads neither torch nor threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint import Checkpoint, Checkpoints, CheckpointUnusable, TrainState, disk

STEPS = ("write", "sync_file", "sync_folder", "rename", "remove")


def fill(folder: Path, step: int) -> None:
    """A few files, as ranks and plane would leave them."""
    (folder / "weights" / "rank0").mkdir(parents=True, exist_ok=True)
    (folder / "weights" / "model.safetensors").write_bytes(b"weights %d" % step * 20)
    (folder / "weights" / "rank0" / "optimizer.safetensors").write_bytes(b"moments %d" % step)


def save(checkpoints: Checkpoints, step: int, run_id: str = "run") -> None:
    """A checkpoint of this step."""
    with checkpoints.saving(step) as saving:
        fill(saving.folder, step)
        saving.plane.mkdir()
        (saving.plane / "rows").write_bytes(b"rows")
        saving.write_state(TrainState(cur_step=step, model_step=step, run_id=run_id, seed=7))
        saving.write_rollouts({"position": step})
        saving.publish()


def export(checkpoints: Checkpoints, step: int) -> None:
    """An export of this step."""
    with checkpoints.exporting(step) as saving:
        (saving.folder / "config.json").write_text("{}")
        saving.publish()


def _keep_one(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=1, keep_exports=1)


def _before_next(checkpoints: Checkpoints) -> None:
    checkpoints.begin("run")
    save(checkpoints, 2)
    export(checkpoints, 2)


def _next(checkpoints: Checkpoints) -> None:
    save(checkpoints, 4)
    export(checkpoints, 4)


def _keep_all(folder: Path) -> Checkpoints:
    return Checkpoints(folder)


def _before_again(checkpoints: Checkpoints) -> None:
    checkpoints.begin("run")
    save(checkpoints, 2)
    save(checkpoints, 4)


def _again(checkpoints: Checkpoints) -> None:
    save(checkpoints, 4)


SCENES: dict[str, tuple[Callable[[Path], Checkpoints], Any, Any]] = {
    "next": (_keep_one, _before_next, _next),
    "again": (_keep_all, _before_again, _again),
}


def _killed_at(count: int, halfway: bool, act: Callable[[], None]) -> str | None:
    """Do it in a child that dies at this step; the step, None if it came to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return said
        assert os.WEXITSTATUS(status) == 0, "the save itself failed"
        return None
    try:
        done = 0

        def dying(name: str, real: Callable[..., None]) -> Callable[..., None]:
            def step(*args: Any) -> None:
                nonlocal done
                done += 1
                if done != count:
                    return real(*args)
                os.write(write, name.encode())
                if halfway and name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                if halfway and name == "remove":
                    next(path for path in Path(args[0]).rglob("*") if path.is_file()).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
                return None

            return step

        for name in STEPS:
            setattr(disk, name, dying(name, getattr(disk, name)))
        act()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _found(checkpoints: Checkpoints) -> dict[str, Any]:
    latest = checkpoints.latest()
    return {
        "step": None if latest.checkpoint is None else latest.checkpoint.step,
        "refused": [error.reason for error in latest.refused],
    }


def _broken(checkpoints: Checkpoints) -> list[str]:
    """What has the name of a checkpoint and is none."""
    found: list[str] = []
    for step in checkpoints.saved.numbers():
        try:
            Checkpoint.read(checkpoints.saved.path(step))
        except CheckpointUnusable as error:
            found.append(str(error))
    return found


def main(folder: Path) -> None:
    """Go through all scenes."""
    for scene, (opened, before, act) in SCENES.items():
        base = folder / scene
        before(opened(base))
        for halfway in (False, True):
            for count in range(1, 1000):
                place = folder / f"{scene}-{halfway}-{count}"
                shutil.copytree(base, place)
                step = _killed_at(count, halfway, lambda: act(opened(place)))  # noqa: B023
                if step is None:
                    break
                checkpoints = opened(place)
                line = {"scene": scene, "count": count, "halfway": halfway, "killed_in": step}
                line["before"] = _found(checkpoints)
                line["broken"] = _broken(checkpoints)
                checkpoints.recover()
                line["after"] = _found(checkpoints)
                line["left"] = sorted(path.name for path in (*place.glob(".*"), *place.glob("*/*")))
                line["again"] = [str(path) for path in checkpoints.recover()]
                save(checkpoints, 6)
                line["later"] = _found(checkpoints)
                print(json.dumps(line))
                shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
