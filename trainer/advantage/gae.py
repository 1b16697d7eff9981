"""Advantages per token, in workers: generalized advantage estimation, and scalars spread out.

Rows are numpy arrays or torch tensors of one dimension; what comes back is of the same kind, dtype
and device. `mask` is true where a token is supervised. Letters: T entries of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

_Array = TypeVar("_Array")


def gae(
    values: _Array,  # [T] float
    mask: Any,  # [T] bool or 0/1
    reward: Any,  # float, or [T] float
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    key: str = "row",
) -> tuple[_Array, _Array]:
    """Advantages and returns of one trajectory. Schulman et al., arXiv 1506.02438.

    Backwards over supervised entries alone, as if the others were not there:
    delta = r + gamma * V_next - V, A = delta + gamma * lam * A_next, and the return is A + V.
    Both are 0 elsewhere.

    Args:
        reward: of the whole trajectory, counted at its last supervised entry, or one an entry,
            of which those of unsupervised entries count at the supervised one before.

    Example: gamma 1, lam 0.5, values [.1, .2, .3, .4], mask [1, 0, 1, 1], reward 1 give advantages
    [.4, 0, .4, .6] and returns [.5, 0, .7, 1].

    Raises:
        ValueError: lengths differ, a number is not finite, or there is a reward and no supervised
            entry to give it to.
    """
    value = [float(v) for v in cast("Any", values).tolist()]
    supervised = [bool(m) for m in _listed(mask)]
    if len(value) != len(supervised):
        raise ValueError(f"{key}: {len(value)} values for {len(supervised)} entries of the mask")
    rewards = _rewards(reward, supervised, key)
    advantages = [0.0] * len(value)
    returns = [0.0] * len(value)
    following = next_value = 0.0
    for t in reversed(range(len(value))):
        if not supervised[t]:
            continue
        if not (math.isfinite(value[t]) and math.isfinite(rewards[t])):
            raise ValueError(f"{key}: the value or the reward of entry {t} is not finite")
        following = rewards[t] + gamma * next_value - value[t] + gamma * lam * following
        next_value = value[t]
        advantages[t] = following
        returns[t] = following + value[t]
    return _like(values, advantages), _like(values, returns)


def session_gae(
    segments: Sequence[tuple[_Array, Any, float | None]],  # [(values [T], mask [T], reward)]
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    key: str = "session",
) -> list[tuple[_Array, _Array]]:
    """The same over the trajectories of one session, by index, as if they were one.

    The reward is that of the last one that has any.
    """
    rewards = [reward for _, _, reward in segments if reward is not None]
    values = np.concatenate(
        [np.asarray(_listed(values), np.float64) for values, _, _ in segments] or [np.zeros(0)]
    )
    mask = [flag for _, mask, _ in segments for flag in _listed(mask)]
    whole = gae(values, mask, rewards[-1] if rewards else 0.0, gamma=gamma, lam=lam, key=key)
    parts: list[tuple[_Array, _Array]] = []
    at = 0
    for segment, _, _ in segments:
        end = at + len(cast("Any", segment))
        advantages, returns = (_like(segment, column[at:end].tolist()) for column in whole)
        parts.append((advantages, returns))
        at = end
    return parts


def normalized(rows: Sequence[_Array], masks: Sequence[Any], eps: float = 1e-8) -> list[_Array]:
    """Advantages less their mean, by their population deviation + eps, over supervised entries.

    Equal advantages, and a single one, become exactly 0.
    """
    kept = [
        float(a)
        for row, mask in zip(rows, masks, strict=True)
        for a, m in zip(_listed(row), _listed(mask), strict=True)
        if m
    ]
    if not kept:
        return [_like(row, [0.0] * len(cast("Any", row))) for row in rows]
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in kept) / len(kept))
    flat = max(kept) == min(kept)
    return [
        _like(
            row,
            [
                0.0 if flat or not m else (float(a) - mean) / (std + eps)
                for a, m in zip(_listed(row), _listed(mask), strict=True)
            ],
        )
        for row, mask in zip(rows, masks, strict=True)
    ]


def per_token(advantage: float, mask: _Array) -> _Array:  # [T] float32
    """A scalar advantage on the supervised entries, 0 on the others, as long as the mask.

    Example: per_token(1.5, [0, 0, 1, 0, 1]) is [0, 0, 1.5, 0, 1.5].
    """
    if not math.isfinite(advantage):
        raise ValueError(f"an advantage of {advantage} cannot be trained on")
    row = cast("Any", mask)
    if isinstance(mask, np.ndarray):
        return cast("_Array", np.where(row != 0, np.float32(advantage), np.float32(0)))
    return (row != 0).float() * advantage


def _rewards(reward: Any, supervised: list[bool], key: str) -> list[float]:
    """One reward an entry; what an unsupervised entry got counts at the supervised one before."""
    rewards = [0.0] * len(supervised)
    places = [t for t, flag in enumerate(supervised) if flag]
    given = [float(r) for r in _listed(reward)] if hasattr(reward, "__len__") else None
    if given is not None and len(given) != len(supervised):
        raise ValueError(f"{key}: {len(given)} rewards for {len(supervised)} entries of the mask")
    if not places:
        if any([float(reward)] if given is None else given):
            raise ValueError(f"{key}: it has a reward and no supervised entry to give it to")
        return rewards
    if given is None:
        rewards[places[-1]] = float(reward)
        return rewards
    at = places[0]
    for t, value in enumerate(given):
        if supervised[t]:
            at = t
        rewards[at] += value
    return rewards


def _listed(row: Any) -> list[Any]:
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _like(row: _Array, values: list[float]) -> _Array:
    """The numbers as the same kind of array as `row`, of a floating dtype."""
    array = cast("Any", row)
    if isinstance(row, np.ndarray):
        dtype: Any = array.dtype if array.dtype.kind == "f" else np.float32
        return cast("_Array", np.asarray(values, dtype))
    return (array if array.is_floating_point() else array.float()).new_tensor(values)
