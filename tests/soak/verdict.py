"""What a soak has shown: what grew, and what is still held when all is over. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.soak.samples import COUNTS, Sample
from tests.soak.slope import least_squares, theil_sen

GROWTH = 0.05
"""Of what there is after the warm-up, in an hour: what the upper bound of a slope may be."""


POOL_THREADS = 2 * ((os.cpu_count() or 1) + 4)
"""Threads that asyncio keeps for what blocks, of two processes at most."""


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    seen: str
    limit: str
    over: bool


SERIES: dict[str, Callable[[Sample], float]] = {
    "memory of the servers": lambda s: s.servers.own_bytes,
    "memory of the users": lambda s: s.users.own_bytes,
    "descriptors of the servers": lambda s: s.servers.descriptors,
    "descriptors of the users": lambda s: s.users.descriptors,
    "segments": lambda s: s.segment_bytes,
    "journal": lambda s: s.journal_bytes,
    "clients remembered": lambda s: s.count("kept", "clients"),
}
_JUDGED = ("memory of the servers", "memory of the users")


def growth(samples: Sequence[Sample], *, kills: bool) -> list[Finding]:
    """How much of each series there is more in an hour, in shares of its mean.

    Where processes of the plane are killed, memory begins anew with each, and a client that was not
    told what became of a request has the answers to its next 16,384 kept: then nothing is judged.
    """
    hours = [sample.at_s / 3600 for sample in samples]
    found: list[Finding] = []
    for what, of in SERIES.items():
        values = [of(sample) for sample in samples]
        mean = sum(values) / len(values)
        if not mean:
            continue
        for name, fit in (("least squares", least_squares), ("Theil-Sen", theil_sen)):
            slope = fit(hours, values)
            judged = what in _JUDGED and not kills
            found.append(
                Finding(
                    f"{what}, {name}",
                    f"{slope.estimate / mean:+.1%}/h, at most {slope.upper / mean:+.1%}/h "
                    f"(mean {mean:,.0f})",
                    f"{GROWTH:.0%}/h" if judged else "",
                    judged and slope.upper / mean > GROWTH,
                )
            )
    return found


def refusals(counts: Mapping[str, Counter[str]], *, kills: bool) -> list[Finding]:
    """Errors that say that a store was away, which without kills none ever is."""
    return [
        Finding(f"{error} at {who}", str(of_who[error]), "0", over=True)
        for who, of_who in counts.items()
        for error in ("Unreachable", "OutcomeUnknown")
        if of_who[error] and not kills
    ]


def leaks(first: Sample, last: Sample) -> list[Finding]:
    """What is held at the end and was not at first."""
    found = [
        Finding(what, str(of(last)), str(of(first)), of(last) > of(first))
        for what, of in COUNTS.items()
    ]
    threads, most = last.servers.threads, first.servers.threads + POOL_THREADS
    found.append(Finding("threads", str(threads), f"<= {most}", threads > most))
    room = last.count("values", "capacity_bytes")
    size = last.segment_bytes
    found.append(Finding("segments", f"{size:,}", f"<= {room:,}", size > room))
    return found


def table(findings: Sequence[Finding]) -> str:
    """As text."""
    widths = [max(len(finding[i]) for finding in findings) for i in range(3)]
    return "\n".join(
        f"{f.what:{widths[0]}}  {f.seen:{widths[1]}}  {f.limit:>{widths[2]}}"
        f"  {'OVER' if f.over else 'ok' if f.limit else ''}".rstrip()
        for f in findings
    )
