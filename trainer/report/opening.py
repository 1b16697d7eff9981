"""From the settings of a run to its trackers, all of them beside its folder's other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from trainer.report.jsonl import jsonl
from trainer.report.prometheus import prometheus
from trainer.report.services import trackio, wandb
from trainer.report.tensorboard import tensorboard
from trainer.report.tracker import Tracker, Trackers

PROJECT: Final = "trainer"
"""Of services, where settings name none."""

Options = Mapping[str, Any]


def open_trackers(
    wanted: Iterable[tuple[str, Options]],
    folder: str | Path,
    *,
    name: str,
    config: Options | None = None,
) -> Trackers:
    """The trackers of a run.

    Args:
        wanted: Kind and settings of each: `jsonl` and `tensorboard` (`path`), `wandb` (`project`,
            `name`, `run_id`, `offline`), `trackio` (`project`, `name`), `prometheus` (`port`,
            `host`).
        folder: Of the run. A `path` is taken from here; `metrics.jsonl`, `tensorboard` if none is
            given.
        name: Of the run, for services.
        config: Plain settings of the run, which services show. Leave secrets out.

    Raises:
        ValueError: there is no such kind or setting, or one is there twice.
        TrackerNotInstalled: its package is not there.
    """
    root = Path(folder)
    service: dict[str, Any] = {"project": PROJECT, "name": name, "config": config}
    here: dict[str, Any] = {**service, "folder": root}
    makers: dict[str, Callable[[Options], Tracker]] = {
        "jsonl": lambda options: jsonl(root / _path(options, "metrics.jsonl")),
        "tensorboard": lambda options: tensorboard(root / _path(options, "tensorboard")),
        "wandb": lambda options: wandb(**{**here, **options}),
        "trackio": lambda options: trackio(**{**service, **options}),
        "prometheus": lambda options: prometheus(**options),
    }
    made: dict[str, Tracker] = {}
    try:
        for kind, options in wanted:
            if kind in made or kind not in makers:
                why = "there twice" if kind in made else f"none of {', '.join(makers)}"
                raise ValueError(f"trackers: {kind!r} is {why}")
            try:
                made[kind] = makers[kind](options)
            except TypeError as error:
                raise ValueError(f"trackers: {kind}: {error}") from error
    except BaseException:
        for tracker in made.values():
            tracker.close()
        raise
    return Trackers(made)


def _path(options: Options, default: str) -> str:
    unknown = sorted(set(options) - {"path"})
    if unknown:
        raise TypeError(f"it has no setting {', '.join(unknown)}; only `path`")
    return str(options.get("path", default))
