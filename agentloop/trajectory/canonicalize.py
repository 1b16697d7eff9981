"""The full sequence that a trajectory is trained as, made or checked once it has ended. No I/O.

Owns the convention: prompt and response in one row, index i belongs to token i, labels are the
only carrier of supervision. Index 0 of log-probs is always 0. Nothing is shifted here.

    input_ids   prompt, then the response region (tool and environment tokens included)
    labels      -100 on the prompt; in the response the token where the policy generated it, else
                -100
    logprobs    0.0 on the prompt and on inserted tokens, or none for the whole row

Positions and routed experts are checked against the sequence; positions.py and experts.py own
their rules. Source of the rules: XTuner's
canonical full-sequence convention.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, cast, runtime_checkable

from agentloop.trajectory.experts import expert_ids
from agentloop.trajectory.meta import response_len, write_train_meta
from agentloop.trajectory.positions import extended_positions, has_axes
from agentloop.trajectory.state import Canonical, RolloutState, Status
from dataplane.fields import IGNORED

Tokenize: TypeAlias = Callable[[str], Sequence[int] | Sequence[Sequence[int]]]
"""Text to token ids, as a flat list or as a batch of one."""

FAILED: Final = "canonicalize_train_fields failed"
"""What the error of a trajectory begins with that could not be made canonical."""


@runtime_checkable
class _Array(Protocol):
    """A numpy array or a torch tensor: torch need not be here."""

    def tolist(self) -> object: ...


class NotCanonical(ValueError):
    """A trajectory breaks a rule of the canonical form."""


def canonicalize(
    state: RolloutState,
    tokenize: Tokenize | None = None,
    *,
    builds: bool = True,
    multimodal: bool = True,
) -> None:
    """A completed trajectory has its canonical form and its meta afterwards, or has failed.

    One that has its form already is checked and not changed. Any other status is left alone. Never
    raises: what is wrong becomes the trajectory's `error_msg`. Doing it twice changes nothing.

    Args:
        tokenize: makes ids of a response of which only the text is known.
        builds: False for loops that make the form themselves: a trajectory without one is left
            alone.
        multimodal: False for loops that cannot train images: a trajectory that has some fails.
    """
    if state.status is not Status.COMPLETED or (state.canonical is None and not builds):
        return
    try:
        if not multimodal and _is_multimodal(state):
            raise NotCanonical("this loop cannot train a multimodal prompt")
        if state.response_ids is not None:
            state.response_ids = _ids("response_ids", state.response_ids)
        if state.canonical is None:
            state.canonical = _built(state, tokenize)
        _check(state, state.canonical)
        write_train_meta(state)
    except Exception as error:
        state.canonical = None
        state.meta = None
        kind = "" if isinstance(error, NotCanonical) else f"{type(error).__name__}: "
        state.fail(f"{FAILED}: {kind}{error}", "canonicalize")


def canonicalize_group(
    states: Sequence[RolloutState],
    tokenize: Tokenize | None = None,
    *,
    builds: bool = True,
    multimodal: bool = True,
) -> list[RolloutState]:
    """Make each of them canonical; those that failed over it are returned, to be logged.

    One that is malformed fails alone. Members that were canonical before pass through unchanged.
    """
    failed: list[RolloutState] = []
    for state in states:
        was_completed = state.status is Status.COMPLETED
        canonicalize(state, tokenize, builds=builds, multimodal=multimodal)
        if was_completed and state.status is Status.FAILED:
            failed.append(state)
    return failed


def drop_failed(states: Sequence[RolloutState]) -> list[RolloutState]:
    """The trajectories that have not failed; all of them if all have, so that the group fails."""
    kept = [state for state in states if state.status is not Status.FAILED]
    return kept or list(states)


def sequence_of(state: RolloutState) -> Canonical | None:
    """What there is of an unfinished trajectory in the canonical layout, to be gone on with.

    None if that is nothing: it has no token, or they do not fit together. Unlike the canonical
    form it may end anywhere.
    """
    try:
        prompt, response = _prompt(state), _ids("response_ids", state.response_ids)
        return _assembled(state, prompt, response) if prompt and response else None
    except NotCanonical:
        return None


def _built(state: RolloutState, tokenize: Tokenize | None) -> Canonical:
    prompt = _prompt(state)
    if not prompt:
        raise NotCanonical("it has no prompt_ids")
    if state.response_ids is None:
        if state.response is None or tokenize is None:
            missing = "text" if state.response is None else "tokenizer for its text"
            raise NotCanonical(f"it has no response_ids and no {missing}")
        state.response_ids = _ids("response_ids", tokenize(state.response))
        state.ids_source = "retokenized"
    if not state.response_ids:
        raise NotCanonical("its response is empty")
    return _assembled(state, prompt, state.response_ids)


def _prompt(state: RolloutState) -> list[int]:
    known = state.train_prompt_ids
    return _ids("prompt_ids", state.prompt_ids if known is None else known)


def _assembled(state: RolloutState, prompt: list[int], response: list[int]) -> Canonical:
    generated = state.generated
    if generated is not None and len(generated) != len(response):
        raise NotCanonical(
            f"generated length mismatch: {len(generated)} entries for {len(response)} response "
            f"tokens"
        )
    mask = [True] * len(response) if generated is None else list(map(bool, generated))
    labels = [token if made else IGNORED for token, made in zip(response, mask, strict=True)]
    logprobs = None
    if state.response_logprobs is not None:
        its = [float(value) for value in _flat(state.response_logprobs)]
        if len(its) != len(response):
            raise NotCanonical(
                f"logprobs length mismatch: {len(its)} entries for {len(response)} response tokens"
            )
        of_response = [value if made else 0.0 for value, made in zip(its, mask, strict=True)]
        logprobs = [0.0] * len(prompt) + of_response
    return Canonical(prompt + response, [IGNORED] * len(prompt) + labels, logprobs)


def _check(state: RolloutState, canonical: Canonical) -> None:
    size = len(canonical.input_ids)
    _check_length("labels", canonical.labels, size)
    if canonical.logprobs is not None:
        _check_length("logprobs", canonical.logprobs, size)
        if not all(map(math.isfinite, canonical.logprobs)):
            raise NotCanonical("a log-prob is not finite")
    if size < 2:
        raise NotCanonical(f"too short: {size} tokens, of which none could be input and label")
    if state.response_ids:
        suffix = canonical.input_ids[size - len(state.response_ids) :]
        if len(state.response_ids) > size or suffix != state.response_ids:
            raise NotCanonical(
                f"response_ids not a suffix: {len(state.response_ids)} tokens, which are not the "
                f"last of the {size} of input_ids"
            )
    prompt = size - response_len(state, canonical)
    _check_labels(canonical, prompt)
    _check_versions(state.response_model_steps, size - prompt)
    _check_positions(state, prompt, size)
    if state.routed_experts is not None:
        state.routed_experts = expert_ids(state.routed_experts)
        if len(state.routed_experts) != size - 1:
            raise NotCanonical(
                f"routed_experts length mismatch: {len(state.routed_experts)} rows for {size} "
                f"tokens, not {size - 1}"
            )
    score = None if state.reward is None else state.reward.get("score")
    if score is not None and not math.isfinite(score):
        raise NotCanonical(f"its score is {score}")


def _check_length(name: str, values: Sequence[object] | None, size: int) -> None:
    have = 0 if values is None else len(values)
    if have != size:
        raise NotCanonical(f"{name} length mismatch: {have} entries for {size} tokens")


def _check_labels(canonical: Canonical, prompt: int) -> None:
    for i, (token, label) in enumerate(zip(canonical.input_ids, canonical.labels, strict=True)):
        if label == IGNORED:
            continue
        if label != token or label < 0:
            raise NotCanonical(f"label {label} at {i} is not the token {token} there")
        if i < prompt:
            raise NotCanonical(f"label {label} at {i} supervises a prompt of {prompt} tokens")


def _check_versions(steps: Sequence[int], response: int) -> None:
    if len(steps) > response:
        raise NotCanonical(
            f"response_model_steps length mismatch: {len(steps)} entries for {response} tokens"
        )
    if steps and min(steps) < 0:
        raise NotCanonical(f"policy version {min(steps)} is below 0")


def _check_positions(state: RolloutState, prompt: int, size: int) -> None:
    if state.position_ids is None:
        return
    extended_positions(state.position_ids, size)
    columns = state.position_ids.shape[-1]
    if columns not in (prompt, size - 1, size):
        raise NotCanonical(
            f"position_ids length mismatch: {columns} columns cover neither the prompt of "
            f"{prompt} tokens nor the row of {size}"
        )


def _is_multimodal(state: RolloutState) -> bool:
    return bool(state.multi_modal_inputs) or has_axes(state.position_ids)


def _ids(name: str, values: object) -> list[int]:
    """Token ids as one flat list; a tensor and a batch of one are taken too."""
    if values is None:
        return []
    flat = _flat(values)
    if set(map(type, flat)) <= {int}:
        return flat
    try:
        return [operator.index(value) for value in flat]
    except TypeError as error:
        raise NotCanonical(f"{name} holds what is no token id: {error}") from None


def _flat(values: object) -> list[Any]:
    listed = values
    if not isinstance(values, (list, tuple)) and isinstance(values, _Array):
        listed = values.tolist()  # of a numpy scalar: a number
    if not isinstance(listed, (list, tuple)):
        return [listed]
    entries = cast("Sequence[object]", listed)
    if set(map(type, entries)) <= {int, float}:
        return list(entries)
    return [value for entry in entries for value in _flat(entry)]
