"""Inference engines behind one Protocol: a model in this process, a server, a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.engines.types import Engine
    from agentloop.loops.chat import ChatTokenizer

KINDS = ("hf", "openai", "scripted")

_SUPERVISION = (
    "max_restarts", "backoff_s", "max_backoff_s", "start_timeout_s", "control_timeout_s",
    "weights_dir",
)  # fmt: skip
"""Arguments that are about an engine's process."""


def make_engine(
    config: Mapping[str, Any], tokenizer: ChatTokenizer, model_path: str | None = None
) -> Engine:
    """The engine that a configuration names by `kind`; its other entries are its arguments.

    A model runs in a process of its own, which is started again when it dies, unless `process` is
    false. `model_path` is its folder where the entry `model` names none.

    Example:
        make_engine({"kind": "hf", "max_batch": 32}, tokenizer, "/models/small")
        make_engine({"kind": "openai", "base_url": "http://rollout:8000"}, tokenizer)

    Raises:
        ValueError: there is no such kind, or it has no such argument.
    """
    options = dict(config)
    kind = options.pop("kind", None)
    try:
        if kind == "hf":
            return _model({"model": model_path, **options})
        if kind == "openai":
            from agentloop.engines.openai import OpenAIEngine

            return OpenAIEngine(tokenizer=tokenizer, **options)
        if kind == "scripted":
            from agentloop.engines.scripted import ScriptedEngine

            return ScriptedEngine(options.pop("script", ()), tokenizer=tokenizer, **options)
    except TypeError as error:
        raise ValueError(f"an engine of kind {kind!r}: {error}") from error
    raise ValueError(f"there is no engine of kind {kind!r}; there are {', '.join(KINDS)}")


def _model(options: dict[str, Any]) -> Engine:
    own_process = options.pop("process", True)
    if options["model"] is None:
        raise ValueError("an engine of kind 'hf' needs the argument model: a model's folder")
    if not own_process:
        from agentloop.engines.hf import HFEngine

        return HFEngine(**options)
    from agentloop.engines.supervised import SupervisedEngine

    supervision = {name: options.pop(name) for name in _SUPERVISION if name in options}
    return SupervisedEngine("agentloop.engines.hf:HFEngine", options, **supervision)
