"""The model of a rank: made or loaded, with its adapter, without dropout, in one piece or sharded.

Transformers, and peft where there is an adapter, are imported when a model is made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch

from trainer.ranks.collectives import Peers
from trainer.ranks.types import ModelSettings

DROPOUT: Final = "dropout"


def make_model(settings: ModelSettings, seed: int) -> Any:
    """The model in host memory, with its adapter if it has one. Random weights follow the seed.

    Raises:
        ValueError: settings that make no model; names the setting.
    """
    chance: Any = torch.random
    with chance.fork_rng(devices=[]):
        chance.manual_seed(seed)
        model = _base(settings)
        if settings.adapter is not None:
            model = add_adapter(model, settings)
    return quieted(model, checkpointing=settings.gradient_checkpointing)


def dtype_of(name: str) -> torch.dtype:
    """What torch calls so. ValueError if nothing."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"model: torch has no dtype {name!r}")
    return found


def served_dtype(settings: ModelSettings) -> torch.dtype | None:
    """What engines that loaded the same folder have, where training is done in another dtype."""
    if settings.path is None or settings.dtype is None:
        return None
    import transformers

    automatic: Any = transformers.AutoConfig
    saved = automatic.from_pretrained(settings.path, local_files_only=True).dtype
    return None if saved == dtype_of(settings.dtype) else saved


def base_of(model: Any) -> Any:
    """The transformers model under an adapter, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def add_adapter(model: Any, settings: ModelSettings) -> Any:
    """The model with a fresh LoRA adapter; all that is trained from now on."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("model: an adapter needs peft: pip install peft") from error

    wanted = dict(settings.adapter or {})
    if wanted.get("lora_dropout"):
        raise ValueError(
            "model: adapter.lora_dropout is to be 0: with dropout the log-probs of one set of "
            "weights differ from pass to pass, and ratios of policies mean nothing"
        )
    wanted.setdefault("task_type", "CAUSAL_LM")
    try:
        config = peft.LoraConfig(**wanted)
    except TypeError as error:
        raise ValueError(f"model: adapter: {error}") from error
    with warnings.catch_warnings():
        # peft asks a question of transformers that its newest version calls by another name.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        # Weights of one dtype: FSDP takes no others in one shard.
        return cast("Any", peft).get_peft_model(model, config, autocast_adapter_dtype=False)


def quieted(model: Any, *, checkpointing: bool = False) -> Any:
    """The model without dropout, in every pass; with activations made again in the backward pass
    if asked."""
    model.eval()
    if checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer

        base = base_of(model)
        enable = getattr(base, "activation_checkpointing_enable", None)  # its newer name
        (enable or base.gradient_checkpointing_enable)({"use_reentrant": False})
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True  # it asks itself alone, and nothing below it
                for name, value in vars(layer).items():
                    if DROPOUT in name and isinstance(value, float):
                        setattr(layer, name, 0.0)
    return model


@contextmanager
def without_bars() -> Generator[None]:
    """Transformers draws no progress of its own meanwhile: several ranks share a terminal."""
    from transformers.utils import logging

    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def frozen_copy(model: Any) -> Any:
    """A copy that is never trained."""
    return copy.deepcopy(model).requires_grad_(False)


def placed(model: Any, peers: Peers, *, sharded: bool) -> Any:
    """The model on this rank's device, with the weights of rank 0; sharded over ranks if asked."""
    if not sharded:
        model.to(peers.device)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            peers.broadcast(tensor.detach())
    return _sharded(model, peers) if sharded else model


def _base(settings: ModelSettings) -> Any:
    import transformers

    if (settings.path is None) == (settings.config is None):
        raise ValueError("model: give either `path` or `config`")
    dtype = None if settings.dtype is None else dtype_of(settings.dtype)
    automatic: Any = transformers.AutoModelForCausalLM
    attention = settings.attention
    if settings.path is not None:
        if not Path(settings.path).is_dir():
            raise ValueError(f"model: path {settings.path!r} is no folder")
        with without_bars():
            return automatic.from_pretrained(
                settings.path,
                dtype=dtype or "auto",
                attn_implementation=attention,
                local_files_only=True,
                use_safetensors=True,
            )
    wanted = dict(settings.config or {})
    kind = wanted.pop("model_type", None)
    if kind is None:
        raise ValueError("model: config has no model_type")
    config = cast("Any", transformers.AutoConfig).for_model(kind, **wanted)
    more = {} if dtype is None else {"dtype": dtype}
    return automatic.from_config(config, attn_implementation=attention, **more)


def _sharded(model: Any, peers: Peers) -> Any:
    """Each layer a shard of its own, and one of what is left. Gradients are summed, as they are
    where nothing is sharded; FSDP would average."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(peers.device.type, (peers.world_size,))
    whole: set[str] = set(getattr(base_of(model), "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in whole]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
