"""A sequence that was recorded piece by piece while an agent talked to a model. No I/O.

Owns how pieces become the canonical form of a trajectory: template, user and tool text supervises
nothing, what the policy generated supervises itself. Source: XTuner's trace export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from agentloop.trajectory.experts import traced_experts
from agentloop.trajectory.state import Canonical, RolloutState
from dataplane.fields import IGNORED


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came at once. Its lists are as long as `token_ids`."""

    token_ids: Sequence[int]
    labels: Sequence[int] | None = None
    """None: nothing of it is supervised."""
    logprobs: Sequence[float] | None = None
    """None: 0.0 for each token."""
    versions: Sequence[int] | None = None
    """Policy version of each token."""
    routed_experts: npt.NDArray[Any] | None = None  # [tokens, layers * topk]

    @property
    def is_generated(self) -> bool:
        """Whether any of it is supervised."""
        return self.labels is not None and any(label != IGNORED for label in self.labels)


def fill_from_trace(state: RolloutState, pieces: Sequence[Piece], *, trims: bool = False) -> None:
    """Give a state the canonical form that its trace recorded; `canonicalize` then checks it.

    The response is what follows `prompt_ids`, which stay as they are. With `trims` the row ends at
    the last piece that the policy generated.

    Raises:
        ValueError: the trace does not begin with the prompt, a piece's lists differ in length, only
            some pieces have experts or only some generated ones log-probs, or `trims` leaves
            nothing. The state is as it was.
    """
    if trims:
        last = max((i for i, piece in enumerate(pieces) if piece.is_generated), default=-1)
        pieces = pieces[: last + 1]
        if not pieces:
            raise ValueError("no piece of the trace was generated")
    ids = [token for piece in pieces for token in piece.token_ids]
    prompt = state.prompt_ids or []
    if ids[: len(prompt)] != prompt:
        raise ValueError(f"the trace does not begin with its prompt of {len(prompt)} tokens")
    canonical = Canonical(ids, _labels(pieces), _logprobs(pieces))
    versions = _versions(pieces)
    experts = traced_experts([piece.routed_experts for piece in pieces])
    response = ids[len(prompt) :]
    state.response_ids = response
    state.generated = [label != IGNORED for label in canonical.labels[len(prompt) :]]
    state.response_logprobs = canonical.logprobs and canonical.logprobs[len(prompt) :]
    state.response_model_steps = versions[len(prompt) :]
    state.routed_experts = experts
    state.canonical = canonical
    state.meta = None


def _entries(name: str, piece: Piece, values: Sequence[Any]) -> list[Any]:
    if len(values) != len(piece.token_ids):
        raise ValueError(
            f"a piece of {len(piece.token_ids)} tokens has {len(values)} entries of {name}"
        )
    return list(values)


def _labels(pieces: Sequence[Piece]) -> list[int]:
    labels: list[int] = []
    for piece in pieces:
        its = [IGNORED] * len(piece.token_ids) if piece.labels is None else piece.labels
        labels += _entries("labels", piece, its)
    return labels


def _logprobs(pieces: Sequence[Piece]) -> list[float] | None:
    if all(piece.logprobs is None for piece in pieces):
        return None
    logprobs: list[float] = []
    for piece in pieces:
        if piece.logprobs is None and piece.is_generated:
            raise ValueError("some generated pieces of the trace have log-probs and some have none")
        its = [0.0] * len(piece.token_ids) if piece.logprobs is None else piece.logprobs
        logprobs += _entries("logprobs", piece, its)
    return logprobs


def _versions(pieces: Sequence[Piece]) -> list[int]:
    """Of every token, or none at all: text that was not generated has that of what it follows."""
    named = [piece.versions for piece in pieces if piece.versions]
    if not named or any(piece.versions is None and piece.is_generated for piece in pieces):
        return []
    versions: list[int] = []
    for piece in pieces:
        before = versions[-1] if versions else named[0][0]
        its = [before] * len(piece.token_ids) if piece.versions is None else piece.versions
        versions += _entries("versions", piece, its)
    return versions
