"""How an actor ends for good, so that its name is free."""

from __future__ import annotations

import logging
import threading
from typing import NoReturn

from dataplane.host.ray.lookup import ray

log = logging.getLogger("dataplane.host")

PAUSE_S = 5.0
"""Before Ray is asked once more."""


def end_this_actor() -> NoReturn:
    """Have Ray kill the actor that this process is.

    It never exits by itself, however slow Ray is: it would be started again, and what has ended
    would be there once more, empty. Where Ray is gone, so is this process soon.
    """
    while True:
        try:
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            log.warning(
                "the actor could not end itself through Ray; it is tried again", exc_info=True
            )
        threading.Event().wait(PAUSE_S)
