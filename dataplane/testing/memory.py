"""A plane in a thread of this process: the real stores behind real sockets, without a child.

For unit tests of code that uses a plane. It is up in some 20 ms, knows all verbs, and leaves
nothing behind however the test ends. What it cannot do is die: for that, a plane needs a process of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from dataplane import session
from dataplane.client.aio import AsyncClient, close_everywhere
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config, MiB
from dataplane.errors import DeadlineExceeded, InvalidRequest, PlaneLost
from dataplane.host.folders import Folders, plane_folders, sweep
from dataplane.server.plane import PlaneServer
from dataplane.server.process import new_plane_id, serve

Result = TypeVar("Result")

SMALL: dict[str, Any] = {"capacity_bytes": 64 * MiB, "segment_bytes": 4 * MiB}
"""What a unit test needs, unless it says otherwise."""
SHM = "/dev/shm"
MAX_ROOT_BYTES = 60
"""Of a temporary folder in which unix sockets still have room for their names."""
CLOSE_TIMEOUT_S = 30.0

_numbers = itertools.count(1)


class MemoryPlane:
    """A plane in a thread of this process, and clients of it. Made by `plane()`."""

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.config = config
        self.folders: Folders = plane_folders(
            name, new_plane_id(), config.runtime_dir, config.shm_dir
        )
        self.server: PlaneServer
        """The server itself; it belongs to its thread: look at it through `call`."""
        self.joined: Joined
        """How to reach it, for clients that are made by hand."""
        self.client: Client
        """A client, which is also the process's default client while the plane is there."""
        self._clients: list[Client] = []
        self._async_clients: list[AsyncClient] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until: asyncio.Event
        self._pid = os.getpid()
        self._up: Future[PlaneServer] = Future()
        # A test that never ends the plane must still be able to end its process.
        self._thread = threading.Thread(target=self._run, name=f"plane {name}", daemon=True)

    # -- clients -----------------------------------------------------------------------------

    def connect(self, **settings: Any) -> Client:
        """One more blocking client, with other settings where they are given. It is closed with
        the plane at the latest."""
        client = Client(self.joined, self._with(settings))
        self._clients.append(client)
        client.attach()
        return client

    async def async_connect(self, **settings: Any) -> AsyncClient:
        """An asyncio client. It is closed with the plane at the latest."""
        client = AsyncClient(self.joined, self._with(settings))
        self._async_clients.append(client)
        await client.attach()
        return client

    def _with(self, settings: dict[str, Any]) -> Config:
        if not settings:
            return self.config
        return session.settings_of({**self.config.model_dump(exclude_unset=True), **settings})

    # -- the server's thread -----------------------------------------------------------------

    def call(self, function: Callable[[], Result], timeout: float = 10.0) -> Result:
        """The result of a function that is called in the server's thread, between two requests.

        DeadlineExceeded if it did not come to that in `timeout` seconds.
        """

        async def called() -> Result:
            return function()

        assert self._loop is not None
        answer = asyncio.run_coroutine_threadsafe(called(), self._loop)
        try:
            return answer.result(timeout)
        except TimeoutError:
            if answer.done():
                raise  # the function's own
            answer.cancel()
            raise DeadlineExceeded(
                f"the server of plane {self.name!r} did not come to it within {timeout:g} s",
                waited_s=timeout,
                explanation="its thread is busy, or another thread holds the interpreter",
            ) from None

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if self._up.done():
                raise
            self._up.set_exception(error)
        else:
            if not self._up.done():
                self._up.set_exception(PlaneLost(f"plane {self.name!r} ended at its start"))

    async def _serve(self) -> None:
        self._until = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await serve(self.folders, self.config, ready=self._up.set_result, until=self._until)

    def _start(self) -> None:
        self._thread.start()
        try:
            self.server = self._up.result(self.config.start_timeout_s)
        except TimeoutError:
            if self._up.done():
                raise
            raise DeadlineExceeded(
                f"plane {self.name!r} was not up within {self.config.start_timeout_s:g} s",
                waited_s=self.config.start_timeout_s,
                explanation="this process is busy, or its temporary folder is slow",
            ) from None
        self.joined = Joined(
            self.name, self.folders.plane_id, self.server.secret, self.server.address
        )
        _planes.add(self)

    def _stop(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: thread, sockets and folders are the parent's
        _planes.discard(self)
        for client in self._clients:
            client.close()
        for other in self._async_clients:
            close_everywhere(other)
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._until.set)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"plane {self.name!r} did not end within {CLOSE_TIMEOUT_S:g} s",
                    waited_s=CLOSE_TIMEOUT_S,
                    explanation="its thread is stuck; what it left is in "
                    f"{self.folders.runtime} and {self.folders.segments}",
                )

    def close_in_child(self) -> None:
        """Let go of the server's sockets in a forked child, where nobody serves them: a client
        elsewhere would wait for a plane that ended with the parent."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for fd in self.server.descriptors():
                # Not closed: the number stays taken until whoever owns it here lets go of it.
                os.dup2(null, fd, inheritable=False)
        finally:
            os.close(null)


@contextmanager
def plane(name: str | None = None, **settings: Any) -> Generator[MemoryPlane]:
    """A plane in a thread of this process, until the end of the block.

    `settings` are those of `dataplane.init()`; without them it takes up to 64 MiB, in segments of
    4 MiB. Inside the block the module-level verbs (`dataplane.kv_put`, …) use it. Its folders are
    its own, so any number of planes and of test processes run beside each other.

    Raises:
        InvalidRequest: a setting is wrong, or shared memory too small; the message says which.
        DeadlineExceeded: it was not up within `start_timeout_s`.
    """
    if settings.get("host", "embedded") != "embedded":
        raise InvalidRequest(f"a plane in this process is not hosted by {settings['host']!r}")
    with ExitStack() as stack:
        own: dict[str, Any] = {"host": "embedded", **SMALL}
        if "runtime_dir" not in settings:
            own["runtime_dir"] = stack.enter_context(_own_folder())
        if "shm_dir" not in settings:
            # One folder for all, so that the next plane of anybody frees the memory of a test
            # process that was killed.
            there = os.access(SHM, os.W_OK | os.X_OK)
            own["shm_dir"] = Path(SHM) if there else stack.enter_context(_own_folder())
        config = session.settings_of({**own, **settings})
        if config.runtime_dir is not None:
            sweep(config.runtime_dir, config.shm_dir)
        made = MemoryPlane(name or f"test-{os.getpid()}-{next(_numbers)}", config)
        stack.callback(made._stop)  # pyright: ignore[reportPrivateUsage] (of this file)
        made._start()  # pyright: ignore[reportPrivateUsage] (of this file)
        made.client = made.connect()
        stack.enter_context(session.default_is(made.client))
        yield made


@contextmanager
def _own_folder() -> Generator[Path]:
    """A new folder of short path, removed at the end, unless this is a child forked meanwhile."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > MAX_ROOT_BYTES:
        root = "/tmp"
    pid = os.getpid()
    path = Path(tempfile.mkdtemp(prefix="dataplane-", dir=root))
    try:
        yield path
    finally:
        if os.getpid() == pid:
            shutil.rmtree(path)


_planes: weakref.WeakSet[MemoryPlane] = weakref.WeakSet()


def _after_fork() -> None:
    for made in list(_planes):
        made.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
