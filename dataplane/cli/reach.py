"""How a command finds its plane, and says where it looked when there is none.

In this order: `--address` (or DATAPLANE_ADDRESS), `--ray`, the planes whose tag store is on this
machine (embedded ones and those that Ray hosts), then, unless DATAPLANE_HOST=embedded, a Ray
cluster that RAY_ADDRESS names or that runs here. Through a gateway the settings say who calls:
DATAPLANE_TOKEN_FILE, DATAPLANE_CA_FILE.

Owns the options that all commands on a plane share. What a command changes is never more than its
verb says: to look for a plane starts none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost, Unreachable, quote

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.config import Config

DEFAULT_NAME: Final = "default"

COMPLETION_S: Final = 0.5
"""How long completion of a word asks the plane before it offers nothing."""

LISTENS_S: Final = 5.0
"""How long a Ray cluster may take to accept a connection."""

RAY_HERE: Final = Path("/tmp/ray/ray_current_cluster")
"""Where Ray notes the cluster that was started on this machine."""

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="DATAPLANE_ADDRESS",
        help="Unix socket of the plane, as `dataplane serve` prints it, or a gateway: "
        "grpcs://host:port, grpc://host:port, grpc+unix:///path.",
        show_envvar=True,
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        envvar="DATAPLANE_NAME",
        help="Name of the plane; not needed where only one runs here.",
        show_envvar=True,
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", help="Find it on this Ray cluster: auto, or an address.", metavar="WHERE"
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", help="Deadline in seconds.", metavar="SECONDS"),
]


@contextmanager
def reached(
    address: str | None = None,
    name: str | None = None,
    ray: str | None = None,
    timeout_s: float | None = None,
) -> Generator[Client]:
    """A client of the plane that a command's options mean, for as long as the context lasts.

    `timeout_s` becomes the deadline of every verb that names none.

    Raises:
        PlaneLost: there is no such plane: what was looked for, where, and what to do.
        InvalidRequest: several planes are meant, or an option is none.
    """
    client = _connect(address, name, ray, _settings(timeout_s))
    try:
        yield client
    finally:
        client.close()


def _settings(timeout_s: float | None) -> Config:
    from dataplane import session

    if timeout_s is None:
        return session.settings_of({})
    if not 0 < timeout_s < float("inf"):
        raise InvalidRequest(f"--timeout is a positive number of seconds, not {timeout_s:g}")
    return session.settings_of({"timeout_s": timeout_s, "wait_timeout_s": timeout_s})


def _connect(address: str | None, name: str | None, ray: str | None, config: Config) -> Client:
    from dataplane import session

    if ray is not None:
        return _on_ray(ray, name or DEFAULT_NAME, config)
    if address is not None:
        if not session.is_gateway(address):
            _check_socket(address)
        return session.connect(name or DEFAULT_NAME, address=address, config=config)
    here = _here(name, config)
    if here is not None:
        return session.connect(here.name, address=str(_folder(config, here)), config=config)
    cluster = None if config.host == "embedded" else _cluster_here()
    if cluster is None:
        why = "DATAPLANE_HOST says embedded" if config.host == "embedded" else "none is known here"
        raise PlaneLost(_not_found(name, config, f"no Ray cluster ({why})"))
    try:
        return _on_ray(cluster, name or DEFAULT_NAME, config)
    except (PlaneLost, Unreachable) as error:
        raise PlaneLost(_not_found(name, config, f"Ray: {error}")) from error


def _check_socket(address: str) -> None:
    """PlaneLost or InvalidRequest, if the address is no socket of a plane that is there."""
    path = Path(address.removeprefix("unix:"))
    if "://" in address or (":" in address and "/" not in address):
        raise InvalidRequest(
            f"--address {address!r:.80} is none: give the unix socket that `dataplane serve` "
            "printed, or a gateway as grpcs://host:port, grpc://host:port or grpc+unix:///path"
        )
    if not path.exists():
        raise PlaneLost(
            f"there is no plane at {str(path)!r}: the file is not there. Either the plane has "
            "ended, or it runs on another machine: reach that one through its gateway"
        )


# -- planes of this machine ------------------------------------------------------------------


def _here(name: str | None, config: Config) -> Any:
    """The record of the plane of this machine that is meant; None if there is none."""
    from dataplane.host.presence import planes_here

    found = planes_here(config.runtime_dir)
    wanted = [record for record in found if record.name == (name or DEFAULT_NAME)]
    if wanted:
        return wanted[0]
    if name is None and len(found) > 1:
        names = quote(sorted({record.name for record in found}))
        raise InvalidRequest(
            f"{len(found)} planes run on this machine, and none is called {DEFAULT_NAME!r}: say "
            f"which with --name: {names}"
        )
    return found[0] if name is None and found else None


def _root(config: Config) -> Path:
    from dataplane.host.folders import default_root

    return config.runtime_dir or default_root()


def _folder(config: Config, record: Any) -> Path:
    return _root(config) / record.plane_id


def _not_found(name: str | None, config: Config, more: str) -> str:
    wanted = f"plane {name!r}" if name else "plane"
    return (
        f"no {wanted} was found. Looked for: planes of this user in {_root(config)} "
        f"(DATAPLANE_RUNTIME_DIR), {more}. Start one with `dataplane serve`, or say where it is "
        "with --address or --ray"
    )


# -- Ray -------------------------------------------------------------------------------------


def _cluster_here() -> str | None:
    """The Ray cluster to ask, if any: `auto` takes what RAY_ADDRESS names, or what runs here."""
    if find_spec("ray") is None:
        return None
    return "auto" if os.environ.get("RAY_ADDRESS") or RAY_HERE.exists() else None


def _on_ray(where: str, name: str, config: Config) -> Client:
    from dataplane import session

    joined_ray(where)
    settings = config.model_copy(update={"host": "ray"})
    return session.connect(name, config=settings)


def joined_ray(where: str) -> Any:
    """Ray, with this process in the cluster at an address. Unreachable if there is none."""
    if find_spec("ray") is None:
        raise InvalidRequest("--ray: Ray is not installed here: install rl-dataplane[plane]")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if not ray.is_initialized():
        _check_listens(where)
        try:
            cast("Any", ray).init(
                address=where, log_to_driver=False, logging_level="ERROR", configure_logging=True
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unreachable(
                f"no Ray cluster was reached at {where!r:.80}: {error}. Is it up, and does "
                "RAY_ADDRESS or --ray name it?"
            ) from error
    return ray


def _check_listens(where: str) -> None:
    """Unreachable if nobody listens where a cluster is said to be: Ray would try for minutes."""
    address = where
    if where == "auto":
        noted = RAY_HERE.read_text().strip() if RAY_HERE.exists() else ""
        address = os.environ.get("RAY_ADDRESS") or noted
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return  # Ray knows what it means, or says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTENS_S).close()
    except OSError as error:
        raise Unreachable(
            f"no Ray cluster was reached: nobody listens at {address!r:.80} ({error}). Is it up, "
            "and does RAY_ADDRESS or --ray name it?"
        ) from None


# -- completion ------------------------------------------------------------------------------


def complete_partition(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of partitions that begin so, of the plane that the line names; none if it is slow."""
    params = ctx.params
    try:
        with reached(
            params.get("address") or os.environ.get("DATAPLANE_ADDRESS"),
            params.get("name") or os.environ.get("DATAPLANE_NAME"),
            None,
            COMPLETION_S,
        ) as client:
            names = list(client.kv_list_partitions(timeout=COMPLETION_S))
    except DataplaneError:
        return []
    return sorted(each for each in names if each.startswith(incomplete) and each.isprintable())


PartitionArgument = Annotated[
    str,
    typer.Argument(
        help="The partition.",
        metavar="PARTITION",
        autocompletion=complete_partition,
        show_default=False,
    ),
]
KeyArgument = Annotated[str, typer.Argument(help="The key.", metavar="KEY", show_default=False)]
