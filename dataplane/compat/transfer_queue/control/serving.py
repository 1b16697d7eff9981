"""The controller's server: a thread with an event loop in it that serves the low-level client.

Owns its sockets, where it says that it listens, and when it ends: with its plane. It knows nothing
of Ray, which only begins its process again; what it knows of rows lies in the plane.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import uvloop

from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    PartitionNotFound,
    PlaneLost,
    Unreachable,
)
from dataplane.host.folders import plane_folders
from dataplane.server.plane import PlaneServer
from dataplane.types import Revision

from ..link import Link
from ..names import HIDDEN
from ..sampler import BaseSampler
from .mirrors import Mirrors
from .service import ControllerService

log = logging.getLogger("dataplane.compat")

Result = TypeVar("Result")

KEY = "controller"
"""The key, in the hidden partition, whose tag `address` says where the controller listens."""
CONFIG = "config"
"""The key whose tag `json` is the instance's settings."""
SOCKET = "tq.sock"


class ControllerServer:
    """Serves from when it is made until the plane ends, or `stop`."""

    def __init__(
        self,
        plane: str,
        config: Config,
        sampler: BaseSampler,
        *,
        polling_mode: bool,
        ahead: int = 1,
        tcp_host: str | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.plane = plane
        self.config = config
        self.settings: Any = None
        """The instance's settings; None before they were stored."""
        self.link: Link
        self.service: ControllerService
        self._sampler = sampler
        self._polling_mode = polling_mode
        self._ahead = ahead
        self._tcp_host = tcp_host
        self._on_end = on_end
        self._failed: DataplaneError | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer_queue", daemon=True)
        self._thread.start()

    def up(self, timeout_s: float | None = None) -> None:
        """Return when it serves, or raise why it does not."""
        wait_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        if not self._ready.wait(wait_s):
            raise DeadlineExceeded(
                f"the TransferQueueController has not joined plane {self.plane!r} within "
                f"{wait_s:g} s",
                waited_s=wait_s,
            )
        if self._failed is not None:
            raise self._failed

    def call(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of work on the loop, once it serves; its steps have the plane's deadlines."""
        self.up()
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def stop(self) -> None:
        """Serve no more. What it knew stays in the plane."""
        self.up()
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def store(self, settings: Any) -> None:
        """Keep the instance's settings, here and in the plane."""
        self.settings = settings
        text = json.dumps(as_plain(settings), default=_named)
        await self.link.aio.kv_put(CONFIG, HIDDEN, tags={"json": text})

    def _run(self) -> None:
        try:
            self.link = Link.join(self.plane, self.config)
            uvloop.run(self._serve())
        except DataplaneError as error:
            self._failed = error
        except Exception as error:
            log.exception("the controller ended")
            self._failed = InternalError(f"{type(error).__name__}: {error}")
        else:
            self._failed = PlaneLost(f"nothing serves plane {self.plane!r} here any more")
        self._ready.set()
        if self._on_end is not None:
            self._on_end()

    async def _serve(self) -> None:
        """Serve until the plane ends or it is told to stop."""
        config, joined = self.config, self.link.joined
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        # The node's value store owns these folders, for as long as the plane is there.
        folders = plane_folders(joined.name, joined.plane_id, config.runtime_dir, config.shm_dir)
        server = PlaneServer(folders, config, joined.secret)
        mirrors = Mirrors(self.link.aio, config.wait_timeout_s, self._ahead)
        self.service = ControllerService(mirrors, self._sampler, polling_mode=self._polling_mode)
        server.verbs.update(self.service.verbs)
        tcp = None if self._tcp_host is None else (self._tcp_host, 0)
        address = await server.bind(SOCKET, tcp)
        await server.listen()
        try:
            await mirrors.indexes.start()
            await self._read_settings()
            meta = await self.link.aio.kv_put(KEY, HIDDEN, tags={"address": address.to_wire()})
            assert meta.revision is not None
            watching = self._loop.create_task(self._until_plane_ends(meta.revision))
            stopped = self._loop.create_task(self._stopped.wait())
            self._ready.set()
            await asyncio.wait([watching, stopped], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            watching.cancel()
            stopped.cancel()
        finally:
            await server.close()
            self.link.close()

    async def _read_settings(self) -> None:
        """Take up the settings that an earlier life of this controller was given."""
        try:
            listing = await self.link.aio.kv_list(HIDDEN, where={"json": {"exists": True}})
        except PartitionNotFound:
            return
        from omegaconf import OmegaConf

        for tags in listing.tags:
            self.settings = OmegaConf.create(json.loads(cast("str", tags["json"])))

    async def _until_plane_ends(self, since: Revision) -> None:
        while True:
            try:
                async for change in self.link.aio.kv_watch(HIDDEN, since=since):
                    since = change.revision
            except DeadlineExceeded:
                continue  # nothing has changed for long
            except Unreachable:
                continue  # the tag store is started again, or the plane has ended
            except PlaneLost as error:
                log.info("the controller leaves: %s", error)
                return


def as_plain(config: Any) -> Any:
    """The settings as plain containers; what is in them may be any object."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config) if OmegaConf.is_config(config) else config


def _named(value: object) -> str:
    """How a setting that is an object is remembered: by the name of its class."""
    kind: type[object] = value if isinstance(value, type) else type(value)
    return kind.__name__
