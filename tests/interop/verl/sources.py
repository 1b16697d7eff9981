"""Which verl and which `transfer_queue` this process and all that it starts import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from dataplane import compat
from tests.interop.sides import Side

VERL = "0.9.1"
"""The release that the script was written for."""


class Unavailable(Exception):
    """Something that the script needs is not on this machine; says what and how to get it."""


def arrange(side: Side, verl: str | None) -> str:
    """The folder of verl, after putting it and the side's `transfer_queue` on the path, here and
    for child processes. Before anything imports either, and before Ray starts."""
    root = str(Path(__file__).resolve().parents[3])
    folders = [root]
    if verl is not None:
        unpacked = Path(verl).resolve()
        if not (unpacked / "verl" / "__init__.py").is_file():
            raise Unavailable(f"{unpacked} has no package `verl` in it: name the folder above it")
        folders.append(str(unpacked))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Either side may have been put on the path by whoever started this.
    others = [folder for folder in given if folder and folder not in (*folders, compat.folder())]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *others])
    sys.path[:] = [*folders, *(p for p in sys.path if p not in (*folders, compat.folder()))]
    if side == "drop-in":
        compat.activate()
    elif importlib.util.find_spec("transfer_queue") is None:
        raise Unavailable("TransferQueue is not installed: pip install -e '.[bench]'")
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise Unavailable(
            f"verl is not installed: `make interop` brings it, or `pip download --no-deps "
            f"verl=={VERL}`, unpack the wheel and pass --verl FOLDER"
        )
    return str(Path(spec.origin).parent)


def versions() -> str:
    """The names and releases that a report should have."""
    import transfer_queue

    found: list[str] = []
    for name in ("verl", "ray", "torch", "tensordict"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (unknown)")
    return ", ".join([f"transfer_queue {transfer_queue.__version__}", *found])
