"""Start, join and leave planes; the process's default client and the verbs that use it."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.get import Layout, Pad
from dataplane.client.partitions import Schema
from dataplane.client.results import Listing, Rows
from dataplane.client.sync import Client
from dataplane.client.tags import Where
from dataplane.config import Config
from dataplane.errors import PlaneLost
from dataplane.lineage.rows import Trace
from dataplane.settings import checked
from dataplane.types import (
    Change,
    Claim,
    Explanation,
    KVBatchMeta,
    Quota,
    Retention,
    Revision,
)

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from dataplane.gateway.child import GatewayChild

_lock = threading.RLock()  # guards the default client and starting
_default: Client | None = None

GATEWAY_SCHEMES: Final = ("grpcs:", "grpc:", "grpc+unix:")

ENDING_PAUSE_S = 0.05
"""Between two looks at a plane on Ray that is ending."""


def init(config: Config | Mapping[str, Any] | None = None, *, name: str = "default") -> Client:
    """A client of the plane of this name, which is started if it is not there.

    Under Ray (initialised in this process) the plane is hosted by detached actors and outlives
    this process; without, by one child process that ends with this one. The first client of a
    process is also its default client, which the module-level verbs use.

    Raises:
        DeadlineExceeded: the plane did not come up in time; it was stopped, and init may be
            repeated.
        InvalidRequest: a setting is wrong or shared memory too small; the message says which.
    """
    settings = settings_of(config)
    with _lock:
        if _uses_ray(settings):
            client = _on_ray(name, settings)
            if settings.gateway is not None:
                from dataplane.gateway.actor import start_gateway

                try:
                    start_gateway(name, settings.gateway, plane_config=settings)
                except BaseException:
                    client.close()
                    raise
        else:
            from dataplane.host import embedded

            client = _attached(embedded.attach(name, settings), settings)
            if client is None:
                started = embedded.start(name, settings)
                try:
                    gateway = _gateway_of(started.joined, settings)
                except BaseException:
                    started.stop()
                    raise

                def stop() -> None:
                    if gateway is not None:
                        gateway.stop()
                    started.stop()

                atexit.register(stop)

                def on_close(destroy: bool) -> None:
                    stop()
                    atexit.unregister(stop)

                client = Client(started.joined, settings, on_close=on_close)
        client.attach()
        _become_default(client)
        return client


def connect(
    name: str = "default",
    *,
    address: str | None = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Client:
    """A client of a plane that exists already. PlaneLost if there is none of this name.

    `address` is the unix socket that `dataplane serve` printed, for planes without Ray; or a
    gateway: `grpcs://host:port` (TLS), `grpc://host:port`, `grpc+unix:///path`. Through a gateway
    the client has all verbs but those that save, load and end the plane, and the settings
    `token_file`, `ca_file`, `client_cert_file` and `client_key_file` say who it is.
    """
    settings = settings_of(config)
    with _lock:
        if is_gateway(address):
            from dataplane.outside import sync as outside

            client = cast("Client", outside.connect(cast("str", address), settings))
        else:
            client = _client(join(name, address, settings), settings)
            client.attach()
        _become_default(client)
        return client


async def async_connect(
    name: str = "default",
    *,
    address: str | None = None,
    config: Config | Mapping[str, Any] | None = None,
) -> AsyncClient:
    """An asyncio client of a plane that exists already; see `connect`."""
    settings = settings_of(config)
    if is_gateway(address):
        from dataplane.outside import aio as outside

        return cast("AsyncClient", await outside.async_connect(cast("str", address), settings))
    joined = await asyncio.to_thread(join, name, address, settings)
    client = AsyncClient(joined, settings)
    await client.attach()
    return client


def close(destroy: bool = False) -> None:
    """Close the process's default client; with `destroy` end its plane. Repeatable."""
    global _default
    with _lock:
        client, _default = _default, None
    if client is not None:
        client.close(destroy)


def default_client() -> Client:
    """The process's default client. PlaneLost if nothing was joined yet."""
    client = _default
    if client is None:
        raise PlaneLost("this process has joined no plane: call dataplane.init() or connect()")
    return client


@contextmanager
def default_is(client: Client) -> Generator[None]:
    """The module-level verbs use this client, until the end of the block: for tests."""
    global _default
    with _lock:
        before, _default = _default, client
    try:
        yield
    finally:
        with _lock:
            if _default is client:  # and nobody has joined another plane meanwhile
                _default = None if before is None or before.closed else before


# -- verbs of the default client -------------------------------------------------------------


def kv_put(
    key: str,
    partition_id: str,
    fields: Mapping[str, object] | None = None,
    tags: Mapping[str, object] | None = None,
    *,
    attempt: int | None = None,
    must_exist: bool = False,
    if_absent: bool = False,
    return_tags: bool = False,
    timeout: float | None = None,
) -> KVBatchMeta:
    """`Client.kv_put` of the process's default client."""
    return default_client().kv_put(
        key, partition_id, fields, tags,
        attempt=attempt, must_exist=must_exist, if_absent=if_absent, return_tags=return_tags,
        timeout=timeout,
    )  # fmt: skip


def kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: Mapping[str, object] | Sequence[Mapping[str, object]] | TensorDict | None = None,
    tags: Sequence[Mapping[str, object]] | None = None,
    *,
    attempt: int | None = None,
    must_exist: bool = False,
    if_absent: bool = False,
    return_tags: bool = False,
    timeout: float | None = None,
) -> KVBatchMeta:
    """`Client.kv_batch_put` of the process's default client."""
    return default_client().kv_batch_put(
        keys, partition_id, fields, tags,
        attempt=attempt, must_exist=must_exist, if_absent=if_absent, return_tags=return_tags,
        timeout=timeout,
    )  # fmt: skip


def kv_batch_get(
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Layout = "nested",
    pad: Pad | Mapping[str, Pad] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    total: int | None = None,
    trim: Mapping[str, tuple[int, int]] | None = None,
    on_missing: str = "raise",
    timeout: float | None = None,
) -> Rows:
    """`Client.kv_batch_get` of the process's default client."""
    return default_client().kv_batch_get(
        keys, partition_id, select_fields,
        layout=layout, pad=pad, out=out, total=total, trim=trim, on_missing=on_missing,
        timeout=timeout,
    )  # fmt: skip


def kv_view(
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Layout = "nested",
    timeout: float | None = None,
) -> AbstractContextManager[Rows]:
    """`Client.kv_view` of the process's default client."""
    return default_client().kv_view(
        keys, partition_id, select_fields, layout=layout, timeout=timeout
    )


def kv_list(
    partition_id: str,
    *,
    where: Where | None = None,
    since: Revision | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    order_by: str | None = None,
    timeout: float | None = None,
) -> Listing:
    """`Client.kv_list` of the process's default client."""
    return default_client().kv_list(
        partition_id, where=where, since=since, columns=columns, limit=limit, order_by=order_by,
        timeout=timeout,
    )  # fmt: skip


def kv_clear(
    keys: Sequence[str] | None,
    partition_id: str,
    *,
    where: Where | None = None,
    retire: bool = False,
    until: Revision | None = None,
    timeout: float | None = None,
) -> int:
    """`Client.kv_clear` of the process's default client."""
    return default_client().kv_clear(
        keys, partition_id, where=where, retire=retire, until=until, timeout=timeout
    )


def begin_group(
    uid: str,
    partition_id: str,
    *,
    n: int,
    declared_bytes: int | None = None,
    timeout: float | None = None,
) -> int:
    """`Client.begin_group` of the process's default client."""
    return default_client().begin_group(
        uid, partition_id, n=n, declared_bytes=declared_bytes, timeout=timeout
    )


def end_group(
    attempt: int,
    status: str,
    *,
    timeout: float | None = None,
) -> Revision:
    """`Client.end_group` of the process's default client."""
    return default_client().end_group(attempt, status, timeout=timeout)


def kv_wait(
    partition_id: str,
    where: Where | None = None,
    *,
    count: int = 1,
    group_by: str | None = None,
    timeout: float | None = None,
) -> KVBatchMeta:
    """`Client.kv_wait` of the process's default client."""
    return default_client().kv_wait(
        partition_id, where, count=count, group_by=group_by, timeout=timeout
    )


def kv_watch(
    partition_id: str,
    *,
    since: Revision | None = None,
    where: Where | None = None,
    timeout: float | None = None,
) -> Iterator[Change]:
    """`Client.kv_watch` of the process's default client."""
    return default_client().kv_watch(partition_id, since=since, where=where, timeout=timeout)


def kv_claim(
    partition_id: str,
    task: str,
    *,
    count: int,
    fields: Sequence[str] = (),
    where: Where | None = None,
    order_by: str | None = None,
    groups: bool = False,
    lease_s: float = 30.0,
    replica: tuple[int, int, int] | None = None,
    timeout: float | None = None,
) -> Claim:
    """`Client.kv_claim` of the process's default client."""
    return default_client().kv_claim(
        partition_id,
        task,
        count=count,
        fields=fields,
        where=where,
        order_by=order_by,
        groups=groups,
        lease_s=lease_s,
        replica=replica,
        timeout=timeout,
    )


def kv_commit(
    claim: Claim,
    *,
    timeout: float | None = None,
) -> Revision:
    """`Client.kv_commit` of the process's default client."""
    return default_client().kv_commit(claim, timeout=timeout)


def kv_release(
    claim: Claim,
    *,
    timeout: float | None = None,
) -> Revision:
    """`Client.kv_release` of the process's default client."""
    return default_client().kv_release(claim, timeout=timeout)


def kv_create_partition(
    partition_id: str,
    *,
    schema: Schema = None,
    quota: Quota | Mapping[str, int | None] | None = None,
    retention: Retention | Mapping[str, int] | None = None,
    timeout: float | None = None,
) -> Revision:
    """`Client.kv_create_partition` of the process's default client."""
    return default_client().kv_create_partition(
        partition_id, schema=schema, quota=quota, retention=retention, timeout=timeout
    )


def kv_list_partitions(
    *,
    timeout: float | None = None,
) -> dict[str, dict[str, Any]]:
    """`Client.kv_list_partitions` of the process's default client."""
    return default_client().kv_list_partitions(timeout=timeout)


def kv_seal_partition(
    partition_id: str,
    *,
    timeout: float | None = None,
) -> list[str]:
    """`Client.kv_seal_partition` of the process's default client."""
    return default_client().kv_seal_partition(partition_id, timeout=timeout)


def kv_drop_partition(
    partition_id: str,
    *,
    older_than: int | None = None,
    timeout: float | None = None,
) -> list[str]:
    """`Client.kv_drop_partition` of the process's default client."""
    return default_client().kv_drop_partition(partition_id, older_than=older_than, timeout=timeout)


def explain(
    partition_id: str | None = None,
    where: Where | None = None,
    *,
    fields: Sequence[str] = (),
    task: str | None = None,
    group_by: str | None = None,
    count: int | None = None,
    timeout: float | None = None,
) -> Explanation:
    """`Client.explain` of the process's default client."""
    return default_client().explain(
        partition_id,
        where,
        fields=fields,
        task=task,
        group_by=group_by,
        count=count,
        timeout=timeout,
    )


def request_outcome(
    request_id: str,
    *,
    timeout: float | None = None,
) -> dict[str, Any]:
    """`Client.request_outcome` of the process's default client."""
    return default_client().request_outcome(request_id, timeout=timeout)


def trace(
    partition_id: str | None = None,
    *,
    uid: str | None = None,
    key: str | None = None,
    since: int = 0,
    limit: int | None = None,
    timeout: float | None = None,
) -> Trace:
    """`Client.trace` of the process's default client."""
    return default_client().trace(
        partition_id, uid=uid, key=key, since=since, limit=limit, timeout=timeout
    )


def stage(name: str) -> AbstractContextManager[None]:
    """`Client.stage` of the process's default client."""
    return default_client().stage(name)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    timeout: float | None = None,
) -> dict[str, Any]:
    """`Client.save_checkpoint` of the process's default client."""
    return default_client().save_checkpoint(path, overwrite=overwrite, timeout=timeout)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    timeout: float | None = None,
) -> dict[str, Any]:
    """`Client.load_checkpoint` of the process's default client."""
    return default_client().load_checkpoint(path, timeout=timeout)


# -- inside ----------------------------------------------------------------------------------


def settings_of(config: Config | Mapping[str, Any] | None) -> Config:
    """The settings that a caller gave, checked."""
    if isinstance(config, Config):
        return config
    return checked(Config, config or {})


def is_gateway(address: str | None) -> bool:
    """Whether a plane's address is that of a gateway, and not of a unix socket of its own."""
    return type(address) is str and address.startswith(GATEWAY_SCHEMES)


def _uses_ray(config: Config) -> bool:
    if config.host == "auto":
        ray = sys.modules.get("ray")
        return ray is not None and bool(ray.is_initialized())
    return config.host == "ray"


def _client(joined: Joined, config: Config) -> Client:
    return Client(joined, config)


def join(name: str, address: str | None, config: Config) -> Joined:
    """How to reach a plane that exists already."""
    from dataplane.host import embedded

    if address is not None:
        return embedded.attach_address(address, config)
    if _uses_ray(config):
        from dataplane.host.ray import plane as host

        return host.attach(name, config)
    joined = embedded.attach(name, config)
    if joined is None:
        raise PlaneLost(
            f"no plane {name!r} runs on this machine: start one with dataplane.init() or "
            "`dataplane serve`, or initialise Ray to join a cluster's"
        )
    return joined


def _gateway_of(joined: Joined, config: Config) -> GatewayChild | None:
    """The gateway that is to stand beside a plane, once it listens."""
    if config.gateway is None:
        return None
    from dataplane.gateway.child import GatewayChild

    return GatewayChild(joined, config.gateway, config)


def _on_ray(name: str, config: Config) -> Client:
    """A client of the plane of this name on Ray, once one that is just ending has ended."""
    from dataplane.host.ray import plane as host

    deadline = time.monotonic() + config.start_timeout_s
    while True:
        try:
            client = _attached(host.start_or_attach(name, config), config)
            lost = None
        except PlaneLost as error:
            client, lost = None, error
        if client is not None:
            return client
        if time.monotonic() > deadline:
            raise lost or PlaneLost(f"plane {name!r} is ending, and has not ended in time")
        time.sleep(ENDING_PAUSE_S)


def _attached(joined: Joined | None, config: Config) -> Client | None:
    """A client of a plane that was found, unless it has ended since."""
    if joined is None:
        return None
    client = _client(joined, config)
    try:
        client.attach()
    except PlaneLost:
        client.close()
        return None
    return client


def _become_default(client: Client) -> None:
    global _default
    if _default is None or _default.closed:
        _default = client
