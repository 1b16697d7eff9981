"""An instance in a folder: rows and tags as a checkpoint of the plane, and beside it what the
controller knows and the rows do not say.

    metadata.json           {"storage_saved": true, "user_metadata": {…}, "format": 1}
    controller_state.pkl    JSON: which indexes are taken, what the sampler remembers. The name is
                            TransferQueue's; no pickle is written or read
    simple_storage/         storage_unit_info.json, one entry per value store at that time,
                            and plane/, the checkpoint of the plane (docs/checkpoints.md)

Rows are of one moment, while puts and claims go on; what the controller knows is read after it, and
may know of later claims, which does no harm. The folder is there whole or not at all. Loading takes
the place of all rows at one moment, or changes nothing, whatever the number of value stores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from dataplane.client.core import Core
from dataplane.client.effects import Run, Verb
from dataplane.client.steps import FILE_WORK
from dataplane.client.tags import plane_status
from dataplane.errors import CheckpointDamaged, DataplaneError, InvalidRequest

from .control import sampler_state
from .control.asking import Controller
from .names import HIDDEN

if TYPE_CHECKING:
    from .client import TransferQueueClient

METADATA: Final = "metadata.json"
CONTROLLER: Final = "controller_state.pkl"
STORAGE: Final = "simple_storage"
UNITS: Final = "storage_unit_info.json"
PLANE: Final = "plane"
FORMAT: Final = 1


class CheckpointNotFound(InvalidRequest, FileNotFoundError):
    """There is no checkpoint in this folder, or a file of it is missing."""


def save(
    client: TransferQueueClient,
    checkpoint_dir: str | os.PathLike[str],
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save the instance. A checkpoint that is there is replaced when the new one is whole.

    `include_storage` may be false and changes nothing: without it the rows would be lost. TypeError
    if `metadata` is more than JSON takes, InvalidRequest if the folder has other files.
    """
    from dataplane.checkpoint.placing import Placing

    about = json.dumps(
        {"storage_saved": True, "user_metadata": dict(metadata or {}), "format": FORMAT}, indent=2
    )
    path = Path(os.path.abspath(checkpoint_dir))
    _make(path.parent)
    placing = Placing(path, overwrite=True, is_checkpoint=_is_checkpoint)
    try:
        client.save_storage_checkpoint(str(placing.folder))
        client.save_controller_checkpoint(str(placing.folder / CONTROLLER))
        _write(placing.folder / METADATA, about)
        placing.place()
    except DataplaneError as error:
        error.message = error.message.replace(str(placing.folder), str(path))
        raise
    finally:
        placing.abandon()


def load(client: TransferQueueClient, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Put a checkpoint in the place of everything that the instance holds.

    Raises:
        FileNotFoundError: there is none in this folder, or a file of it is missing.
        CheckpointDamaged: a file is not what was saved.
        QuotaExceeded: there is no room for it beside what is there: clear partitions first.
            After these errors the instance is as it was.
    """
    path = Path(checkpoint_dir)
    if not path.is_dir():
        raise CheckpointNotFound(f"there is no checkpoint folder {str(path)!r}")
    about = _read(path / METADATA)
    if about.get("format") != FORMAT:
        raise InvalidRequest(
            f"the checkpoint {str(path)!r} has format {about.get('format')!r} and this version "
            f"reads {FORMAT}: one that TransferQueue itself saved is loaded by TransferQueue only, "
            "read it there and put the rows here"
        )
    state = _state(path / CONTROLLER)

    def take(core: Core, deadline: float) -> Verb[Any]:
        return client.controller.ask(core, "reload", [{"next": state["next"]}], deadline)

    # First of all no new row is given an index any more that one of the rows to come has.
    client.link.run(take)
    client.load_storage_checkpoint(str(path))
    client.load_controller_checkpoint(str(path / CONTROLLER))


# -- the two parts, for threads and event loops ----------------------------------------------


def save_controller(
    core: Core, deadline: float, *, controller: Controller, path: str | os.PathLike[str]
) -> Verb[None]:
    """Write what the controller knows and the rows do not say into a file."""
    state = yield from controller.ask(core, "sampler_state", [], deadline)
    text = json.dumps({**state, "format": FORMAT}, indent=2)
    yield Run(partial(_write, Path(path), text), FILE_WORK)


def load_controller(
    core: Core, deadline: float, *, controller: Controller, path: str | os.PathLike[str]
) -> Verb[None]:
    """Have the controller go by the rows that there are now, and by what such a file says."""
    state = yield Run(partial(_state, Path(path)), FILE_WORK)
    yield from controller.ask(core, "reload", [state], deadline)


def save_storage(
    core: Core, deadline: float, *, checkpoint_dir: str | os.PathLike[str]
) -> Verb[None]:
    """Save all rows into the part of a folder that is theirs."""
    from dataplane.client.checkpoints import save_checkpoint

    folder = Path(checkpoint_dir) / STORAGE
    yield Run(partial(_make, folder), FILE_WORK)
    stores = sorted((yield from plane_status(core, deadline))["values"])
    yield from save_checkpoint(core, folder / PLANE, True, deadline)
    units = [{"position": at, "storage_unit_id": store} for at, store in enumerate(stores)]
    yield Run(partial(_write, folder / UNITS, json.dumps(units)), FILE_WORK)


def load_storage(
    core: Core, deadline: float, *, checkpoint_dir: str | os.PathLike[str]
) -> Verb[None]:
    """Put the rows of a folder in the place of all that there are, at one revision."""
    from dataplane.client.loading import load as load_plane

    folder = Path(checkpoint_dir) / STORAGE / PLANE
    if not folder.is_dir():
        raise CheckpointNotFound(f"{str(folder)!r} is not there: no rows were saved here")
    # What is the instance's own stays: where the controller listens is no row of the checkpoint's.
    yield from load_plane(core, folder, deadline, stay=[HIDDEN])


# -- files -----------------------------------------------------------------------------------


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder that would be replaced is a checkpoint of an instance."""
    return (path / METADATA).is_file() and (path / CONTROLLER).is_file()


def _state(path: Path) -> dict[str, Any]:
    state = _read(path)
    first, sampler = state.get("next"), state.get("sampler")
    if type(first) is not int or not 0 <= first < 1 << 62 or type(sampler) is not str:
        _damaged(path, "it does not say which index is next and what the sampler remembers")
    try:
        sampler_state.checked(sampler)
    except InvalidRequest as error:
        _damaged(path, str(error))
    return state


def _make(folder: Path) -> None:
    from dataplane.checkpoint.files import disk_errors

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _write(path: Path, text: str) -> None:
    """A file that is on the disk when this returns."""
    # With the file formats, which take a tenth of a second to import and few processes need.
    from dataplane.checkpoint.files import disk_errors

    with disk_errors(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_text(encoding="utf-8")
        found: Any = json.loads(content)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path.name} not found in {str(path.parent)!r}") from None
    except (OSError, ValueError, RecursionError) as error:
        _damaged(path, str(error))
    if type(found) is not dict:
        _damaged(path, "it holds no object")
    return cast("dict[str, Any]", found)


def _damaged(path: Path, what: str) -> NoReturn:
    raise CheckpointDamaged(
        f"file {path.name!r} of the checkpoint {str(path.parent)!r} is damaged: {what}; restore it "
        "from a copy, or load an earlier checkpoint",
        path=str(path.parent),
        file=path.name,
    )
