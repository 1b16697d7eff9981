"""The tokens of a trajectory from outside: what is checked of them, and the row they become. Pure.

Owns the canonical form as producers outside have to keep it. Index i belongs to token i; labels are
the only carrier of supervision, and what they do not supervise has no log-probability. Nothing is
copied before its length is known to be right.

Letters: P prompt tokens, R response tokens (tool and environment tokens included), N = P + R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequest
from dataplane.fields import IGNORED
from dataplane.v1 import dataplane_pb2 as pb

FLOOR: Final = -9999.0
"""What servers write for minus infinity, which no sampled token has."""
SLACK: Final = 1e-4
"""How far rounding may lift a log-probability above 0; it is put back to 0."""

Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IngestRules:
    """What the trajectories of a gateway are held to."""

    vocab_size: int | None = None
    """Ids are below it; None where any number from 0 on is a token."""
    max_tokens: int = 1 << 20
    """The longest N."""


def sequence(message: pb.Trajectory, rules: IngestRules) -> tuple[dict[str, Any], dict[str, Any]]:
    """The token fields of a trajectory that has tokens, and the tags that follow from them.

    InvalidRequest says what of it is wrong, and at which index first.
    """
    size, prompt = _check_lengths(message, rules)
    ids = _ids(message, rules)
    labels, trained = _labels(message, ids, prompt)
    fields: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if message.logprobs:
        fields["logprobs"] = _logprobs(message, trained)
    tags: dict[str, Any] = {
        "prompt_len": prompt,
        "response_len": size - prompt,
        "seq_len": size,
        "policy_len": int(np.count_nonzero(trained)),
        "position_layout": "1d",
        "has_rollout_logprobs": "logprobs" in fields,
        "has_routed_experts": False,
    }
    if message.policy_spans:
        fields["response_model_steps"] = _versions(message, trained[prompt:], tags)
    return fields, tags


def _check_lengths(message: pb.Trajectory, rules: IngestRules) -> tuple[int, int]:
    """N and P, once everything is as long as it should be; before any array is made."""
    size, prompt = len(message.input_ids), message.prompt_len
    if size > rules.max_tokens:
        raise InvalidRequest(f"input_ids has {size} tokens; at most {rules.max_tokens} are taken")
    if size < 2:
        raise InvalidRequest(f"input_ids has {size} tokens; a prompt and a response are 2 at least")
    if len(message.labels) != size:
        raise InvalidRequest(f"labels has {len(message.labels)} entries for {size} tokens")
    if message.logprobs and len(message.logprobs) != size:
        raise InvalidRequest(f"logprobs has {len(message.logprobs)} entries for {size} tokens")
    if not 0 < prompt < size:
        raise InvalidRequest(
            f"prompt_len is {prompt}: of {size} tokens, 1 to {size - 1} are the prompt"
        )
    return size, prompt


def _ids(message: pb.Trajectory, rules: IngestRules) -> Ids:
    ids = np.array(message.input_ids, np.int64)
    vocabulary = rules.vocab_size
    if int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary):
        i = _first((ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary))
        limit = "" if vocabulary is None else f" of a vocabulary of {vocabulary}"
        raise InvalidRequest(f"input_ids[{i}] is {ids[i]}, which is no token{limit}")
    return ids


def _labels(message: pb.Trajectory, ids: Ids, prompt: int) -> tuple[Ids, Mask]:
    """Labels, and which of them supervise."""
    labels = np.array(message.labels, np.int64)
    trained = labels != IGNORED
    wrong = trained & (labels != ids)
    if wrong.any():
        i = _first(wrong)
        raise InvalidRequest(
            f"labels[{i}] is {labels[i]}: it is the token itself, {ids[i]}, where the policy "
            f"generated it, else {IGNORED}"
        )
    if trained[:prompt].any():
        i = _first(trained[:prompt])
        raise InvalidRequest(
            f"labels[{i}] is {labels[i]}: the prompt, of {prompt} tokens, is not supervised, so "
            f"{IGNORED} is due"
        )
    return labels, trained


def _logprobs(message: pb.Trajectory, trained: Mask) -> Floats:
    logprobs = np.array(message.logprobs, np.float32)
    high = logprobs.max()
    if not (logprobs.min() > FLOOR and high <= SLACK):  # false of NaN too
        i = _first(~((logprobs > FLOOR) & (logprobs <= SLACK)))
        raise InvalidRequest(
            f"logprobs[{i}] is {logprobs[i]:.6g}: a log-probability is finite, above {FLOOR:g} "
            "and at most 0"
        )
    stray = (logprobs != 0) & ~trained
    if stray.any():
        i = _first(stray)
        raise InvalidRequest(
            f"logprobs[{i}] is {logprobs[i]:.6g}: it is 0 where labels has {IGNORED}, and nothing "
            "was generated"
        )
    return np.minimum(logprobs, np.float32(0)) if high > 0 else logprobs


def _versions(message: pb.Trajectory, trained: Mask, tags: dict[str, Any]) -> Ids:
    """The policy version of each response token; the tags of them are added."""
    spans = message.policy_spans
    at, newest = 0, 0
    versions: list[int] = []
    sizes: list[int] = []
    for i, span in enumerate(spans):
        if span.start != at or span.end <= at or span.end > len(trained):
            raise InvalidRequest(
                f"policy_spans[{i}] is [{span.start}, {span.end}): spans follow each other and "
                f"cover the response, so it begins at {at} and ends by {len(trained)}"
            )
        if span.version < newest:
            raise InvalidRequest(
                f"policy_spans[{i}] is of version {span.version}, after {newest}: versions are 0 "
                "or more and do not go down"
            )
        versions.append(span.version)
        sizes.append(span.end - at)
        at, newest = span.end, span.version
    if at != len(trained):
        raise InvalidRequest(
            f"policy_spans[{len(spans) - 1}] ends at {at}: the spans cover the response, of "
            f"{len(trained)} tokens"
        )
    starts = np.cumsum([0, *sizes[:-1]])
    counts: list[int] = np.add.reduceat(trained, starts, dtype=np.int64).tolist()
    runs: dict[int, int] = {}  # versions do not go down, so each has one run
    for version, count in zip(versions, counts, strict=True):
        if count:
            runs[version] = runs.get(version, 0) + count
    if runs:
        tags["policy_spans"] = [list(run) for run in runs.items()]
    tags["min_global_steps"] = versions[0]
    tags["max_global_steps"] = versions[-1]
    return np.repeat(np.array(versions, np.int64), sizes)


def _first(wrong: Mask) -> int:
    return int(wrong.argmax())
