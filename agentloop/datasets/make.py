"""Datasets by name, for configuration files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentloop.datasets.prompt import Dataset, DatasetError, Tokenizer
from agentloop.datasets.rows import PromptDataset, Rows


def make_dataset(config: Mapping[str, Any], tokenizer: Tokenizer) -> Dataset:
    """The dataset that a configuration names by `kind`. It is read whole before this returns.

    Settings of every kind are those of `PromptDataset`; further ones are those of the rows.

    Example:
        make_dataset({"kind": "files", "paths": ["train.parquet"], "max_prompt_tokens": 2048}, t)
        make_dataset({"kind": "reasoning_gym", "task": "chain_sum", "size": 1000, "seed": 1,
                      "split": "train", "config": {"max_terms": 3}}, t)

    Raises:
        DatasetError: there is no such kind or setting, or the rows cannot be had.
    """
    settings = dict(config)
    kind = settings.pop("kind", None)
    if kind == "files":
        from agentloop.datasets.files import FileRows

        if isinstance(settings.get("paths"), str):
            settings["paths"] = [settings["paths"]]
        source: Callable[..., Rows] = FileRows
    elif kind == "reasoning_gym":
        from agentloop.datasets.reasoning_gym import INSTRUCTION, GymRows

        settings.setdefault("system_prompt", INSTRUCTION)
        source = GymRows
    else:
        raise DatasetError(f"there is no dataset of kind {kind!r}; there are files, reasoning_gym")
    of_rows = inspect.signature(source).parameters
    of_prompts = inspect.signature(PromptDataset).parameters.keys() - {"rows", "tokenizer"}
    unknown = [name for name in settings if name not in of_rows and name not in of_prompts]
    if unknown:
        raise DatasetError(
            f"a dataset of kind {kind!r} has no setting {', '.join(map(repr, unknown))}; it has "
            f"{', '.join([*of_rows, *sorted(of_prompts)])}"
        )
    absent = [
        name
        for name, parameter in of_rows.items()
        if parameter.default is inspect.Parameter.empty and name not in settings
    ]
    if absent:
        raise DatasetError(f"a dataset of kind {kind!r} needs the setting {', '.join(absent)}")
    rows = source(**{name: value for name, value in settings.items() if name in of_rows})
    others = {name: value for name, value in settings.items() if name not in of_rows}
    return cast(Dataset, PromptDataset(rows, tokenizer, **others))
