"""Values that a command line gives: a file's, or JSON. Nothing in them is unpickled or evaluated.

Owns what may be in such a file and what is refused of one: pickles, arrays that are shorter than
they say, dtypes that no field can have.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.lib.format as npy

from dataplane.cli.values.plain_values import from_text
from dataplane.errors import InvalidRequest, quote

KINDS: Final = ".npy, .npz, .safetensors, .json or .txt"

_FILE: Final = re.compile(r"(.+\.(npy|npz|safetensors|json|txt))(?::(.+))?", re.DOTALL)
_MAX_HEADER_BYTES: Final = 10_000


def value_of_file(text: str) -> Any:
    """The value in a file: `path`, or `path:entry` of one that has several.

    InvalidRequest names the file, and says what is wrong with it.
    """
    parsed = _FILE.fullmatch(text)
    if parsed is None:
        raise InvalidRequest(f"@{text[:120]!r} is no file that can be put: end it in {KINDS}")
    path, kind, entry = Path(parsed[1]), parsed[2], parsed[3]
    try:
        if kind == "npz":
            return _npz(path, entry)
        if kind == "safetensors":
            return _safetensors(path, entry)
        if entry is not None:
            raise InvalidRequest(f"{str(path)!r} has no entries, and so no {entry[:80]!r}")
        if kind == "npy":
            with open(path, "rb") as file:
                return _array(file, os.fstat(file.fileno()).st_size, str(path))
        content = path.read_text(encoding="utf-8")
        return from_text(content) if kind == "json" else content
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{str(path)!r} cannot be read: {error}") from None


def _npz(path: Path, entry: str | None) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(_one(path, archive.namelist(), entry, ".npy"))
            with archive.open(info) as file:
                return _array(file, info.file_size, f"{path}:{info.filename}")
    except InvalidRequest:
        raise  # which is a RuntimeError
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InvalidRequest(f"{str(path)!r} is no whole .npz file: {error}") from None


def _safetensors(path: Path, entry: str | None) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            return file.get_tensor(_one(path, list(file.keys()), entry, ""))
    except SafetensorError as error:
        raise InvalidRequest(f"{str(path)!r} is no whole .safetensors file: {error}") from None


def _one(path: Path, names: list[str], entry: str | None, ending: str) -> str:
    """The entry that is meant."""
    if entry is None and len(names) == 1:
        return names[0]
    for name in () if entry is None else (entry, entry + ending):
        if name in names:
            return name
    which = "say which" if entry is None else f"and no {entry[:80]!r}"
    raise InvalidRequest(
        f"{str(path)!r} has {len(names)} entries, {which} (@FILE:ENTRY): {quote(names)}"
    )


def _array(file: IO[bytes], size: int, place: str) -> Any:
    """The array of a .npy file of so many bytes. No more memory is taken than these."""
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, by_columns, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, KeyError, EOFError, io.UnsupportedOperation) as error:
        raise InvalidRequest(f"{place!r} is no .npy file that is read here: {error}") from None
    if dtype.hasobject:
        raise InvalidRequest(
            f"{place!r} holds Python objects, that is a pickle, which could run anything when it "
            "is read: save numbers, or put the value as JSON"
        )
    due = math.prod(shape) * dtype.itemsize
    there = size - file.tell()
    if due != there:
        raise InvalidRequest(
            f"{place!r} is cut short or damaged: an array of {dtype} of shape {shape} has {due} "
            f"bytes, and {there} are there"
        )
    data = bytearray(file.read(due))
    if len(data) != due:
        raise InvalidRequest(f"{place!r} is cut short: {len(data)} bytes of {due}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")
