"""A gateway as a Ray actor: one per plane and node, started again in place, gone with its plane.

It is pinned to the node that it was started from, whose address its clients know, and holds
nothing that another one would miss.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import uvloop
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    PlaneLost,
    from_wire,
    to_wire,
)
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.process import prepare_process, serve
from dataplane.gateway.server import GatewayServer
from dataplane.host.ray import plane as host
from dataplane.host.ray.ending import end_this_actor
from dataplane.host.ray.lookup import NAMESPACE, Answer, ray, store_id_of
from dataplane.settings import checked

log = logging.getLogger("dataplane.gateway")

READ_S: Final = 5.0
"""Time for who started it to read why it failed."""
PAUSE_S: Final = 0.1


@ray.remote
class GatewayActor:
    def __init__(
        self, name: str, plane_id: str, config: dict[str, Any], plane_config: dict[str, Any]
    ) -> None:
        self._serving = _Serving(name, plane_id, GatewayConfig(**config), Config(**plane_config))

    def describe(self, timeout_s: float) -> Answer:
        return self._serving.describe(timeout_s)


def start_gateway(
    name: str = "default",
    config: GatewayConfig | Mapping[str, Any] | None = None,
    *,
    plane_config: Config | None = None,
) -> list[str]:
    """Where the gateway of a plane on this node listens; it is started if it is not there.

    It outlives this process, and ends with the plane. Give it a port: with any, it has another one
    after it was started again.

    Raises:
        PlaneLost: there is no such plane on the cluster.
        InvalidRequest: it may not or cannot listen where it is told to.
        DeadlineExceeded: it did not come up in time.
    """
    settings = plane_config or Config()
    if not isinstance(config, GatewayConfig):
        config = checked(GatewayConfig, config or {}, "settings of the gateway")
    joined = host.attach(name, settings)
    node_id: str = ray.get_runtime_context().get_node_id()
    actor = GatewayActor.options(
        name=f"{name}/gateway/{joined.plane_id}/{store_id_of(node_id)}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(
        name, joined.plane_id, config.model_dump(mode="json"), settings.model_dump(mode="json")
    )
    return _described(actor, settings.start_timeout_s)["addresses"]


def _described(actor: Any, timeout_s: float) -> Answer:
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            answer: Answer = ray.get(actor.describe.remote(left), timeout=left)
            break
        except ActorUnavailableError:
            time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"the gateway did not come up within {timeout_s:g} s", waited_s=timeout_s
            ) from None
        except RayActorError as error:
            raise PlaneLost(f"the gateway's actor died: {error}") from error
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


class _Serving:
    """An event loop in a thread, with a gateway in it."""

    def __init__(
        self, name: str, plane_id: str, config: GatewayConfig, plane_config: Config
    ) -> None:
        self._name = name
        self._plane_id = plane_id
        self._config = config
        self._plane_config = plane_config
        self._described: Answer = {}
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="dataplane-gateway", daemon=True).start()

    def describe(self, timeout_s: float) -> Answer:
        """Where it listens, or the error that kept it from starting."""
        if not self._ready.wait(timeout_s):
            return {"error": to_wire(DeadlineExceeded("still starting", waited_s=timeout_s))}
        return self._described

    def _run(self) -> None:
        try:
            joined = host.attach(self._name, self._plane_config)
            if joined.plane_id != self._plane_id:
                raise PlaneLost(f"plane {self._name!r} ({self._plane_id}) has ended")
            prepare_process()
            uvloop.run(self._serve(joined))
        except DataplaneError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the gateway ended")
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
        end_this_actor()

    async def _serve(self, joined: Any) -> None:
        def ready(server: GatewayServer) -> None:
            self._described = {"addresses": server.addresses, "pid": os.getpid()}
            self._ready.set()

        await serve(joined, self._config, self._plane_config, ready=ready, until=asyncio.Event())

    def _fail(self, error: DataplaneError) -> None:
        if self._ready.is_set():
            log.info("the gateway ends: %s", error)
            return
        self._described = {"error": to_wire(error)}
        self._ready.set()
        threading.Event().wait(READ_S)
