"""One rank's model and all that changes its weights. Knows packs, and nothing of a plane's rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from dataplane import Client, publish_weights
from trainer.loss import LossConfig, pack_loss
from trainer.loss.distillation import TOPK
from trainer.materialize import PackTensors
from trainer.ranks.collectives import Peers
from trainer.ranks.export import write_export
from trainer.ranks.gradients import add_up, clip, fill_missing
from trainer.ranks.model import dtype_of, frozen_copy, make_model, placed, served_dtype
from trainer.ranks.optimizer import learning_rate, make_optimizer
from trainer.ranks.reference import Reference
from trainer.ranks.scores import score
from trainer.ranks.state import MOMENTS, Progress, read_state, write_state
from trainer.ranks.step_metrics import StepMetrics
from trainer.ranks.types import Phase, RankSettings
from trainer.ranks.weights import full_weights

GIB = 1 << 30


class Trainee:
    """A model in training.

    All ranks call the same methods in the same order, with packs of the same number and length.
    Dropout is off in every pass, so weights that have not moved have ratios of exactly 1.
    """

    def __init__(self, settings: RankSettings, peers: Peers) -> None:
        """Make the model; every rank begins with the weights of rank 0. Sets torch's threads, seed
        and determinism for the whole process.

        Raises:
            ValueError: settings that make no model or no reference.
        """
        if settings.reference == "adapter_off" and settings.model.adapter is None:
            raise ValueError("reference: adapter_off needs model.adapter, and there is none")
        self.settings = settings
        self.peers = peers
        _set_process(settings, peers)
        sharded = settings.parallel == "fsdp" and peers.world_size > 1
        model = make_model(settings.model, settings.seed)
        copy = frozen_copy(model) if settings.reference == "frozen" else None
        self._model: Any = placed(model, peers, sharded=sharded)
        self._reference: Reference | None = None
        if copy is not None:
            self._reference = Reference(placed(copy, peers, sharded=sharded), adapter_off=False)
        elif settings.reference == "adapter_off":
            self._reference = Reference(self._model, adapter_off=True)
        self._parameters: dict[str, torch.Tensor] = {
            name: weight for name, weight in self._model.named_parameters() if weight.requires_grad
        }
        self._phase: Phase | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._steps = 0

    @property
    def phase(self) -> Phase | None:
        """The phase that was begun last."""
        return self._phase

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in this phase that moved weights."""
        return self._steps

    def begin_phase(self, phase: Phase) -> None:
        """Train by this loss from now on, with a fresh optimizer and schedule. ValueError if
        settings make no schedule."""
        self._optimizer = make_optimizer(list(self._parameters.values()), phase.optimizer)
        self._phase = phase
        self._steps = 0

    # -- packs -------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, pack: PackTensors) -> torch.Tensor:  # [1, L] float32
        """log p of the labels by the weights now; 0 where there is no label."""
        return score(self._model, pack.to(self.peers.device)).logprobs

    def reference_logprobs(self, pack: PackTensors) -> torch.Tensor:  # [1, L] float32
        """log p of the labels by the reference. ValueError if there is none."""
        if self._reference is None:
            raise ValueError("reference: none is set, and its log-probs are asked for")
        return self._reference.logprobs(pack.to(self.peers.device))

    def train_step(self, packs: Iterable[PackTensors], *, global_tokens: int) -> dict[str, float]:
        """One optimizer step over the packs of all ranks; its metrics.

        Packs are taken one by one, so that the next can be fetched while one is trained. What one
        rank raises before it has taken its last pack the others do not learn here: let `packs` come
        from an iterator that has ranks agree.

        Weights stay where they are, and so does the schedule, if nothing is supervised on any rank,
        or if the gradient is no finite number (`update_skipped` is 1 then).

        Args:
            packs: one or more, the same number on all ranks, with the columns that the loss needs.
            global_tokens: supervised tokens of all packs on all ranks: a token weighs one over it.
        """
        phase, optimizer = self._begun()
        parameters = list(self._parameters.values())
        metrics = StepMetrics()
        optimizer.zero_grad(set_to_none=True)
        try:
            for pack in packs:
                self._backward(pack.to(self.peers.device), phase.loss, global_tokens, metrics)
            found = metrics.reduced(self.peers)
            fill_missing(parameters)
            add_up(parameters, self.peers)
            norm = clip(parameters, phase.optimizer.max_grad_norm, self.peers)
            rate = learning_rate(phase.optimizer, self._steps)
            moves = global_tokens > 0 and math.isfinite(norm)
            if moves:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                cast("Any", optimizer).step()
                self._steps += 1
        finally:
            optimizer.zero_grad(set_to_none=True)
        found |= {"grad_norm": norm, "lr": rate, "update_skipped": float(not moves)}
        return found | _memory(self.peers.device)

    def _backward(
        self, pack: PackTensors, loss: LossConfig, global_tokens: int, metrics: StepMetrics
    ) -> None:
        scores = score(
            self._model,
            pack,
            with_entropy=loss.entropy_coef > 0,
            with_topk=loss.distillation is not None and loss.distillation.mode in TOPK,
        )
        found = pack_loss(
            pack,
            scores.logprobs,
            loss,
            global_tokens=global_tokens,
            entropy=scores.entropy,
            student_topk=scores.student_topk,
        )
        cast("Any", found.loss).backward()
        metrics.add(pack, found)

    def _begun(self) -> tuple[Phase, torch.optim.AdamW]:
        if self._phase is None or self._optimizer is None:
            raise RuntimeError("no phase has been begun: call begin_phase first")
        return self._phase, self._optimizer

    # -- weights that leave ------------------------------------------------------------------

    def publish_weights(
        self,
        client: Client | None,
        version: int,
        *,
        prefix: str = "weights",
        keep: int = 2,
        dtype: str | None = None,
        replace: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Write all weights to the plane as this version, an adapter merged; how many bytes.

        Rank 0 writes, and it alone needs a client. For arguments see `dataplane.publish_weights`.
        Without a `dtype` it is the one of the folder that the model came from, which engines have.

        Raises:
            DataplaneError: of the verb that failed, on rank 0; PeerFailed on the others.
        """
        weights = full_weights(self._model, self.settings.model, self.peers)
        size = 0
        error: Exception | None = None
        if self.peers.rank == 0:
            try:
                if client is None:
                    raise ValueError("rank 0 writes the weights, and was given no client")
                size = publish_weights(
                    client,
                    weights,
                    version,
                    prefix=prefix,
                    keep=keep,
                    dtype=served_dtype(self.settings.model) if dtype is None else dtype_of(dtype),
                    replace=replace,
                    timeout=timeout,
                )
            except Exception as failed:
                error = failed
        self.peers.agree(error)
        return int(self.peers.broadcast(torch.tensor([size])))

    def export(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included, an
        adapter merged. On the disk when this returns; rank 0 writes, all enter."""
        weights = full_weights(self._model, self.settings.model, self.peers)
        error: Exception | None = None
        if self.peers.rank == 0:
            try:
                write_export(folder, self._model, weights, self.settings.tokenizer_path)
            except Exception as failed:
                error = failed
        self.peers.agree(error)

    # -- states ------------------------------------------------------------------------------

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write all that `load` needs into this folder, which is made if it is not there. On the
        disk when this returns; rank 0 writes, all enter. Without the optimizer, what is loaded
        goes on with a fresh one, at the same place of the schedule."""
        progress = Progress(None if self._phase is None else self._phase.name, self._steps)
        kept = self._optimizer if optimizer else None
        write_state(folder, progress, self._model, self._parameters, kept, self.peers)

    def load(self, folder: Path) -> None:
        """Go on from what was saved, by however many ranks. The phase of the same name has to have
        been begun; its settings are what it was begun with.

        Raises:
            StateError: the folder is of another phase or model, or not whole; nothing was changed.
        """
        name = None if self._phase is None else self._phase.name
        self._steps = read_state(
            folder, name, self._model, self._parameters, self._optimizer, self.peers
        ).optimizer_steps

    # -- room for others on the device -------------------------------------------------------

    def offload(self) -> None:
        """Move weights and optimizer to host memory; does nothing on a CPU."""
        if self.peers.device.type != "cpu":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Bring them back."""
        if self.peers.device.type != "cpu":
            self._move(self.peers.device)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        if self._reference is not None:
            self._reference.to(device)
        states: dict[Any, Any] = {} if self._optimizer is None else dict(self._optimizer.state)
        for state in states.values():
            for name in MOMENTS:
                state[name] = state[name].to(device)

    def close(self) -> None:
        """Let go of the model."""
        self._model = self._reference = self._optimizer = None
        self._parameters = {}


def _set_process(settings: RankSettings, peers: Peers) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        # Read when the first matrices are multiplied on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    cast("Any", torch).manual_seed(settings.seed + peers.rank)


def _memory(device: torch.device) -> dict[str, float]:
    """Of a GPU, in GiB."""
    if device.type != "cuda":
        return {}
    return {
        "max_memory": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved_memory": torch.cuda.max_memory_reserved(device) / GIB,
    }
