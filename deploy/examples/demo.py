"""A tour of the data plane: several processes put, list, get and clear, embedded and under Ray.

    python deploy/examples/demo.py

Three producers write the trajectories of four prompts each; a controller, which never sees a
tensor, plans from their tags alone; two workers fetch what the plan gives them, packed; the
controller clears. The whole is done twice: with the plane in a child process, and with the plane
in Ray actors.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import dataplane

PRODUCERS = 3
PROMPTS = 4
SESSIONS = 4
WORKERS = 2
PLANE = f"demo-{os.getpid()}"


def produce(client: dataplane.Client, producer: int) -> None:
    """Write every session of this producer's prompts: one put each, fields and tags together."""
    torch.manual_seed(producer)
    started = time.perf_counter()
    tokens = 0
    for prompt in range(PROMPTS):
        uid = f"p{producer}q{prompt}"
        client.kv_put(uid, "train", tags={"uid": uid, "is_prompt": True, "status": "running"})
        for session in range(SESSIONS):
            prompt_len, total = 16, 16 + int(torch.randint(50, 400, ()))
            labels = torch.randint(0, 32000, (total,))
            labels[:prompt_len] = -100
            client.kv_put(
                f"{uid}_{session}_0",
                "train",
                {
                    "input_ids": torch.randint(0, 32000, (total,)),
                    "labels": labels,
                    "logprobs": -torch.rand(total),
                },
                {
                    "uid": uid,
                    "session_id": session,
                    "index": 0,
                    "status": "completed",
                    "prompt_len": prompt_len,
                    "seq_len": total,
                    "score": float(session % 2),
                },
            )
            tokens += total
        client.kv_put(uid, "train", tags={"status": "finished"}, must_exist=True)
    took = (time.perf_counter() - started) * 1e3
    say(f"producer {producer}: {PROMPTS * SESSIONS} trajectories, {tokens} tokens, {took:.1f} ms")


def work(client: dataplane.Client, rank: int, keys: list[str]) -> None:
    """Fetch the rows of one rank's plan, packed for a forward pass."""
    started = time.perf_counter()
    rows = client.kv_batch_get(keys, "train", ["input_ids", "labels"], layout="packed")
    took = (time.perf_counter() - started) * 1e3
    ids, ends = rows.fields["input_ids"], rows.cu_seqlens["input_ids"]
    supervised = int((rows.fields["labels"] != -100).sum())
    say(
        f"worker {rank}: {len(keys)} trajectories in one pack of {len(ids)} tokens "
        f"({supervised} supervised), longest {int(ends.diff().max())}, fetched in {took:.2f} ms"
    )


def control(client: dataplane.Client, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Plan over tags alone: whole groups, longest first, dealt to the lighter worker."""
    prompts = client.kv_list("train", where={"is_prompt": True, "status": "finished"})
    rows = client.kv_list("train", where={"uid": {"in": prompts.keys}, "status": "completed"})
    say(
        f"controller: {len(prompts)} finished prompts, {len(rows)} trajectories at revision "
        f"{rows.revision.n}, mean score {rows.column('score').mean():.2f}; no tensor seen"
    )
    plan: list[list[str]] = [[] for _ in range(WORKERS)]
    load = [0] * WORKERS
    lengths = dict(zip(rows.keys, rows.column("seq_len").tolist(), strict=True))
    for key in sorted(lengths, key=lengths.__getitem__, reverse=True):
        rank = load.index(min(load))
        plan[rank].append(key)
        load[rank] += lengths[key]
    finish([spawn("work", str(rank), *keys) for rank, keys in enumerate(plan)])
    removed = client.kv_clear(prompts.keys + rows.keys, "train")
    since = client.kv_list("train", since=rows.revision)
    status = client.status()
    say(
        f"controller: cleared {removed} rows at one revision; a listing since revision "
        f"{rows.revision.n} names {len(since.cleared)} cleared keys; "
        f"{status['bytes_in_use']} bytes in use"
    )
    if status["bytes_in_use"] or len(client.kv_list("train")):
        raise SystemExit("the plane should be empty now")


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"a process of the demo ended with status {process.returncode}")


def run(host: str) -> None:
    """The tour on one kind of host."""
    started = time.perf_counter()
    client = dataplane.init({"host": host}, name=PLANE)
    print(
        f"\nplane {client.name!r} ({client.plane_id}), {host}: up in "
        f"{time.perf_counter() - started:.2f} s",
        flush=True,
    )

    def spawn(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, host, PLANE, *arguments])

    try:
        finish([spawn("produce", str(producer)) for producer in range(PRODUCERS)])
        control(client, spawn)
    finally:
        client.close(destroy=True)


def join_ray() -> None:
    import ray

    # RAY_ADDRESS names the cluster of the process that started this one.
    ray.init(log_to_driver=False, logging_level=logging.ERROR)


def main() -> None:
    if len(sys.argv) > 3:  # a process of the tour
        host, plane, role, number, *keys = sys.argv[1:]
        if host == "ray":
            join_ray()
        with dataplane.connect(plane, config={"host": host}) as client:
            if role == "produce":
                produce(client, int(number))
            else:
                work(client, int(number), keys)
        return
    run("embedded")
    import ray

    cluster = ray.init(
        address="local",  # a cluster of the demo's own, whatever else runs on this machine
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]
    try:
        run("ray")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
