"""When a request to a server is tried again, and after how long. Pure: chance is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LATER: Final = frozenset({429, 503})
"""The server is there and says: not now. Tried again until the request's deadline."""

BROKEN: Final = frozenset({500, 502, 504})
"""It may work at another try, and each counts."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How often and how patiently one request is tried."""

    tries: int = 5
    """That may fail by a broken connection or a broken server. While a server says 'not now' it
    costs none: that ends with the request's deadline."""
    base_s: float = 0.25
    cap_s: float = 15.0

    def delay_s(self, attempt: int, draw: float, retry_after_s: float | None = None) -> float:
        """How long to wait before the next try: full jitter over a doubling, capped range.

        `attempt` counts from 0, `draw` is uniform in [0, 1). A server's `retry_after_s` is waited
        for, with the jitter on top, so that those who were told the same do not come at once.
        """
        jitter = draw * min(self.cap_s, self.base_s * 2.0 ** min(attempt, 30))
        return jitter if retry_after_s is None else retry_after_s + jitter


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a `Retry-After` header; None if it has none (dates are not looked at)."""
    if header is None or not header.strip().isascii() or not header.strip().isdigit():
        return None
    return float(header.strip()[:6])
