"""An instance's life on a Ray cluster: a plane of its own, and the controller by its name.

Owns who starts it and who joins. The first caller starts a plane under a random name and then the
named actor; whoever loses that race ends its own plane and joins. An instance ends with `close()`
of its maker, or when the job of its maker ends: the actor is not detached, and its plane goes soon
after the last client.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dataplane.compat import folder, with_path
from dataplane.config import Config
from dataplane.errors import DataplaneError, DeadlineExceeded, InvalidRequest, PlaneLost
from dataplane.session import settings_of

from .errors import unsupported
from .link import Link

if TYPE_CHECKING:
    from .client import TransferQueueClient

ACTOR = os.environ.get("DATAPLANE_TRANSFER_QUEUE_NAME", "TransferQueueController")
"""The controller's name; a cluster has one instance under each."""
NAMESPACE = "transfer_queue"
LINGER_S = 60.0
"""How long a plane outlives its last client, so that a job that was killed holds no memory."""
PAUSE_S = 0.05


class Joined(NamedTuple):
    controller: Any
    client: TransferQueueClient
    config: Any
    """The instance's settings, a DictConfig."""
    created: bool


def start_or_join(conf: Any) -> Joined:
    """The process's way to the instance of this cluster."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True)
    wait_s = 2 * Config().start_timeout_s  # the plane's start, then the controller's
    deadline = time.monotonic() + wait_s
    while True:
        controller = _actor()
        try:
            joined = _start(conf, deadline) if controller is None else _join(controller, deadline)
        except PlaneLost:
            joined = None  # it is just ending; its name is free in a moment
        if joined is not None:
            return joined
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "the TransferQueueController of this cluster is there and its plane is not: "
                "close() it where it was made, or ray.kill the actor",
                waited_s=wait_s,
            )
        time.sleep(PAUSE_S)


def leave(client: TransferQueueClient, controller: Any, *, end: bool) -> None:
    """Close the process's client; with `end` the instance as well."""
    ray = _ray()
    if end and controller is not None and ray.is_initialized():
        ray.kill(controller, no_restart=True)
    client.close()
    client.link.close(destroy=end)


def is_running() -> bool:
    """Whether this process is in a Ray cluster that has an instance."""
    ray = _ray()
    return bool(ray.is_initialized()) and _actor() is not None


def config_of(controller: Any) -> Any:
    """The settings of the instance, or None where there is none."""
    ray = _ray()
    if controller is None:
        if not ray.is_initialized():
            return None
        controller = _actor()
    if controller is None:
        return None
    return ray.get(controller.get_config.remote(), timeout=Config().start_timeout_s)


def _ray() -> Any:
    # Imported late: a process that only unpickles a batch does without. Untyped, as Ray mostly is.
    import ray

    return ray


# -- inside ----------------------------------------------------------------------------------


def _actor() -> Any:
    ray = _ray()
    try:
        return ray.get_actor(ACTOR, namespace=NAMESPACE)
    except ValueError:
        return None


def _start(conf: Any, deadline: float) -> Joined | None:
    """The instance that this process makes; None if another one was faster."""
    ray = _ray()
    from . import client, controller

    settings = merged(conf)
    sampler = sampler_of(settings.controller.sampler)
    plane = plane_settings(settings)
    name = f"transfer_queue-{secrets.token_hex(4)}"
    from dataplane.host.ray import plane as host

    link = Link(host.start_or_attach(name, plane), plane)
    actor: Any = None
    try:
        link.sync.attach()
        try:
            actor = controller.TransferQueueController.options(
                name=ACTOR,
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=16,
                runtime_env=with_path(None),
            ).remote(
                plane=name,
                config=plane.model_dump(mode="json"),
                sampler=sampler,
                polling_mode=bool(settings.controller.polling_mode),
            )
        except ValueError:  # the name is taken
            link.close(destroy=True)
            return None
        settings.controller.zmq_info = _ask(actor, "describe", deadline)
        if settings.metrics.enabled:
            settings.metrics.endpoint = _ask(
                actor, "start_metrics", deadline, port=settings.metrics.port
            )
        _ask(actor, "store_config", deadline, config=settings)
    except BaseException:
        if actor is not None:
            ray.kill(actor, no_restart=True)
        link.close(destroy=True)
        raise
    made = client.TransferQueueClient("maker", settings.controller.zmq_info, link=link)
    return Joined(actor, made, settings, created=True)


def _join(controller: Any, deadline: float) -> Joined | None:
    """The instance that is there; None if it is not ready yet."""
    from . import client

    settings = _ask(controller, "get_config", deadline)
    if settings is None:
        return None
    info = settings.controller.zmq_info
    link = Link.join(info.plane, plane_settings(settings))
    try:
        link.sync.attach()
    except BaseException:
        link.close()
        raise
    return Joined(
        controller, client.TransferQueueClient("joined", info, link=link), settings, created=False
    )


def _ask(actor: Any, method: str, deadline: float, **arguments: Any) -> Any:
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    left = max(0.1, deadline - time.monotonic())
    try:
        return _ray().get(getattr(actor, method).remote(**arguments), timeout=left)
    except GetTimeoutError:
        raise DeadlineExceeded(
            f"the TransferQueueController did not answer {method} within {left:.1f} s. It wants 0 "
            "CPUs: look at the raylet's log for why its worker process does not come up",
            waited_s=left,
        ) from None
    except RayTaskError as error:
        cause: Any = cast("Any", error).cause
        raise (cause if isinstance(cause, DataplaneError) else error) from None
    except RayActorError as error:
        raise PlaneLost(f"the TransferQueueController died: {error}") from error


def merged(conf: Any) -> Any:
    """`conf` over the defaults, as a DictConfig that may hold objects."""
    from pathlib import Path

    from omegaconf import OmegaConf

    base = OmegaConf.create({}, flags={"allow_objects": True})
    defaults = OmegaConf.load(Path(folder()) / "transfer_queue" / "config.yaml")
    settings: Any = OmegaConf.merge(base, defaults, *([conf] if conf else []))
    backend = settings.backend.storage_backend
    if backend != "SimpleStorage":
        raise unsupported(
            f"the storage backend {backend!r}",
            "set backend.storage_backend to SimpleStorage; values then lie in shared memory, whose "
            "size is dataplane.capacity_bytes",
        )
    if settings.backend.SimpleStorage.ssd_offload.enabled:
        raise unsupported(
            "backend.SimpleStorage.ssd_offload",
            "set enabled to false, and dataplane.shm_dir to a folder on the disk if values are to "
            "lie there",
        )
    return settings


def plane_settings(settings: Any) -> Config:
    """The settings of the instance's plane. InvalidRequest names what is wrong with them."""
    from omegaconf import OmegaConf

    given = cast("dict[str, Any]", OmegaConf.to_container(settings.dataplane, resolve=True))
    return settings_of({"linger_s": LINGER_S, **given, "host": "ray", "open_schemas": True})


def sampler_of(given: Any) -> Any:
    """The sampler that a setting names. ValueError for an unknown one."""
    from . import sampler

    if isinstance(given, sampler.BaseSampler):
        return given
    kind = getattr(sampler, given, None) if isinstance(given, str) else given
    if not (isinstance(kind, type) and issubclass(kind, sampler.BaseSampler)):
        raise InvalidRequest(
            f"Could not find sampler {given!r:.80}: name one of this package, or pass a class or "
            "an instance of your own"
        )
    return kind()
