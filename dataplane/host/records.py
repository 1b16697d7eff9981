"""What a plane leaves in its runtime folder for those who look for it: its record and its secret.

Owns the format of `plane.json` and how a plane is found by name. Never decides who owns a folder
(folders.py): a record is of a live plane exactly while somebody owns the folder that it lies in.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from dataplane.errors import InternalError, PlaneLost
from dataplane.host.folders import (
    Folders,
    check_name,
    default_root,
    is_owned,
    plane_ids,
    ray_session,
    read_file,
    root_lock,
    write_file,
)
from dataplane.wire.auth import SECRET_BYTES

log = logging.getLogger(__name__)

RECORD_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What a plane says about itself in `plane.json`, for those who look for it by name."""

    name: str
    plane_id: str
    unix: str
    tcp: tuple[str, int] | None = None


def write_record(folders: Folders, record: Record) -> None:
    """Makes the plane findable. Replaces an earlier record in one step."""
    if record.plane_id != folders.plane_id:
        raise InternalError(f"record of plane {record.plane_id} in folder {folders.runtime}")
    text = json.dumps(asdict(record) | {"format": RECORD_FORMAT})
    write_file(folders.runtime / "plane.json", text.encode())


def read_record(folders: Folders) -> Record:
    """The plane's record.

    Raises:
        PlaneLost: there is none: the plane ended, or never got that far.
        InternalError: it is damaged, or of a version that this one cannot read.
    """
    raw = read_file(folders.runtime / "plane.json")
    try:
        record = _parse_record(raw)
    except (ValueError, RecursionError) as error:
        raise InternalError(f"{folders.runtime}/plane.json is unusable: {error}") from error
    if record.plane_id != folders.plane_id:
        raise InternalError(f"{folders.runtime}/plane.json is of plane {record.plane_id}")
    return record


def write_secret(folders: Folders, secret: bytes) -> None:
    """Keeps the plane's secret where only this user can read it."""
    write_file(folders.runtime / "secret", secret.hex().encode())


def read_secret(folders: Folders) -> bytes:
    """The plane's secret; PlaneLost if there is none."""
    try:
        return bytes.fromhex(read_file(folders.runtime / "secret").decode())
    except ValueError as error:
        raise InternalError(f"{folders.runtime}/secret is damaged") from error


def secret_of(folders: Folders) -> bytes:
    """The plane's secret; a new one, which is kept, where it has none yet."""
    try:
        return read_secret(folders)
    except PlaneLost:
        secret = secrets.token_bytes(SECRET_BYTES)
        write_secret(folders, secret)
        return secret


def endpoint_of(folders: Folders, host: str | None) -> tuple[str, int] | None:
    """Where a plane is to listen on a host: at the port that it had there before, if any."""
    if host is None:
        return None
    try:
        before = read_record(folders).tcp
    except PlaneLost:
        before = None
    return before if before is not None and before[0] == host else (host, 0)


def find(name: str, root: str | os.PathLike[str] | None = None) -> list[Record]:
    """The records of this user's live planes of that name without Ray, the youngest first."""
    check_name(name)
    # One that Ray hosts is found through Ray, or by its address.
    return [record for record, session in here(root) if record.name == name and session is None]


def here(root: str | os.PathLike[str] | None = None) -> list[tuple[Record, str | None]]:
    """The records of this user's planes whose tag store is on this machine, the youngest first;
    each with the Ray session that hosts it, if one does. That session may have ended: without one,
    a plane is there only while somebody owns its folder."""
    top = Path(root) if root is not None else default_root()
    if not top.exists():
        return []
    found: list[tuple[float, Record, str | None]] = []
    # The root lock keeps two lookups from taking each other's probe for an owner.
    with root_lock(top):
        for plane_id in plane_ids(top, None):
            folders = Folders("", plane_id, top / plane_id, Path())
            try:
                record = read_record(folders)
                session = ray_session(folders.runtime)
                if session is not None or is_owned(folders.runtime):
                    began = (folders.runtime / "plane.json").stat().st_mtime
                    found.append((began, record, session))
            except PlaneLost:
                continue
            except (InternalError, OSError) as error:
                log.warning("plane %s is skipped: %s", plane_id, error)
    return [
        (record, session)
        for _, record, session in sorted(found, key=lambda each: each[0], reverse=True)
    ]


def _parse_record(raw: bytes) -> Record:
    parsed: object = json.loads(raw)
    if not isinstance(parsed, dict):
        raise ValueError("it is not a mapping")
    entries = cast("dict[str, object]", parsed)
    if entries.get("format") != RECORD_FORMAT:
        raise ValueError(f"its format is {entries.get('format')!r}, not {RECORD_FORMAT}")
    match entries:
        case {"name": str(name), "plane_id": str(plane_id), "unix": str(unix), "tcp": None}:
            return Record(name, plane_id, unix)
        case {
            "name": str(name),
            "plane_id": str(plane_id),
            "unix": str(unix),
            "tcp": [str(host), int(port)],
        } if 0 < port < 65536:
            return Record(name, plane_id, unix, (host, port))
        case _:
            raise ValueError("an entry is missing or has the wrong type")
