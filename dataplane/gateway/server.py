"""A gateway: its ports, what serves behind them, and how it comes up and ends.

Owns the order of both. Of one event loop. It is an ordinary client of its plane, many times over,
and nothing is lost with it but calls under way, which are repeated elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import InvalidRequest
from dataplane.gateway.access.binding import check_binding
from dataplane.gateway.access.guard import Guard, caller, throttle
from dataplane.gateway.access.limits import Throttles
from dataplane.gateway.access.roles import ANYONE
from dataplane.gateway.access.tls import Certificates, ServerTls
from dataplane.gateway.access.tokens import TokenFile
from dataplane.gateway.call import Call
from dataplane.gateway.calls.claiming import Claiming
from dataplane.gateway.calls.explaining import Explaining
from dataplane.gateway.calls.grouping import Grouping
from dataplane.gateway.calls.holding import Holding
from dataplane.gateway.calls.inspecting import Inspecting
from dataplane.gateway.calls.listing import Looking
from dataplane.gateway.calls.partitions import Partitions
from dataplane.gateway.calls.recording import Recording
from dataplane.gateway.calls.rows import Rows
from dataplane.gateway.calls.tagging import Tagging
from dataplane.gateway.calls.tracing import Tracing
from dataplane.gateway.calls.trajectories import Trajectories
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.health import Health
from dataplane.gateway.producers import Producers
from dataplane.gateway.service import NAME, SERVICE, Handler, generic_handler
from dataplane.metrics.calls import CallMeter
from dataplane.metrics.reading import Reading
from dataplane.metrics.serving import ServedMetrics

log = logging.getLogger("dataplane.gateway")

UPKEEP_S: Final = 1.0
"""Between two looks at what is to be forgotten."""
UNIX: Final = "unix:"
PROBE_S: Final = 1.0


class GatewayServer:
    """A gateway of one plane."""

    def __init__(
        self, joined: Joined, config: GatewayConfig, plane_config: Config | None = None
    ) -> None:
        """
        Args:
            joined: the plane, as `dataplane.session.join` finds it.
            plane_config: settings of its clients.

        Raises:
            InvalidRequest: it would listen where that is not safe, or a file of it cannot be used.
        """
        for listen in config.listen:
            check_binding(
                listen,
                has_credentials=config.has_credentials,
                has_tls=config.has_tls,
                insecure_allow_anyone=config.insecure_allow_anyone,
                insecure_allow_plain_text=config.insecure_allow_plain_text,
            )
        self.config = config
        self.joined = joined
        self._tokens = TokenFile(config.token_file) if config.token_file is not None else None
        self._certificates = _certificates(config)
        settings = plane_config or Config()
        # What reads keep for the next ones is memory of the gateway, too.
        kept = min(settings.reuse_bytes, config.buffer_bytes // 4)
        settings = settings.model_copy(update={"reuse_bytes": kept})
        self.reader = AsyncClient(joined, settings)
        self.producers = Producers(
            joined, settings, absence_s=config.absence_s, max_clients=config.max_clients
        )
        self.rows = Rows(config)
        self._looking = Looking(config)
        self._trajectories = Trajectories(config)
        self._claiming = Claiming(config)
        self.health = Health(self.reader)
        self.addresses: list[str] = []
        """Where clients reach it, once it listens: `grpcs://host:port` and the like."""
        self.metrics: ServedMetrics | None = None
        self._meter: CallMeter | None = None
        if config.metrics_port is not None:
            self._meter = CallMeter(NAME, frozenset(method.name for method in SERVICE.methods))
        self._server: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def start(self) -> None:
        """Join the plane, and listen.

        Raises:
            PlaneLost, Unreachable: there is no plane, or it does not answer.
            InvalidRequest: an address cannot be had.
        """
        await self.reader.attach()
        await self.health.say(serving=True)
        guard = Guard(
            self._tokens,
            anyone=ANYONE if self._tokens is None else None,
            throttles=Throttles(time.monotonic),
        )
        server: Any = grpc.aio.server(
            interceptors=[guard] if self._meter is None else [self._meter, guard],
            options=_options(self.config),
            maximum_concurrent_rpcs=self.config.max_streams,
        )
        server.add_generic_rpc_handlers([generic_handler(self._handlers(), self._call_of)])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)  # pyright: ignore[reportUnknownMemberType]
        health: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection([NAME, health, reflection.SERVICE_NAME], server)
        try:
            if self._meter is not None:
                self._open_metrics(self._meter)
            self.addresses = [self._bind(server, listen) for listen in self.config.listen]
        except BaseException:
            if self.metrics is not None:
                await asyncio.to_thread(self.metrics.close)
            await server.start()  # only one that was started lets go of what it has bound
            await server.stop(None)
            raise
        await server.start()
        self._server = server
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self.health.follow()), loop.create_task(self._upkeep())]

    async def stop(self, drain_s: float | None = None) -> None:
        """Take no more calls, let those under way end, and leave the plane. Repeatable.

        Those that have not ended after `drain_s` (of the settings, where it is not given) are
        cancelled: their callers repeat them elsewhere.
        """
        if self._stopped:
            return
        self._stopped = True
        drain_s = self.config.drain_s if drain_s is None else drain_s
        await self.health.end()
        if self._server is not None:
            await self._server.stop(drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        self._looking.pages.close()
        self.rows.close()
        await self._claiming.close()
        await self.producers.close()
        await self.reader.close()

    def _open_metrics(self, meter: CallMeter) -> None:
        config, joined = self.config, self.joined
        assert config.metrics_port is not None
        runtime = None if joined.tags.unix is None else Path(joined.tags.unix).parent
        if runtime is not None and not runtime.is_dir():
            runtime = None  # the plane is on another node
        self.metrics = metrics = ServedMetrics(
            "gateway", joined.name, joined.plane_id, runtime,
            host=config.metrics_host, port=config.metrics_port,
        )  # fmt: skip

        async def read() -> Reading:
            reading = Reading()
            meter.read(reading)
            budget = self.rows.budget
            reading.set("gateway_serving", int(self.health.serving))
            reading.set("gateway_inflight_bytes", budget.used_bytes)
            reading.set("gateway_buffer_bytes", budget.limit_bytes)
            reading.set("gateway_waiting_calls", budget.waiting)
            reading.set("gateway_clients", len(self.producers))
            reading.set("gateway_quarantined_rows_total", self._trajectories.quarantined)
            reading.set("gateway_unkept_rows_total", self._trajectories.unkept)
            return reading

        metrics.add(read)
        metrics.open(
            lambda: None if self.health.serving else "the plane does not answer, or this one ends"
        )

    async def hurry(self) -> None:
        """End a drain that is under way at once."""
        if self._server is not None:
            await self._server.stop(None)

    def _call_of(self, context: Any) -> Call:
        principal = caller()
        return Call(
            context,
            principal,
            throttle(),
            self.producers,
            self.reader,
            self.joined.plane_id,
            principal.limits.clients,
        )

    def _handlers(self) -> dict[str, Handler]:
        config = self.config
        groups: list[Any] = [
            self.rows,
            self._looking,
            Tagging(config),
            self._trajectories,
            self._claiming,
            Grouping(config),
            Partitions(config),
            Explaining(config),
            Inspecting(config),
            Holding(config),
            Tracing(config),
            Recording(config),
        ]
        handlers: dict[str, Handler] = {}
        for group in groups:
            handlers.update(group.handlers)
        return handlers

    def _bind(self, server: Any, listen: str) -> str:
        """Listen somewhere; the address as clients have it. InvalidRequest if it cannot be had."""
        local = listen.startswith(UNIX)
        path = os.path.abspath(listen.removeprefix(UNIX).removeprefix("//"))
        if local:
            _check_free(path)  # gRPC would take it away from whoever listens there
        # Others of this machine may not connect to a socket, which has no credentials of its own.
        mask = os.umask(0o177) if local else None
        try:
            if local or self._certificates is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, self._certificates.credentials())
        except RuntimeError as error:
            raise InvalidRequest(f"the gateway cannot listen on {listen!r:.120}: {error}") from None
        finally:
            if mask is not None:
                os.umask(mask)
        if local:
            return f"grpc+unix://{path}"
        scheme = "grpc" if self._certificates is None else "grpcs"
        return f"{scheme}://{listen.rpartition(':')[0]}:{port}"

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            try:
                self.producers.close_absent()
                self.rows.expire()
                self._looking.pages.sweep()
                if self._tokens is not None:
                    self._tokens.refresh()
            except Exception:
                log.exception("the gateway's upkeep failed; it goes on")


def _check_free(path: str) -> None:
    """InvalidRequest if somebody listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(PROBE_S)
            probe.connect(path)
        except OSError:
            return  # nobody, or what a gateway that was killed has left
    raise InvalidRequest(f"the gateway cannot listen on {path!r:.120}: somebody else does already")


def _certificates(config: GatewayConfig) -> Certificates | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificates(ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca))


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    """gRPC's settings. Times are milliseconds there."""
    options = {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": config.max_message_bytes,
        "grpc.max_send_message_length": config.max_message_bytes,
        "grpc.max_concurrent_streams": config.max_connection_streams,
        "grpc.max_allowed_incoming_connections": config.max_connections,
        "grpc.keepalive_time_ms": _ms(config.keepalive_s),
        "grpc.keepalive_timeout_ms": _ms(config.keepalive_timeout_s),
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _ms(config.min_ping_s),
        "grpc.http2.max_ping_strikes": 2,
        "grpc.server_handshake_timeout_ms": _ms(config.handshake_s),
    }
    if config.max_connection_idle_s is not None:
        options["grpc.max_connection_idle_ms"] = _ms(config.max_connection_idle_s)
    if config.max_connection_age_s is not None:
        options["grpc.max_connection_age_ms"] = _ms(config.max_connection_age_s)
        options["grpc.max_connection_age_grace_ms"] = _ms(config.max_call_s)
    return list(options.items())


def _ms(seconds: float) -> int:
    return min(int(1000 * seconds), (1 << 31) - 1)
