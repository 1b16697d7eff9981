"""Where a plane is that Ray hosts: names of its actors, and what its tag store says of itself."""

from __future__ import annotations

from typing import Any, cast

import ray as untyped_ray
from ray.exceptions import RayError

from dataplane.errors import DeadlineExceeded, PlaneLost, from_wire
from dataplane.host.folders import Folders
from dataplane.host.presence import find_by_folder
from dataplane.wire.address import Address

NAMESPACE = "dataplane"
LOOK_S = 1.0
"""How long a tag store may take to say where it is, before it is asked again."""

Answer = dict[str, Any]

ray = cast("Any", untyped_ray)
"""Ray's own annotations leave most of what is used here unknown."""


def find_tags(folders: Folders) -> Address | None:
    """Where the tag store of a plane listens now; None while Ray starts it again. PlaneLost if the
    plane has ended.

    A process that has left Ray is not made to join it again: it looks at the plane's folder here.
    """
    name, plane_id = folders.name, folders.plane_id
    if not ray.is_initialized():
        return find_by_folder(folders)
    actor = tags_of(name)
    try:
        described: Answer = ray.get(actor.describe.remote(LOOK_S), timeout=2 * LOOK_S)
    except RayError:
        return None  # it is being started again; and if it died for good, it has no name any more
    if "error" in described:
        error = from_wire(described["error"])
        if isinstance(error, DeadlineExceeded):
            return None
        raise PlaneLost(f"plane {name!r} could not be started again: {error}") from error
    if described["plane_id"] != plane_id:
        raise PlaneLost(f"plane {name!r} has ended; the one of this name now is another")
    return Address.from_wire(described["address"])


def tags_of(name: str) -> Any:
    try:
        return ray.get_actor(f"{name}/tags", namespace=NAMESPACE)
    except ValueError:
        raise PlaneLost(
            f"no plane {name!r} runs on this Ray cluster: start one with dataplane.init()"
        ) from None


def store_id_of(node_id: str) -> str:
    """The id of the value store of a Ray node."""
    return node_id[:10]
