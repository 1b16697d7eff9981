"""The state of training as a folder: weights, optimizer, place in the schedule, random states.

Tensors lie whole in safetensors, whatever the ranks' shards were, so that other ranks can go on:
`model.safetensors`, `optimizer.safetensors`, `random.safetensors`; the rest in `state.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from trainer.ranks.collectives import Peers
from trainer.ranks.files import read_tensors, settle, write_json, write_tensors
from trainer.ranks.weights import distinct, gathered, spread

FORMAT: Final = 1
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, beside the number of steps."""


class StateError(ValueError):
    """A folder does not hold a state that this model can go on from; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come."""

    phase: str | None
    optimizer_steps: int


def write_state(
    folder: Path,
    progress: Progress,
    model: Any,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    peers: Peers,
) -> None:
    """Write it all; on the disk when this returns. Every rank enters, and rank 0 writes."""
    weights = gathered(distinct(model.state_dict(keep_vars=True)), peers)
    moments: dict[str, torch.Tensor] = {}
    if optimizer is not None and optimizer.state:
        for kind in MOMENTS:
            of_kind = {f"{kind}.{n}": optimizer.state[p][kind] for n, p in parameters.items()}
            moments |= gathered(of_kind, peers)
    states = _random_states(peers)
    error: Exception | None = None
    if peers.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(folder / "model.safetensors", weights)
            write_tensors(folder / "optimizer.safetensors", moments)
            write_tensors(folder / "random.safetensors", states)
            write_json(
                folder / "state.json",
                {
                    "format": FORMAT,
                    "phase": progress.phase,
                    "optimizer_steps": progress.optimizer_steps,
                },
            )
            settle(folder)
        except Exception as failed:
            error = failed
    peers.agree(error)


def read_progress(folder: Path) -> Progress:
    """How far the state in this folder is. StateError if there is none."""
    path = folder / "state.json"
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{folder} holds no state of training: {error}") from error
    if type(said) is not dict or cast("Any", said).get("format") != FORMAT:
        raise StateError(f"{path} is of another version of this program, or not whole")
    return Progress(cast("Any", said)["phase"], int(cast("Any", said)["optimizer_steps"]))


def read_state(
    folder: Path,
    phase: str | None,
    model: Any,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    peers: Peers,
) -> Progress:
    """Take over weights, moments and random states. Every rank enters; rank 0 alone reads.

    Raises:
        StateError: it is of another phase or another model; nothing was changed.
    """
    places = distinct(model.state_dict(keep_vars=True))
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    states: dict[str, torch.Tensor] = {}
    progress = Progress(None, 0)
    error: Exception | None = None
    if peers.rank == 0:
        try:
            progress = read_progress(folder)
            weights, moments, states = (
                read_tensors(folder / f"{name}.safetensors")
                for name in ("model", "optimizer", "random")
            )
            _check(folder, progress, phase, places, parameters, weights, moments)
        except OSError as failed:
            error = StateError(f"{folder} is not whole: {failed}")
        except Exception as failed:
            error = failed
    peers.agree(error)
    about = peers.broadcast(torch.tensor([progress.optimizer_steps, int(bool(moments))]))
    steps, has_moments = int(about[0]), bool(about[1])
    for name, place in places.items():
        spread(place, weights.get(name), peers)
    if optimizer is not None:
        optimizer.state.clear()
        for name, parameter in parameters.items() if has_moments else ():
            state: dict[str, torch.Tensor] = {"step": torch.tensor(float(steps))}
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                spread(state[kind], moments.get(f"{kind}.{name}"), peers)
            optimizer.state[parameter] = state
    _set_random_states(states, peers)
    return Progress(phase, steps)


def _check(
    folder: Path,
    progress: Progress,
    phase: str | None,
    places: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
) -> None:
    if progress.phase != phase:
        raise StateError(
            f"{folder} is of phase {progress.phase!r}, and this is phase {phase!r}: begin that "
            "phase first"
        )
    wrong = _misfits(places, weights)
    if moments:
        wrong += _misfits({f"{k}.{n}": p for k in MOMENTS for n, p in parameters.items()}, moments)
    if wrong:
        raise StateError(f"{folder} is of another model: {', '.join(wrong[:5])}")


def _misfits(places: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    odd = sorted(set(places).symmetric_difference(found))
    return odd + [n for n, t in places.items() if n in found and found[n].shape != t.shape]


def _random_states(peers: Peers) -> dict[str, torch.Tensor]:
    """Those of torch on all ranks, by kind and rank."""
    found = {"cpu": torch.get_rng_state()}
    if peers.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(peers.device)
    return {
        f"{kind}.{rank}": state
        for kind, own in found.items()
        for rank, state in enumerate(peers.gather(own))
    }


def _set_random_states(states: Mapping[str, torch.Tensor], peers: Peers) -> None:
    """Each rank's own; a rank that was not there keeps what it has."""
    for rank in range(peers.world_size):
        _set_random_state(f"cpu.{rank}", rank, torch.get_rng_state(), states, peers)
        if peers.device.type == "cuda":
            now = torch.cuda.get_rng_state(peers.device)
            _set_random_state(f"cuda.{rank}", rank, now, states, peers)


def _set_random_state(
    name: str, rank: int, now: torch.Tensor, states: Mapping[str, torch.Tensor], peers: Peers
) -> None:
    saved = states.get(name)
    known = bool(peers.broadcast(torch.tensor([int(saved is not None)])))
    if not known:
        return
    state = peers.broadcast(torch.empty_like(now) if saved is None else saved)
    if rank != peers.rank:
        return
    if name.startswith("cpu"):
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, peers.device)
