"""What the sessions of a played rollout say, and what must come of it.

A prompt's number modulo four says which of four groups its sessions make: the worked GRPO vector
with two outputs in one session; several lengths and turns; a session without output; a session
that fails. Pure: the expected values are computed here without verl.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SESSIONS = 3
FAILS = None
"""In place of a session's outputs: it raises."""

_GROUPS: list[list[tuple[list[list[int]], float] | None]] = [
    [([[1, 0, 1], [1, 1, 0]], 1.0), ([[1, 1, 1]], 0.0), ([[0, 1, 1]], 0.5)],
    [([[1] * 5], 0.0), ([[1, 1, 0, 0, 1, 1]], 1.0), ([[1, 1]], 1.0)],
    [([], 0.0), ([[1] * 4], 1.0), ([[1, 1, 1]], 1.0)],
    [FAILS, ([[1] * 7], 0.25), ([[1, 0, 1]], 0.75)],
]


@dataclass(frozen=True)
class Output:
    """One trajectory of a session."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    log_probs: list[float]
    experts: list[list[list[int]]]
    """[tokens − 1, 2 layers, 1 expert]: an engine records one row fewer than tokens."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Trajectory:
    """An output with where it belongs."""

    number: int
    session: int
    index: int
    output: Output
    score: float

    def key(self, uid: str) -> str:
        return f"{uid}_{self.session}_{self.index}"


def session(number: int, which: int) -> tuple[list[Output], float] | None:
    """The outputs of a session of this prompt and its score, or None if it fails."""
    said = _GROUPS[number % 4][which]
    if said is None:
        return None
    masks, score = said
    return [_output(number, which, index, mask) for index, mask in enumerate(masks)], score


def _output(number: int, which: int, index: int, mask: list[int]) -> Output:
    prompt = [100 + number] * (2 + number % 3) + [which + 1]
    response = [10 * (index + 1) + token for token in range(len(mask))]
    return Output(
        prompt_ids=prompt,
        response_ids=response,
        mask=mask,
        log_probs=[-0.01 * (token + 1) for token in range(len(mask))],
        experts=[[[token % 4], [which]] for token in range(len(prompt) + len(mask) - 1)],
    )


def trajectories(number: int, sessions: int = SESSIONS) -> list[Trajectory]:
    """All that the sessions of a prompt write."""
    found: list[Trajectory] = []
    for which in range(sessions):
        said = session(number, which)
        if said is not None:
            outputs, score = said
            found += [
                Trajectory(number, which, index, output, score)
                for index, output in enumerate(outputs)
            ]
    return found


def fails(number: int, sessions: int = SESSIONS) -> bool:
    """Whether a session of this prompt raises."""
    return any(session(number, which) is None for which in range(sessions))


def advantages(number: int) -> dict[tuple[int, int], list[float]]:
    """GRPO advantages by session and index: the last output of each session enters the group's
    mean and sample deviation; its value goes to all outputs of the session, times their masks."""
    rows = trajectories(number)
    scores = {row.session: row.score for row in rows}
    mean = statistics.fmean(scores.values())
    deviation = statistics.stdev(scores.values())
    return {
        (row.session, row.index): [
            (row.score - mean) / (deviation + 1e-6) * bit for bit in row.output.mask
        ]
        for row in rows
    }


def forward(input_ids: Iterable[int]) -> tuple[list[float], list[float]]:
    """What the played model computes for a row: log-probabilities and entropies, one per token."""
    ids = list(input_ids)
    return [-(token + place) / 1000 for place, token in enumerate(ids)], [t / 100 for t in ids]


def of_response(values: list[float], output: Output) -> list[float]:
    """The part of a row's values that predicts the response: shifted left by one."""
    start = len(output.prompt_ids) - 1
    return values[start : start + len(output.response_ids)]


def tags(row: Trajectory, step: int) -> dict[str, Any]:
    """The tags that the agent loop gives to a trajectory."""
    prompt, response = len(row.output.prompt_ids), len(row.output.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        **versions(row.number, step),
    }


def versions(number: int, step: int) -> Mapping[str, int]:
    """The weight versions at the start and the end of a trajectory: prompts 1, 5, … span three."""
    return {
        "min_global_steps": step - (3 if number % 4 == 1 else 1),
        "max_global_steps": step - 1,
    }
