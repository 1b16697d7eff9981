"""From the tags of an evaluation's trajectories to its metrics. No I/O.

Owns what counts as an attempt: a session, by its last trajectory. A session without a reward has
reward 0: one that failed is no success, and hides no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from trainer.trajectory import Tags

PASS_AT: Final = (1, 2, 4, 8, 16, 32)

NO_SOURCE: Final = "unknown"
"""The source of rows that name none, where others name one."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session of one prompt."""

    uid: str
    session: tuple[bool, int | str]
    """Which one, so that sessions have an order."""
    index: int
    source: str | None
    score: float
    turns: int | None

    @property
    def passed(self) -> bool:
        """Whether it counts as a success."""
        return self.score > 0


def evaluation_metrics(rows: Iterable[Tags]) -> dict[str, float]:
    """The metrics of an evaluation, from the tags of its trajectories; rows of prompts and filler
    rows may be among them, and count as nothing.

    `accuracy` is the share of attempts with a score over 0, `tool_turns/…` their turns. Where a
    prompt has more than one attempt, `pass@k` is the share of prompts that one of the first k
    attempts passed (prompts with fewer than k are left out), and `avg_pass@k` the mean share of
    passed ones among the first k, at the k that prompts have on average. With more than one data
    source every metric is under its source's name.

    Example: scores [1, 0] and [0, 0] of two prompts have accuracy .25, pass@1 .5, pass@2 .5 and
    avg_pass@2 .25.
    """
    made = attempts(rows)
    by_source: dict[str, list[Attempt]] = {}
    for attempt in made:
        by_source.setdefault(attempt.source or NO_SOURCE, []).append(attempt)
    if len(by_source) < 2:
        return _metrics(made)
    return {
        f"{source}/{name}": value
        for source, of_it in sorted(by_source.items())
        for name, value in _metrics(of_it).items()
    }


def mean_score(rows: Iterable[Tags]) -> float:
    """The mean score of all attempts, whatever their source; 0.0 of none."""
    made = attempts(rows)
    return sum(attempt.score for attempt in made) / len(made) if made else 0.0


def attempts(rows: Iterable[Tags]) -> list[Attempt]:
    """The sessions of these rows, by prompt and session.

    ValueError: a row has no uid or no session that says whose it is.
    """
    last: dict[tuple[str, tuple[bool, int | str]], Attempt] = {}
    for tags in rows:
        if tags.get("is_prompt") is True or tags.get("is_padding") is True:
            continue
        attempt = _attempt(tags)
        before = last.setdefault((attempt.uid, attempt.session), attempt)
        if before.index < attempt.index:
            last[attempt.uid, attempt.session] = attempt
    places = {uid: place for place, (uid, _) in reversed(list(enumerate(last)))}
    return sorted(last.values(), key=lambda attempt: (places[attempt.uid], attempt.session))


def _attempt(tags: Mapping[str, object]) -> Attempt:
    uid, session = tags.get("uid"), tags.get("session_id")
    if not isinstance(uid, str) or not isinstance(session, int | str):
        raise ValueError(
            f"a trajectory of an evaluation has uid {uid!r:.80} and session_id {session!r:.80}: "
            "its producer did not say whose it is"
        )
    score, turns, source = tags.get("score"), tags.get("num_turns"), tags.get("data_source")
    return Attempt(
        uid=uid,
        session=(isinstance(session, str), session),
        index=cast("int", tags.get("index") or 0),
        source=source if isinstance(source, str) else None,
        score=float(score) if isinstance(score, int | float) else 0.0,
        turns=turns if isinstance(turns, int) and not isinstance(turns, bool) else None,
    )


def _metrics(made: Sequence[Attempt]) -> dict[str, float]:
    if not made:
        return {"accuracy": 0.0}
    metrics: dict[str, float] = {"accuracy": _share(made)}
    turns = [attempt.turns for attempt in made if attempt.turns is not None]
    if turns:
        metrics["tool_turns/mean"] = sum(turns) / len(turns)
        metrics["tool_turns/min"] = min(turns)
        metrics["tool_turns/max"] = max(turns)
    groups: dict[str, list[Attempt]] = {}
    for attempt in made:
        groups.setdefault(attempt.uid, []).append(attempt)
    if len(groups) == len(made):
        return metrics
    usual = max(1, round(len(made) / len(groups)))
    metrics["eval_group_count"] = len(groups)
    metrics["eval_attempt_count"] = len(made)
    metrics["eval_inferred_k"] = usual
    for k in (k for k in PASS_AT if k <= usual):
        firsts = _first(groups.values(), k)
        metrics[f"pass@{k}"] = sum(any(a.passed for a in few) for few in firsts) / len(firsts)
    firsts = _first(groups.values(), usual)
    metrics[f"avg_pass@{usual}"] = sum(map(_share, firsts)) / len(firsts)
    return metrics


def _first(groups: Iterable[Sequence[Attempt]], k: int) -> list[Sequence[Attempt]]:
    """The first k attempts of each prompt that has so many. There is one: k is no more than the
    mean of them, rounded."""
    return [group[:k] for group in groups if len(group) >= k]


def _share(made: Sequence[Attempt]) -> float:
    return sum(attempt.passed for attempt in made) / len(made)
