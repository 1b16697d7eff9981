"""The folder that a run's model is loaded from: the one that is named, or one that is made.

Owns that every run has such a folder, with configuration, weights and tokenizer in the form of
transformers: ranks and rollouts both load from it, so they begin with the same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from trainer.checkpoint import disk
from trainer.config import ModelSection

Make: TypeAlias = Callable[..., object]
"""What `model.make` names: writes a model into the folder that is its first argument."""


class ModelFacts(NamedTuple):
    """What is known of a model without its weights."""

    architecture: str
    parameters: int
    vocabulary: int
    """Of the tokenizer."""


def make_arguments(make: Make, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The named arguments that `make` gets: the options, and the seed if it takes one.

    Raises:
        ValueError: it takes no such option, or needs one that is not given.
    """
    signature = inspect.signature(make)
    takes = list(signature.parameters)[1:]
    arguments = dict(options)
    if "seed" in takes:
        arguments.setdefault("seed", seed)
    try:
        signature.bind(Path(), **arguments)
    except TypeError as error:
        known = f"it takes {', '.join(takes)}" if takes else "it takes no options"
        raise ValueError(f"model.options: {error}; {known}") from None
    return arguments


def check_model_folder(path: Path) -> None:
    """ValueError if this is no model as `save_pretrained` writes it."""
    if not path.is_dir():
        raise ValueError(f"model.path: there is no folder {str(path)!r}")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model.path: {str(path)!r} has no config.json: a folder as save_pretrained writes it "
            "is needed"
        )
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"model.path: {str(path)!r} has no weights as safetensors")


def model_folder(section: ModelSection, target: Path, *, make: Make | None, seed: int) -> Path:
    """The folder of the model: the named one, or `target`, which is made if it is not there.

    Raises:
        ValueError: there is no model, or what makes one did not.
    """
    if section.path is not None:
        path = Path(section.path)
        check_model_folder(path)
        return path
    if target.is_dir():
        return target  # of the run that is resumed; it was put there whole
    partial = disk.beside(target)
    try:
        if make is not None:
            make(partial, **make_arguments(make, section.options, seed))
        else:
            partial.mkdir()
            _from_config(section, partial, seed)
        try:
            check_model_folder(partial)
        except ValueError as error:
            raise ValueError(f"{section.make or 'model.config'} made no model: {error}") from None
        disk.sync_tree(partial)
        disk.rename(partial, target)
    finally:
        disk.remove(partial)
    return target


def model_facts(folder: Path, tokenizer: str | None) -> ModelFacts:
    """What configuration and tokenizer say; no weights are read.

    Raises:
        ValueError: they cannot be loaded.
    """
    import torch
    import transformers

    automatic: Any = transformers
    place = tokenizer or str(folder)
    try:
        config: Any = automatic.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = automatic.AutoModelForCausalLM.from_config(config)
        vocabulary = len(automatic.AutoTokenizer.from_pretrained(place, local_files_only=True))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model: {str(folder)!r} cannot be loaded: {error}") from None
    return ModelFacts(type(model).__name__, int(model.num_parameters()), vocabulary)


def _from_config(section: ModelSection, folder: Path, seed: int) -> None:
    """Random weights of a configuration, by the seed; the global random state is left alone."""
    import torch
    import transformers

    automatic: Any = transformers
    random: Any = torch.random
    settings = dict(section.config or {})
    try:
        config: Any = automatic.AutoConfig.for_model(settings.pop("model_type"), **settings)
        dtype = getattr(torch, section.dtype or "float32")
        with random.fork_rng(devices=[]):
            random.manual_seed(seed)
            model = automatic.AutoModelForCausalLM.from_config(config, dtype=dtype)
        tokenizer = automatic.AutoTokenizer.from_pretrained(
            section.tokenizer, local_files_only=True
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"model: it cannot be made of its configuration: {error}") from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
