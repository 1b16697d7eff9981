"""Several rewards as one: a weighted sum of named parts, or judges chosen by the data source."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.datasets.data_source import source_weights
from agentloop.rewards.judging import ask, close_reward
from agentloop.rewards.types import Reward, RewardError
from agentloop.trajectory.state import RolloutState


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a sum."""

    reward: Reward
    weight: float = 1.0
    default: float | None = None
    """The score that stands in where this part fails. None: then the whole reward fails."""
    timeout_s: float = 120.0
    """Of one call, whatever the part's own timeouts are."""


class WeightedReward:
    """The sum of weight * score over the parts; what each part said is kept under its name.

    Example: parts of 1.0 and 0.5 with weights 1 and 0.2 give
    {"score": 1.1, "accuracy": {"score": 1.0}, "format": {"score": 0.5}}.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ValueError("a sum of rewards needs at least one part")
        for name, part in parts.items():
            _require_name(name)
            if not math.isfinite(part.weight):
                raise ValueError(f"the weight of {name!r} is {part.weight}, and must be finite")
            if part.default is not None and not math.isfinite(part.default):
                raise ValueError(f"the default of {name!r} is {part.default}, and must be finite")
        self._parts = dict(parts)

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        """Raises RewardError that names every part which failed and has no default."""
        said = await asyncio.gather(
            *(_ask_part(name, part, states) for name, part in self._parts.items()),
            return_exceptions=True,
        )
        columns = _all_said(said)
        weights = {name: part.weight for name, part in self._parts.items()}
        return [
            _summed(
                {name: column[i] for name, column in zip(weights, columns, strict=True)}, weights
            )
            for i in range(len(states))
        ]

    async def close(self) -> None:
        """Close the parts."""
        for part in self._parts.values():
            await close_reward(part.reward)


class RoutedReward:
    """Each trajectory is judged by the judge that its data source names.

    The row's `data_source` is a name, or a map from names to weights: then the score is the sum of
    weight * score. What each judge said is kept under its name.
    """

    def __init__(
        self, judges: Mapping[str, Reward], *, default: str | None = None, timeout_s: float = 120.0
    ) -> None:
        """
        Args:
            judges: By the names that data sources have.
            default: The judge of trajectories whose source names none that is here.
            timeout_s: Of one call of a judge.
        """
        for name in judges:
            _require_name(name)
        if default is not None and default not in judges:
            raise ValueError(f"the default judge {default!r} is none of {', '.join(judges)}")
        self._judges = dict(judges)
        self._default = default
        self._timeout_s = timeout_s

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        """Raises RewardError that names the sources without a judge, or the judges that failed."""
        weights = [self._weights(state) for state in states]
        named = [name for name in self._judges if any(name in each for each in weights)]
        members = {name: [i for i, each in enumerate(weights) if name in each] for name in named}
        said = await asyncio.gather(
            *(
                _ask_part(
                    name,
                    Part(self._judges[name], timeout_s=self._timeout_s),
                    [states[i] for i in members[name]],
                )
                for name in named
            ),
            return_exceptions=True,
        )
        parts: list[dict[str, dict[str, Any]]] = [{} for _ in states]
        for name, column in zip(named, _all_said(said), strict=True):
            for i, verdict in zip(members[name], column, strict=True):
                parts[i][name] = verdict
        return [_summed(part, each) for part, each in zip(parts, weights, strict=True)]

    async def close(self) -> None:
        """Close the judges."""
        for judge in self._judges.values():
            await close_reward(judge)

    def _weights(self, state: RolloutState) -> dict[str, float]:
        source = state.row.get("data_source")
        source = state.data_source if source is None else source
        try:
            weights = {n: w for n, w in source_weights(source).items() if w != 0.0}
        except ValueError as error:
            raise RewardError(str(error)) from error
        absent = [name for name in weights if name not in self._judges]
        if weights and not absent:
            return weights
        if self._default is None:
            raise RewardError(
                f"no judge for the data source {', '.join(absent) or repr(source)}; there are "
                f"{', '.join(self._judges)}, and no default"
            )
        # The default takes over the weights of the names that it stands in for.
        taken = sum(weights[name] for name in absent) if weights else 1.0
        kept = {name: weight for name, weight in weights.items() if name in self._judges}
        return {**kept, self._default: kept.get(self._default, 0.0) + taken}


async def _ask_part(name: str, part: Part, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
    try:
        return await ask(part.reward, states, timeout_s=part.timeout_s, name=name)
    except RewardError as error:
        if part.default is None:
            raise
        return [{"score": part.default, "error": str(error)} for _ in states]


def _all_said(
    said: Sequence[list[dict[str, Any]] | BaseException],
) -> list[list[dict[str, Any]]]:
    failed = [error for error in said if isinstance(error, BaseException)]
    for error in failed:
        if not isinstance(error, RewardError):
            raise error
    if failed:
        raise RewardError("; ".join(map(str, failed))) from failed[0]
    return [each for each in said if not isinstance(each, BaseException)]


def _summed(parts: Mapping[str, dict[str, Any]], weights: Mapping[str, float]) -> dict[str, Any]:
    total = math.fsum(weights[name] * part["score"] for name, part in parts.items())
    if not math.isfinite(total):
        raise RewardError(f"the weighted sum of {', '.join(parts)} is {total}")
    return {"score": total, **parts}


def _require_name(name: str) -> None:
    if not name or name == "score":
        raise ValueError(f"a part of a reward cannot have the name {name!r}")
