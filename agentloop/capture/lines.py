"""A run as the lines of its journal, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agentloop.capture.ending import Identity, Verdict
from agentloop.capture.run import Outcome, Run
from agentloop.capture.turn import (
    RefusedTurn,
    Turn,
    of_plain,
    refused_of_plain,
    refused_to_plain,
    to_plain,
)


def head_line(run: Run) -> dict[str, Any]:
    """The first line of a run's journal."""
    plain = asdict(run.identity)
    return {"run": plain, "key": run.key.hex(), "version": run.version}


def turn_line(turn: Turn | RefusedTurn) -> dict[str, Any]:
    """A turn as a line."""
    if isinstance(turn, RefusedTurn):
        return {"refused": refused_to_plain(turn)}
    return {"turn": to_plain(turn)}


def verdict_line(verdict: Verdict) -> dict[str, Any]:
    """What was said so far, as a line."""
    return {"verdict": asdict(verdict)}


def closed_line() -> dict[str, Any]:
    """That no turn follows, as a line."""
    return {"closed": True}


def outcome_line(outcome: Outcome) -> dict[str, Any]:
    """The answer of a run that has ended, as a line."""
    return {"outcome": dict(outcome.body), "refusal": outcome.refusal}


def of_lines(lines: Sequence[Mapping[str, Any]]) -> Run:
    """The run that these lines tell of.

    Raises:
        ValueError: they are not of a run, or do not fit together.
    """
    try:
        found = iter(lines)
        head = next(found, None)
        if head is None or "run" not in head:
            raise ValueError("its first line is not a run's")
        identity = Identity(**head["run"])
        run = Run(identity, bytes.fromhex(head["key"]), head.get("version"))
        _follow(run, found)
        return run
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _follow(run: Run, lines: Iterator[Mapping[str, Any]]) -> None:
    for line in lines:
        if "turn" in line:
            run.add(of_plain(line["turn"]))
        elif "refused" in line:
            run.add(refused_of_plain(line["refused"]))
        elif "undo" in line:
            run.undo(line["undo"])
        elif "verdict" in line:
            run.verdict = replace(Verdict(), **line["verdict"])
        elif "closed" in line:
            run.phase = "closed"
        elif "outcome" in line:
            refusal = line.get("refusal")
            run.shrink(Outcome(line["outcome"], None if refusal is None else tuple(refusal)))
        else:
            raise ValueError(f"a line is of no kind that is known: {json.dumps(line)[:80]}")
