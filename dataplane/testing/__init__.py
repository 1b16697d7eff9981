"""What users and this project test with: a plane in this process, and ways to make it fail.

`plane()` is a plane in a thread of the calling process, for unit tests. `FaultProxy` stands between
a client and a plane and delays, drops, cuts, repeats or damages what passes; `proxied()` leads a
client through such proxies to every store of a plane. `dataplane.testing.switches` kills a plane's
processes at named points. `dataplane.testing.plugin` has fixtures of all that for pytest.

Names load on first use: a server that may be killed at a named point needs none of the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.testing.memory import MemoryPlane, plane
    from dataplane.testing.proxies import Proxies, proxied
    from dataplane.testing.proxy import FaultProxy

__all__ = ["FaultProxy", "MemoryPlane", "Proxies", "plane", "proxied"]

_WHERE = {
    "FaultProxy": "proxy",
    "MemoryPlane": "memory",
    "Proxies": "proxies",
    "plane": "memory",
    "proxied": "proxies",
}


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{where}"), name)
    globals()[name] = found
    return found
