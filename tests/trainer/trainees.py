"""Tiny models in training, and packs for them, for tests of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from tests.trainer.materials import Sample, packed, sample, spec_of
from tests.trainer.models import VOCABULARY
from trainer.loss import LossConfig
from trainer.materialize import PackTensors
from trainer.ranks.types import (
    ModelSettings,
    OptimizerSettings,
    Phase,
    PlaneAddress,
    RankSettings,
)

CAP: Final = 24
COLUMNS: Final = ("old_logprobs", "ref_logprobs")
TIED: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
"""First and last weights are one."""
PLAIN: Final[dict[str, Any]] = {**TIED, "model_type": "llama", "tie_word_embeddings": False}
ADAPTER: Final[dict[str, Any]] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
LOSS: Final = LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.1, entropy_coef=0.01)


def settings(config: dict[str, Any] | None = None, **change: Any) -> RankSettings:
    """A run of one rank on the CPU."""
    model = change.pop("model", None) or ModelSettings(config=config or TIED)
    given: dict[str, Any] = {"threads": 1, "cap": CAP, "seed": 5, **change}
    return RankSettings(plane=PlaneAddress(name="none"), model=model, **given)


def phase(loss: LossConfig = LOSS, name: str = "policy", **change: Any) -> Phase:
    """A schedule that moves, so that it shows if it is not where it should be."""
    given: dict[str, Any] = {
        "lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5,
        "schedule": "cosine", "warmup_steps": 1, "total_steps": 8, **change,
    }  # fmt: skip
    return Phase(name=name, loss=loss, optimizer=OptimizerSettings(**given))


def rows(sizes: Sequence[tuple[int, int]], seed: int) -> list[Sample]:
    """Rows of so many prompt and response tokens, with log-probs of both policies."""
    chance = torch.Generator().manual_seed(seed)
    found: list[Sample] = []
    for i, (prompt, response) in enumerate(sizes):
        ids: list[int] = torch.randint(
            1, VOCABULARY, (prompt + response,), generator=chance
        ).tolist()
        columns = {
            name: -3 - torch.rand(prompt + response, generator=chance) for name in COLUMNS
        }  # fmt: skip
        logprobs = (-4 * torch.rand(response, generator=chance)).tolist()
        found.append(
            sample(
                ids[:prompt], ids[prompt:], logprobs=logprobs, session=i, uid=f"u{seed}",
                fields=columns,
            )
        )  # fmt: skip
    return found


def pack(sizes: Sequence[tuple[int, int]], seed: int = 0) -> PackTensors:
    """A pack of such rows; of none it is all padding, with the same columns."""
    some = rows(sizes or [(2, 2)], seed)
    spec = spec_of(some, CAP, columns=COLUMNS)
    places = None if sizes else []
    advantages = [(-1.0) ** i * (i + 1.0) for i in range(len(some))]
    return packed(some, spec, places=places, advantages=advantages)


def step_of(seed: int) -> list[PackTensors]:
    """EX-6.13: packs with 7, 3 and 0 supervised tokens. # [3]"""
    found = [pack([(3, 5), (4, 2)], seed), pack([(6, 3)], seed + 100), pack([])]
    assert [one.num_supervised for one in found] == [7, 3, 0]
    return found


def weights_of(trainee: Any) -> dict[str, torch.Tensor]:
    """A copy of all that is in the model of a rank that holds it whole."""
    return {name: w.detach().clone() for name, w in trainee._model.state_dict().items()}
