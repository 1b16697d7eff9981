"""What `doctor` looks at beyond this process: planes of this machine, a gateway, a Ray cluster."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dataplane.cli.check.findings import Finding, doubtful, fine, wrong
from dataplane.cli.shown import age_text, bytes_text, count_text, visible
from dataplane.errors import DataplaneError, PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.config import Config

ANSWER_S: Final = 5.0
SKEW_S: Final = 2.0
"""Clocks that differ by more make ages and expiry dates wrong."""
NEARLY_FULL: Final = 0.9


def of_planes(config: Config, root: Path) -> Iterator[Finding]:
    """The planes of this user on this machine: socket, secret, stores."""
    from dataplane import session
    from dataplane.host.presence import planes_here

    try:
        found = planes_here(config.runtime_dir)
    except DataplaneError as error:
        yield wrong("planes", error.message, "see what is said of the runtime folder")
        return
    if not found:
        yield fine("planes", "none on this machine; `dataplane serve` starts one")
    settings = config.model_copy(update={"timeout_s": ANSWER_S})
    for record in found:
        check = f"plane {record.name!r}"
        folder = root / record.plane_id
        yield from _of_secret(check, folder / "secret")
        try:
            client = session.connect(record.name, address=str(folder), config=settings)
        except DataplaneError as error:
            yield wrong(check, f"its socket does not answer: {error.message}", "see its log")
            continue
        try:
            yield from of_plane(check, client)
        finally:
            client.close()


def _of_secret(check: str, path: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
    except OSError as error:
        yield wrong(check, f"{path}: {error.strerror}", "end the plane and start it again")
        return
    if mode & 0o077:
        yield wrong(check, f"others may read its secret, {path} ({mode:o})", f"chmod 600 {path}")


def of_plane(check: str, client: Client) -> Iterator[Finding]:
    """How a plane is that was reached."""
    asked = time.time()
    began = time.monotonic()
    try:
        status = client.status(timeout=ANSWER_S)
    except DataplaneError as error:
        yield wrong(check, f"it does not answer: {error.message}", "see its log")
        return
    took_s = time.monotonic() - began
    yield fine(
        check,
        f"answers in {age_text(took_s)}, {count_text(len(status['partitions']))} partitions, "
        f"version {status.get('version', 'unknown')}",
    )
    now = status.get("time_s")
    if now is not None:
        skew_s = now - (asked + took_s / 2)
        if abs(skew_s) - took_s > SKEW_S:
            yield doubtful(
                check, f"its clock is {skew_s:+.1f} s from this one", "keep clocks with NTP"
            )
    for store, values in status.get("values", {}).items():
        named = f"store {store}"
        if "unreachable" in values:
            yield wrong(named, visible(values["unreachable"]), "is its node up? See its log")
            continue
        used, capacity = values["used_bytes"], values["capacity_bytes"]
        says = f"{bytes_text(used)} of {bytes_text(capacity)} in use"
        if used > NEARLY_FULL * capacity:
            advice = "see what holds it: `dataplane why`, `dataplane leaks`"
            yield doubtful(named, says, advice)
        else:
            yield fine(named, says)


def of_address(address: str, config: Config) -> Iterator[Finding]:
    """A gateway, or a plane by its socket."""
    from dataplane import session

    check = f"address {address}"
    settings = config.model_copy(update={"timeout_s": ANSWER_S})
    try:
        client = session.connect(address=address, config=settings)
    except (Unauthenticated, PermissionDenied) as error:
        yield wrong(
            check,
            f"it answers, and does not take who calls: {error.message}",
            "set DATAPLANE_TOKEN_FILE to a file with a token of `dataplane token create`",
        )
        return
    except DataplaneError as error:
        yield wrong(check, error.message, "is it up, and is the address right?")
        return
    try:
        yield from of_plane(check, client)
    finally:
        client.close()


def of_ray(where: str) -> Iterator[Finding]:
    """A Ray cluster: its nodes, and the actors of planes in it."""
    from dataplane.cli.reach import joined_ray

    try:
        ray: Any = joined_ray(where)
    except DataplaneError as error:
        yield wrong("ray", error.message, "start it, or unset RAY_ADDRESS")
        return
    nodes: list[dict[str, Any]] = ray.nodes()
    alive = [node for node in nodes if node["Alive"]]
    says = f"{len(alive)} of {len(nodes)} nodes are alive, Ray {ray.__version__}"
    if len(alive) == len(nodes):
        yield fine("ray", says)
    else:
        yield doubtful("ray", says, "rows whose values lay on a node that died are lost")
    yield from _of_actors(ray)


def _of_actors(ray: Any) -> Iterator[Finding]:
    from ray.exceptions import RayError

    from dataplane.host.ray.lookup import NAMESPACE

    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    ours = sorted(each["name"] for each in named if each["namespace"] == NAMESPACE)
    if not ours:
        yield fine("ray actors", "none of a plane; dataplane.init() starts one")
    for name in ours:
        check = f"actor {visible(name)}"
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            ray.get(actor.describe.remote(ANSWER_S), timeout=2 * ANSWER_S)
        except (RayError, ValueError, TimeoutError) as error:
            yield wrong(check, f"it does not answer: {error}", "see its log in Ray's session")
        else:
            yield fine(check, "answers")
