"""Rewards by name, for configuration files."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from agentloop.rewards.types import Reward

_KINDS: Final = {
    "function": ("agentloop.rewards.functions", "FunctionReward"),
    "reasoning_gym": ("agentloop.rewards.reasoning_gym", "ReasoningGymReward"),
    "math_verify": ("agentloop.rewards.math_verify", "MathVerifyReward"),
    "http": ("agentloop.rewards.http_judge", "HttpJudge"),
}
"""Rewards whose settings are the arguments of their constructor."""


def make_reward(config: Mapping[str, Any]) -> Reward:
    """The reward that a configuration names by `kind`; its other entries are its settings.

    Example:
        make_reward({"kind": "weighted", "parts": {
            "right": {"weight": 1.0, "reward": {"kind": "math_verify", "timeout_s": 5}},
            "short": {"weight": 0.1, "default": 0.0,
                      "reward": {"kind": "function", "function": "my.rules:short"}}}})
        make_reward({"kind": "routed", "default": "rules", "judges": {
            "gsm8k": {"kind": "math_verify"}, "rules": {"kind": "http", "url": "http://…"}}})

    Raises:
        ValueError: there is no such kind, or it has no such setting; the message says which.
    """
    settings = dict(_map(config, "a reward"))
    kind = settings.pop("kind", None)
    if kind == "weighted":
        return _weighted(settings)
    if kind == "routed":
        return _routed(settings)
    if kind not in _KINDS:
        known = ", ".join([*_KINDS, "weighted", "routed"])
        raise ValueError(f"there is no reward of kind {kind!r}; there are {known}")
    module, name = _KINDS[kind]
    try:
        made: Any = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"a reward of kind {kind!r} needs a library: {error}") from error
    return cast(Reward, _call(made, settings, f"a reward of kind {kind!r}"))


def _weighted(settings: Mapping[str, Any]) -> Reward:
    from agentloop.rewards.composition import Part, WeightedReward

    parts: dict[str, Part] = {}
    for name, entry in _map(_only(settings, "weighted", "parts"), "the parts").items():
        part = dict(_map(entry, f"the part {name!r}"))
        if "reward" not in part:
            raise ValueError(f"the part {name!r} of a weighted reward names no reward")
        part["reward"] = make_reward(part["reward"])
        parts[name] = _call(Part, part, f"the part {name!r} of a weighted reward")
    return WeightedReward(parts)


def _routed(settings: Mapping[str, Any]) -> Reward:
    from agentloop.rewards.composition import RoutedReward

    judges = _map(settings.get("judges"), "the judges of a routed reward")
    made = {name: make_reward(entry) for name, entry in judges.items()}
    return _call(RoutedReward, {**settings, "judges": made}, "a routed reward")


def _only(settings: Mapping[str, Any], kind: str, name: str) -> Any:
    if set(settings) != {name}:
        raise ValueError(f"a {kind} reward has the setting {name!r}; got {sorted(settings)}")
    return settings[name]


def _map(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what}: a map was due; got {type(value).__name__}")
    return cast(Mapping[str, Any], value)


def _call(made: Callable[..., Any], settings: Mapping[str, Any], what: str) -> Any:
    parameters = inspect.signature(made).parameters
    unknown = [name for name in settings if name not in parameters]
    if unknown:
        raise ValueError(
            f"{what} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(parameters)}"
        )
    absent = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in settings
    ]
    if absent:
        raise ValueError(f"{what} needs the setting {', '.join(absent)}")
    return made(**settings)
