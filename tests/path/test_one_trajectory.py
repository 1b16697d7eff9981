"""The path of a trajectory: prompt, agent loop, controller, worker, clear; each its own process.

Only public names of `dataplane` are used in the roles: it is what a training run does.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dataplane
from tests.contract.planes import Plane, embedded_sync, ray_hosted
from tests.deadline import eventually

PROMPT = [11, 12, 13]
SESSIONS = 4
ROUNDS = 3

Plan = list[list[str]]
"""Keys of each micro-batch."""


def response(session: int) -> list[int]:
    """What a session generates: one token more each."""
    return [100 + session + i for i in range(2 + session)]


def produce(name: str, settings: dict[str, Any], partition: str, uid: str) -> list[str]:
    """The agent loop: puts a trajectory per session of a prompt; the keys."""
    with dataplane.connect(name, config=settings) as client:
        keys = []
        for session in range(SESSIONS):
            tokens = response(session)
            ids = torch.tensor(PROMPT + tokens)
            labels = torch.tensor([-100] * len(PROMPT) + tokens)
            logprobs = torch.tensor([0.0] * len(PROMPT) + [-0.5] * len(tokens))
            key = f"{uid}_{session}_0"
            client.kv_put(
                key,
                partition,
                {"input_ids": ids, "labels": labels, "logprobs": logprobs},
                {
                    "uid": uid, "session_id": session, "index": 0, "status": "completed",
                    "seq_len": len(ids), "score": float(session % 2), "global_steps": 7,
                },
                if_absent=True,
            )  # fmt: skip
            keys.append(key)
        client.kv_put(uid, partition, tags={"status": "finished"}, must_exist=True)
        return keys


def train(name: str, settings: dict[str, Any], partition: str, plan: Plan) -> list[list[int]]:
    """A worker: gets each micro-batch packed, computes on it, writes back under the same keys.

    Returns the packed tokens of each micro-batch.
    """
    seen = []
    with dataplane.connect(name, config=settings) as client:
        for keys in plan:
            rows = client.kv_batch_get(
                keys, partition, ["input_ids", "labels", "logprobs"], layout="packed"
            )
            assert rows.keys == keys
            starts = rows.cu_seqlens["input_ids"].tolist()
            supervised = rows["labels"] != -100
            assert torch.equal(rows["labels"][supervised], rows["input_ids"][supervised])
            assert torch.equal(rows["logprobs"] != 0, supervised)
            recomputed = rows["input_ids"].float() / 1000
            spans = itertools.pairwise(starts)
            client.kv_batch_put(
                keys, partition,
                {"old_logprobs": [recomputed[begin:end] for begin, end in spans]},
                [{"trained": True}] * len(keys),
                must_exist=True,
            )  # fmt: skip
            seen.append(rows["input_ids"].tolist())
    return seen


class Processes:
    """Runs a role in a process of its own and returns what it returned."""

    def run(self, role: Any, *args: Any) -> Any:
        raise NotImplementedError


ROLE = """
import json, sys
from {module} import {name} as role
for line in sys.stdin:
    print(json.dumps(role(*json.loads(line))), flush=True)
"""


class Subprocesses(Processes):
    """One process per role, which takes its arguments and gives its results as lines of JSON."""

    def __init__(self, *roles: Any) -> None:
        self._processes = {
            role: subprocess.Popen(
                [sys.executable, "-c", ROLE.format(module=__name__, name=role.__name__)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for role in roles
        }  # fmt: skip

    def run(self, role: Any, *args: Any) -> Any:
        process = self._processes[role]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(args) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def end(self) -> None:
        for process in self._processes.values():
            with process:
                process.communicate(timeout=30.0)
            assert process.returncode == 0


class RayTasks(Processes):
    def run(self, role: Any, *args: Any) -> Any:
        import ray

        return ray.get(ray.remote(role).options(num_cpus=1).remote(*args), timeout=60.0)


@pytest.fixture(params=["embedded", pytest.param("ray", marks=pytest.mark.ray)])
def run(
    request: pytest.FixtureRequest, plane_settings: dict[str, Any]
) -> Iterator[tuple[Plane, Processes]]:
    """A plane, and how its processes are started."""
    if request.param == "embedded":
        processes = Subprocesses(produce, train)
        with embedded_sync("path-embedded", plane_settings) as plane:
            yield plane, processes
            processes.end()
    else:
        request.getfixturevalue("ray_cluster")
        with ray_hosted("path-ray", plane_settings) as plane:
            yield plane, RayTasks()


def test_a_trajectory_goes_from_prompt_to_clear(run: tuple[Plane, Processes]) -> None:
    plane, processes = run
    client, settings = plane.client, plane.settings
    sizes = []
    for step in range(ROUNDS):
        uid = f"prompt-{step}"
        # The controller begins a prompt: a row of tags only.
        begun = client.kv_put(
            uid, "train", tags={"is_prompt": True, "uid": uid, "status": "pending", "n": SESSIONS}
        )
        keys = processes.run(produce, plane.name, settings, "train", uid)

        # It plans from tags alone, and of those only what is new.
        news = client.kv_list("train", since=begun.revision)
        assert not news.full
        assert sorted(news.keys) == sorted([uid, *keys])
        group = client.kv_list(
            "train",
            where={"uid": uid, "is_prompt": {"exists": False}, "status": "completed"},
            columns=["session_id", "seq_len", "score"],
        )
        assert group.keys == keys
        assert group.column("seq_len").tolist() == [len(PROMPT) + 2 + s for s in range(SESSIONS)]
        assert group.lengths("input_ids").tolist() == group.column("seq_len").tolist()
        assert group.column("score").tolist() == [0.0, 1.0, 0.0, 1.0]
        assert set(group.fields) == {("input_ids", "labels", "logprobs")}
        # Long and short together: its own plan, not the order in which the keys lie.
        plan = [[keys[3], keys[0]], [keys[2], keys[1]]]

        seen = processes.run(train, plane.name, settings, "train", plan)
        assert seen == [
            PROMPT + response(3) + PROMPT + response(0),
            PROMPT + response(2) + PROMPT + response(1),
        ]

        trained = client.kv_list("train", where={"trained": True})
        assert trained.keys == keys
        rows = client.kv_batch_get(keys, "train", ["old_logprobs"], layout="list")
        for session, row in enumerate(rows["old_logprobs"]):
            assert torch.equal(row, torch.tensor(PROMPT + response(session)).float() / 1000)

        assert client.kv_clear(None, "train", where={"uid": uid}) == SESSIONS + 1
        with pytest.raises(dataplane.KeyNotFound) as gone:
            client.kv_put(keys[0], "train", {"old_logprobs": torch.zeros(5)}, must_exist=True)
        assert gone.value.keys == [keys[0]]
        status = client.status()
        assert status["bytes_in_use"] == 0
        assert status["partitions"]["train"]["keys"] == 0
        plane.settle()
        eventually(lambda: plane.used_bytes() == 0, "no extent is in use")
        sizes.append(sum(s["segment_bytes"] for s in client.status()["values"].values()))
    assert len(set(sizes)) == 1, "segments are used again"
