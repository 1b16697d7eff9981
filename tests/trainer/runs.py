"""Small runs of the trainer: files of settings, and the reward that they are trained by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


def digits(state: Any) -> float:
    """The share of digits among the characters of a response: noise differs in it."""
    text = state.response or ""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def write_run(folder: Path, **overrides: Any) -> Path:
    """A file of settings for a run of seconds: one rank and one worker in the driver's process."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": QUESTION.format(a, b)} for a in range(4) for b in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planes = folder / "planes"
    planes.mkdir(mode=0o700, exist_ok=True)
    task = {
        "name": "sums",
        "n": 4,
        "dataset": {"kind": "files", "paths": [str(prompts)]},
        "reward": {"kind": "function", "function": "tests.trainer.runs:digits"},
        "sampling": {"max_tokens": 8},
    }
    settings: dict[str, Any] = {
        "name": "small",
        "folder": str(folder / "run"),
        "seed": 7,
        "deterministic": True,
        "plane": {
            "settings": {
                "host": "embedded", "runtime_dir": str(planes), "capacity_bytes": 64 << 20,
                "segment_bytes": 4 << 20,
            }
        },
        "model": {"make": "agentloop.quickstart.model:make_model"},
        "engine": {"hf": {"process": False, "threads": 1}},
        "ranks": {"count": 1, "kind": "local", "threads": 1},
        "optimizer": {"lr": 1.0e-3},
        "loss": {"policy": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "plan": {"cap": 256},
        "train": {"batch_size": 3, "total_train_steps": 4},
        "evaluate": {"evaluate_step": 2, "prompts": 4, "greedy": True},
        "checkpoint": {"checkpoint_interval": 1, "checkpoint_maxkeep": 2, "hf_interval": 4},
        "rollout": {
            "open": "agentloop.rollouts:open_rollouts",
            "workers": {"kind": "local", "count": 1, "groups": 8},
            "tasks": [task],
            "eval_tasks": [{**task, "name": "held_out", "n": 2}],
        },
    }  # fmt: skip
    for path, value in overrides.items():
        place = settings
        *sections, name = path.split("__")
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file
