"""The sections of a report: each from its part of the data to what is seen of it. Pure.

A section without data says so in a sentence, and in which case there would be some.
"""

from __future__ import annotations

from dataplane.report.data import Data
from dataplane.report.markup import Markup, joined
from dataplane.report.sections.of_plane import (
    groups,
    lag,
    lengths,
    memory,
    traffic,
    waiting,
    waits,
)
from dataplane.report.sections.of_run import padding, reward, stages, staleness


def sections(data: Data) -> Markup:
    """All of them, in order."""
    return joined(
        groups(data), reward(data), stages(data), lengths(data), padding(data), staleness(data),
        lag(data), memory(data), waiting(data), traffic(data), waits(data),
    )  # fmt: skip
