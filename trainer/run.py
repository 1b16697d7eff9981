"""The command `trainer`: run a file of settings, or say what is wrong with it.

Owns the command line, and the only place of the trainer where code is loaded by its dotted name:
rollouts, functions that make models, losses of one's own.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from trainer.checkpoint import Checkpoint
    from trainer.config import RunSettings
    from trainer.model_folder import Make
    from trainer.rollouts import OpenRollouts
    from trainer.run_folder import RunFolder

# Imports of torch take seconds; `--help` needs none, so they are inside of the functions.

_log = logging.getLogger(__name__)

app = typer.Typer(
    name="trainer",
    help="Reinforcement-learning post-training of language models, over a data plane.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(help="A YAML file of settings.", show_default=False)]
Set = Annotated[
    list[str],
    typer.Option("--set", help="section.name=value, over the file. Repeatable.", metavar="SETTING"),
]


@app.callback()
def main_callback() -> None:
    """Reinforcement-learning post-training of language models, over a data plane."""


@app.command()
def validate(config: Config, assignments: Set = []) -> None:  # noqa: B006 (typer copies it)
    """Print the settings that are effective, defaults included, or what is wrong with them."""
    from trainer.config import load_settings, masked
    from trainer.config.yaml_file import written

    with _readable_errors():
        settings = load_settings(config, assignments, resolve=load_dotted)
        typer.echo(written(masked(settings.as_data())), nl=False)


@app.command()
def run(
    config: Config,
    assignments: Set = [],  # noqa: B006 (typer copies it)
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load what can be loaded, and print the plan.")
    ] = False,
) -> None:
    """Train.

    Example: trainer run deploy/examples/quickstart.yaml --set train.total_train_steps=20
    """
    from trainer.config import load_settings

    with _readable_errors():
        settings = load_settings(config, assignments, resolve=load_dotted)
        loaded = load_code(settings, str(config))
        if dry_run:
            _print_outline(settings, loaded, str(config), resume=resume)
            return
        with run_folder_of(settings) as folder:
            start = begin(settings, folder, resume=resume)
            model_path = _model_path(settings, loaded, folder.model, str(config))
            with _logged_to(folder.log):
                _train(settings, folder, loaded, model_path, start)


def _train(
    settings: RunSettings,
    folder: RunFolder,
    loaded: Loaded,
    model_path: Path,
    start: Checkpoint | None,
) -> None:
    import asyncio

    from trainer.loop.colocated import train

    try:
        asyncio.run(
            train(
                settings,
                folder,
                open_rollouts=loaded.open_rollouts,
                model_path=str(model_path),
                resume=start,
            )
        )
    except Exception:
        _log.exception("the run failed at")
        raise


def _print_outline(settings: RunSettings, loaded: Loaded, source: str, *, resume: bool) -> None:
    """Everything that can be known without a process or a run folder."""
    from trainer.config import ConfigError
    from trainer.model_folder import model_facts
    from trainer.outline import outline

    start = _start(settings, run_folder_of(settings), resume=resume)
    with tempfile.TemporaryDirectory(prefix="trainer-model-") as place:
        model_path = _model_path(settings, loaded, Path(place) / "model", source)
        try:
            facts = model_facts(model_path, settings.model.tokenizer)
            size = _dataset_size(settings, loaded, model_path, source)
            lines = list(outline(settings, facts, start, dataset_size=size))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(source, [str(error)]) from None
    for line in lines:
        typer.echo(line)


def _dataset_size(
    settings: RunSettings, loaded: Loaded, model_path: Path, source: str
) -> int | None:
    """Prompts of an epoch, where the rollouts know before they are started."""
    from pydantic import ValidationError

    from trainer.config import ConfigError
    from trainer.config.loading import worded

    if loaded.describe is None:
        return None
    try:
        known = loaded.describe(
            settings.rollout_settings(), model_path=str(model_path), seed=settings.seed
        )
    except ValidationError as error:
        lines = [f"rollout.{line}" for line in worded(error)]
        raise ConfigError(source, lines) from None
    except ValueError as error:
        raise ConfigError(source, [f"rollout: {error}"]) from None
    return int(known["dataset_size"])


# -- what is loaded by name ---------------------------------------------------------------------


class Loaded(NamedTuple):
    """The code that the settings name."""

    open_rollouts: OpenRollouts | None
    """None where a run only trains on saved batches."""
    describe: Callable[..., Mapping[str, Any]] | None
    """`describe` of the same module, if it has one: called as `describe(settings, model_path=…,
    seed=…)`, it checks the settings of the rollouts without starting any, and knows
    `dataset_size`."""
    make: Make | None


def load_dotted(dotted: str) -> Any:
    """What `package.module:name` stands for.

    Raises:
        ValueError: nothing; the message says what is missing.
    """
    module_name, _, path = dotted.partition(":")
    if not module_name or not path:
        raise ValueError(f"{dotted!r} is no dotted name; write package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{dotted!r}: {module_name} cannot be imported: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"{dotted!r}: {getattr(found, '__name__', found)} has no {name!r}")
        found = getattr(found, name)
    return found


def load_code(settings: RunSettings, source: str) -> Loaded:
    """All code that the settings name. ConfigError says what is missing."""
    from trainer.config import ConfigError
    from trainer.model_folder import check_model_folder, make_arguments

    problems: list[str] = []
    open_rollouts: Any = None
    describe: Any = None
    make: Any = None
    if settings.rollout is not None and not settings.debug.debug_train:
        dotted = settings.rollout.open
        try:
            open_rollouts = load_dotted(dotted)
            if not inspect.iscoroutinefunction(open_rollouts):
                raise ValueError(f"{dotted!r} is no async function")
            module = importlib.import_module(dotted.partition(":")[0])
            describe = getattr(module, "describe", None)
        except ValueError as error:
            problems.append(f"rollout.open: {error}")
    try:
        if settings.model.make is not None:
            make = load_dotted(settings.model.make)
            if not callable(make):
                raise ValueError(f"{settings.model.make!r} is no function")
            make_arguments(make, settings.model.options, settings.seed)
        elif settings.model.path is not None:
            check_model_folder(Path(settings.model.path))
    except ValueError as error:
        text = str(error)
        problems.append(text if text.startswith("model.") else f"model.make: {text}")
    if problems:
        raise ConfigError(source, problems)
    return Loaded(open_rollouts, describe, make)


def _model_path(settings: RunSettings, loaded: Loaded, target: Path, source: str) -> Path:
    from trainer.config import ConfigError
    from trainer.model_folder import model_folder

    try:
        return model_folder(settings.model, target, make=loaded.make, seed=settings.seed)
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from None


# -- where a run begins -------------------------------------------------------------------------


def begin(settings: RunSettings, folder: RunFolder, *, resume: bool) -> Checkpoint | None:
    """Begin in a folder that was taken; the checkpoint to go on from, None at the beginning.

    A run that is resumed and was killed before its first checkpoint begins once more, as itself.

    Raises:
        CheckpointError: there is nothing to resume, or nothing whole.
    """
    start = _start(settings, folder, resume=resume)
    if start is None and not (resume and folder.checkpoints.run_id is not None):
        folder.begin(new_run_id(settings))
    else:
        folder.go_on()
    folder.write_settings(settings.as_data())
    folder.write_environment()
    return start


def new_run_id(settings: RunSettings) -> str:
    """Names a run; the same one each time where the run is to be the same each time."""
    mark = str(settings.seed) if settings.deterministic else uuid.uuid4().hex[:12]
    return f"{settings.name}-{mark}"


def _start(settings: RunSettings, folder: RunFolder, *, resume: bool) -> Checkpoint | None:
    from trainer.checkpoint import CheckpointError

    if not (resume or settings.checkpoint.auto_resume):
        return None
    start, refused = folder.checkpoints.latest()
    for error in refused:
        _say(f"trainer: {error}")
    if start is None:
        if refused:
            raise CheckpointError(
                f"no checkpoint of {str(folder.path)!r} is whole; to begin anew, run without "
                "--resume and checkpoint.auto_resume"
            )
        if resume and folder.checkpoints.run_id is None:
            raise CheckpointError(f"{str(folder.path)!r} holds no run to resume")
        return None
    if start.state.seed != settings.seed:
        raise CheckpointError(
            f"{str(start.path)!r} is of a run with seed {start.state.seed}, and seed is "
            f"{settings.seed}"
        )
    _say(f"trainer: goes on from {str(start.path)!r}")
    return start


def run_folder_of(settings: RunSettings) -> RunFolder:
    """The folder of a run, not taken yet."""
    from trainer.run_folder import RunFolder

    return RunFolder(
        settings.folder,
        keep=settings.checkpoint.keep,
        keep_exports=settings.checkpoint.keep_exports,
    )


# -- what is said ---------------------------------------------------------------------------------


def _say(line: str) -> None:
    typer.echo(line, err=True)


@contextmanager
def _readable_errors() -> Generator[None]:
    """What a user can set right is said without a traceback, and the command ends with 2; with 1
    where a run failed that can be resumed."""
    from dataplane import DataplaneError, RequestError
    from trainer.checkpoint import CheckpointError
    from trainer.config import ConfigError
    from trainer.errors import PlanError, RolloutsNotOpened, Starved, UnusableBatch
    from trainer.ranks.outcome import RankError, RankLost
    from trainer.run_folder import RunFolderInUse

    try:
        yield
    except (
        ConfigError, CheckpointError, RunFolderInUse, RequestError, RolloutsNotOpened,
    ) as error:  # fmt: skip
        _say(f"trainer: {error}")
        raise typer.Exit(2) from None
    except (DataplaneError, PlanError, RankError, RankLost, Starved, UnusableBatch) as error:
        _say(
            f"trainer: {type(error).__name__}: {error}\n  logs/trainer.log of the run folder says "
            "where; --resume goes on from the newest checkpoint"
        )
        raise typer.Exit(1) from None


class _Unmasked(logging.Filter):
    """Takes out of a line what looks like a secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        from trainer.config import masked

        record.msg, record.args = masked(record.getMessage()), None
        return True


@contextmanager
def _logged_to(path: Path) -> Generator[None]:
    """What is logged meanwhile goes to this file too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.addFilter(_Unmasked())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    own = logging.getLogger("trainer")
    level = own.level
    own.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        own.setLevel(level)
        handler.close()


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())  # dotted names may be of modules beside the user
    app()


if __name__ == "__main__":
    main()
