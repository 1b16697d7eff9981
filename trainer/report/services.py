"""Trackers of packages that are not among ours: wandb and trackio.

Owns how their runs are begun: at the first value, in the thread that logs, because beginning one
may wait for a network. That the package is there is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from trainer.report.tracker import TrackerNotInstalled

Run: TypeAlias = Any


class Service:
    """A tracker whose run begins with its first value."""

    def __init__(
        self, begin: Callable[[], Run], send: Callable[[Run, dict[str, float], int], None]
    ) -> None:
        self._begin = begin
        self._send = send
        self._run: Run = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the values of a step."""
        if self._run is None:
            self._run = self._begin()
        self._send(self._run, dict(values), step)

    def close(self) -> None:
        """End the run, if it ever began."""
        if self._run is not None:
            self._run.finish()


def wandb(
    project: str,
    *,
    name: str | None = None,
    folder: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    run_id: str | None = None,
    offline: bool = False,
) -> Service:
    """A tracker of wandb. Values are drawn over `step`.

    Args:
        folder: Where it keeps its files.
        run_id: Goes on with the run of this id, if there is one.
        offline: Keep the values in `folder`; `wandb sync` sends them later.

    Raises:
        TrackerNotInstalled: the package is not there.
    """
    try:
        import wandb as untyped  # pyright: ignore[reportMissingImports] (not among our own)
    except ModuleNotFoundError as error:
        raise TrackerNotInstalled("wandb", "wandb") from error
    package = cast("Any", untyped)

    def begin() -> Run:
        run = package.init(
            project=project,
            name=name,
            dir=None if folder is None else str(folder),
            config=dict(config or {}),
            id=run_id,
            resume=None if run_id is None else "allow",
            mode="offline" if offline else None,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    # Its own step must never go back, and optimizer steps count apart from training steps.
    return Service(begin, lambda run, values, step: run.log({**values, "step": step}))


def trackio(
    project: str,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Service:
    """A tracker of trackio; a run of the same name is gone on with.

    Raises:
        TrackerNotInstalled: the package is not there.
    """
    try:
        import trackio as untyped  # pyright: ignore[reportMissingImports] (not among our own)
    except ModuleNotFoundError as error:
        raise TrackerNotInstalled("trackio", "trackio") from error
    package = cast("Any", untyped)
    return Service(
        lambda: package.init(project=project, name=name, config=dict(config or {}), resume="allow"),
        lambda run, values, step: run.log(values, step=step),
    )
