"""A plane hosted by Ray: the tag store and one value store per node are detached actors.

Ray gives placement, naming and supervision; values and tags never travel through its calls. Each
actor serves sockets from an event loop in a thread of its own. Actors are pinned to their node:
a store lives and dies with its node's memory, so it is started again there, with what its earlier
process left, and never elsewhere.

Starting or attaching is one call of Ray's (`get_if_exists`), so racing starters meet in one plane.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import DeadlineExceeded, InternalError, PlaneLost, from_wire
from dataplane.host.folders import check_name, plane_folders
from dataplane.host.ray.actors import TagActor, ValueActor, plain
from dataplane.host.ray.lookup import NAMESPACE, Answer, find_tags, ray, store_id_of, tags_of
from dataplane.server.process import new_plane_id
from dataplane.wire.address import Address

ASK_PAUSE_S = 0.1


def start_or_attach(name: str, config: Config) -> Joined:
    """The plane of this name on the cluster that this process is connected to.

    Raises:
        DeadlineExceeded: it did not come up in time; what was started was stopped again.
    """
    check_name(name)
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True)
    node_id = ray.get_runtime_context().get_node_id()
    actor, new = _actor(TagActor, f"{name}/tags", node_id)
    # Started again it is the same plane: of those who race, one's id is its own from then on.
    tags = actor.remote(name, new_plane_id(), plain(config))
    described = _ask(tags, "describe", config.start_timeout_s, new=new)
    return _joined(name, described, node_id, config)


def attach(name: str, config: Config) -> Joined:
    """The plane of this name, if it is there. PlaneLost otherwise."""
    check_name(name)
    described = _ask(tags_of(name), "describe", config.start_timeout_s, new=False)
    return _joined(name, described, ray.get_runtime_context().get_node_id(), config)


def _joined(name: str, tags: Answer, node_id: str, config: Config) -> Joined:
    """Join as a client of this node, whose value store is started if it is not there."""
    home = store_id_of(node_id)
    plane_id = tags["plane_id"]
    actor, new = _actor(ValueActor, f"{name}/values/{plane_id}/{home}", node_id)
    _ask(actor.remote(name, home, tags), "describe", config.start_timeout_s, new=new)
    there = Config(**tags["config"])
    folders = plane_folders(name, plane_id, there.runtime_dir, there.shm_dir)
    return Joined(
        name,
        plane_id,
        tags["secret"],
        Address.from_wire(tags["address"]),
        home,
        find=partial(find_tags, folders),
    )


def _actor(cls: Any, name: str, node_id: str) -> tuple[Any, bool]:
    """How to start an actor, or to get it if it is there; and whether it was not."""
    try:
        ray.get_actor(name, namespace=NAMESPACE)
        new = False
    except ValueError:
        new = True
    return cls.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ), new


def _ask(actor: Any, method: str, timeout_s: float, *, new: bool) -> Answer:
    """The answer of an actor. A new one that is not up in time is stopped; one that was there may
    only be slow, and others' rows are in it."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            answer: Answer = ray.get(getattr(actor, method).remote(left), timeout=left)
            break
        except ActorUnavailableError:
            # It died, and is started again.
            time.sleep(min(ASK_PAUSE_S, max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise _too_late(actor, timeout_s, new=new) from None
        except RayActorError as error:
            raise PlaneLost(f"the plane's actor died: {error}") from error
        except RayError as error:
            raise InternalError(f"Ray could not start the plane: {error}") from error
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


def _too_late(actor: Any, timeout_s: float, *, new: bool) -> DeadlineExceeded:
    """The error of who waited in vain for an actor. A new one is stopped."""
    if not new:
        return DeadlineExceeded(
            f"the plane is there and did not answer within {timeout_s:g} s", waited_s=timeout_s
        )
    ray.kill(actor, no_restart=True)
    total, free = ray.cluster_resources(), ray.available_resources()
    return DeadlineExceeded(
        f"the plane's actor did not start within {timeout_s:g} s. It wants 0 CPUs; the "
        f"cluster has {total.get('CPU', 0):g}, of which {free.get('CPU', 0):g} are free, so "
        "look at the raylet's log for why no worker process comes up. It was stopped; init "
        "may be repeated",
        waited_s=timeout_s,
    )
