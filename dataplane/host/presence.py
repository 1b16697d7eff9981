"""Whether a plane that does not answer is still there: what clients ask before they give it up.

Silence is no evidence. A plane is gone when its folder is, or when nobody owns that any more: the
store that serves it does, and so does the process that starts the store again.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dataplane.errors import PlaneLost
from dataplane.host.folders import Folders, is_owned, ray_session, root_lock, why_kept
from dataplane.host.records import Record, here, read_record
from dataplane.wire.address import Address


def find_by_folder(folders: Folders) -> Address:
    """Where the tag store of a plane of this machine listens, or will again.

    PlaneLost if the plane has ended.
    """
    try:
        record = read_record(folders)
    except PlaneLost as error:
        why = why_kept(folders.runtime)
        raise PlaneLost(
            f"plane {folders.name!r} ({folders.plane_id}) has ended{f': {why}' if why else ''}; "
            "start a new one"
        ) from error
    with root_lock(folders.root):
        owned = is_owned(folders.runtime)
    if not owned:
        session = ray_session(folders.runtime)
        if session is None or not session_alive(session):
            why = why_kept(folders.runtime)
            raise PlaneLost(
                f"nobody serves plane {record.name!r} ({record.plane_id}) any more, nor starts it "
                f"again{f': {why}' if why else ''}; start a new one"
            )
    return Address(record.unix, record.tcp)


def planes_here(root: str | os.PathLike[str] | None = None) -> list[Record]:
    """The records of this user's planes whose tag store is on this machine, whoever hosts them,
    the youngest first."""
    return [
        record
        for record, session in here(root)
        if session is None or session_alive(session) or _is_served(record)
    ]


def _is_served(record: Record) -> bool:
    folder = Path(record.unix).parent
    try:
        with root_lock(folder.parent):
            return is_owned(folder)
    except FileNotFoundError:
        return False  # it ended meanwhile


def session_alive(folder: str) -> bool:
    """Whether a Ray session still runs on this machine: its raylet takes connections."""
    for path in Path(folder).glob("sockets/raylet*"):
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
            return True
        except OSError:
            continue
        finally:
            probe.close()
    return False
