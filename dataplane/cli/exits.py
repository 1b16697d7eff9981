"""How a command ends: the exit codes, and how an error is said.

0   fine
1   the command did its work, and what it looked at is bad: damage, a check that fails
2   the request is wrong: an option, an argument, a value that the plane does not take
3   there is no such partition, key, field or version, or its values are lost
4   the plane cannot be reached, has ended, or is another one
5   the deadline passed first
6   the caller may not do this
7   the plane refused it for another reason: no room, too late, already there; or it is not
    known whether it was done
70  a fault of this package
130 Ctrl-C, where the command was not one that runs until then
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Final

import typer

from dataplane.cli.shown import visible_lines
from dataplane.errors import (
    CheckpointDamaged,
    DataplaneError,
    DeadlineExceeded,
    FieldNotFound,
    InternalError,
    InvalidRequest,
    JournalDamaged,
    KeyNotFound,
    PartitionNotFound,
    PermissionDenied,
    PlaneLost,
    Unauthenticated,
    Unreachable,
    ValueLost,
    WeightsNotFound,
    to_wire,
)


class Code(IntEnum):
    """What a command ends with."""

    FINE = 0
    BAD = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    DEADLINE = 5
    DENIED = 6
    REFUSED = 7
    INTERNAL = 70
    INTERRUPTED = 130


_CODES: Final[tuple[tuple[tuple[type[DataplaneError], ...], Code], ...]] = (
    ((CheckpointDamaged, JournalDamaged), Code.BAD),
    ((InvalidRequest,), Code.USAGE),
    (
        (PartitionNotFound, KeyNotFound, FieldNotFound, WeightsNotFound, ValueLost),
        Code.NOT_FOUND,
    ),
    ((PlaneLost, Unreachable), Code.UNREACHABLE),
    ((DeadlineExceeded,), Code.DEADLINE),
    ((Unauthenticated, PermissionDenied), Code.DENIED),
    ((InternalError,), Code.INTERNAL),
)


def code_of(error: DataplaneError) -> Code:
    """What a command ends with that this error ended."""
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return Code.REFUSED


def say(error: DataplaneError, *, as_json: bool = False) -> Code:
    """Tell the error on standard error, and say what to end with."""
    code = code_of(error)
    if as_json:
        said = {"error": to_wire(error), "exit_code": int(code)}
        typer.echo(json.dumps(said, default=str), err=True)
    else:
        typer.echo(f"dataplane: {visible_lines(error.message)}", err=True)
    return code
