"""A capture put together from its settings. Owns which part gets which."""

from __future__ import annotations

import time

from agentloop.capture.journal import Journal
from agentloop.capture.publisher import PlanePublisher
from agentloop.capture.runs import Runs
from agentloop.capture.server import CaptureServer
from agentloop.capture.service import Capture
from agentloop.capture.settings import CaptureSettings
from agentloop.capture.upstream import Upstream
from dataplane import AsyncClient


def make_server(
    settings: CaptureSettings,
    client: AsyncClient,
    *,
    admin_key: str | None = None,
    insecure_allow_anyone: bool = False,
) -> CaptureServer:
    """A server that publishes with this client, and goes on with the runs of its journal.

    The client stays its owner's; the server is stopped first.

    Raises:
        EngineError: the upstream's address is none, or the variable of its key is not set.
        OSError, ValueError: the journal cannot be had.
    """
    upstream = Upstream(settings.upstream)
    journal = None if settings.journal is None else Journal(settings.journal)
    runs = Runs(settings.limits, journal)
    runs.restore(time.monotonic())
    publisher = PlanePublisher(
        client, settings.partition_id, max_quarantined=settings.max_quarantined
    )
    capture = Capture(settings, upstream, publisher, runs)
    return CaptureServer(
        capture, settings, admin_key=admin_key, insecure_allow_anyone=insecure_allow_anyone
    )
