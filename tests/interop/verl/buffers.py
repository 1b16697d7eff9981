"""verl's replay buffers: eviction, refill, draining, staleness, by the worked cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import (
    DAPO_FILTERED_REWARD_COUNTS_KEY,
    ReplayBuffer,
    ReplayBufferAsync,
)

from tests.interop.verl.checks import Checks
from tests.interop.verl.trainers import listed

SESSIONS = 2


def run(check: Checks) -> None:
    """Both buffers against the store."""
    for case in (_refill_of_failed, _draining, _eviction, _waiting, _validation):
        case(check)
        _clear_all(check)


def _draining(check: Checks) -> None:
    """Synchronous with filtered groups: twice as many are asked for as were filtered, requests in
    work are awaited, and what is left over is dropped."""
    _group("a", "finished", 1, rewards=(1.0, 1.0))
    for uid in "bcd":
        _group(uid, "finished", 1)
    asked: list[int] = []

    def refill(count: int) -> None:
        asked.append(count)
        _group("e", "finished", 1)
        _group("f", "running", 1, rewards=())

    buffer = _watched(
        ReplayBuffer, on_poll=lambda: _group("f", "finished", 1),
        refill_fn=refill, filter_groups_metric="reward", train_batch_size=4, gen_batch_size=1,
        max_inflight_gen_batches=1,
    )  # fmt: skip
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=4)

    check.equal("asked for", asked, [2])
    check.equal("polls in which it waited", buffer.polls, 1)
    check.equal("filtered", metrics["training/filter_groups/evicted_samples"], 1)
    check.equal("surplus", metrics["training/filter_groups/discarded_surplus_samples"], 1)
    check.equal("rewards of the filtered", metrics[DAPO_FILTERED_REWARD_COUNTS_KEY], {1.0: 1})
    groups = {key.split("_")[0] for key in batch.keys}
    check.equal("groups and rows", (len(groups), len(batch)), (4, 8))
    check.true("the filtered group is not among them", "a" not in groups)
    check.equal("what is left in the store", sorted(listed("train")), sorted(batch.keys))


def _refill_of_failed(check: Checks) -> None:
    """Synchronous with failed groups that left nothing: as many are asked for."""
    _group("a", "failure", 1, rewards=())
    _group("b", "finished", 1)
    asked: list[int] = []

    def refill(count: int) -> None:
        asked.append(count)
        _group("c", "finished", 1)

    buffer = _watched(
        ReplayBuffer, refill_fn=refill, sync_refill_failed_groups=True, train_batch_size=2,
        gen_batch_size=1,
    )  # fmt: skip
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    check.equal("asked for", asked, [1])
    check.equal("sampled", {key.split("_")[0] for key in batch.keys}, {"b", "c"})
    check.equal("failed", metrics["training/rollout_failure/evicted_samples"], 1)


def _eviction(check: Checks) -> None:
    """Asynchronous at step 10: stale, filtered and failed groups go at once, as many come."""
    _group("stale", "finished", 1)
    _group("both", "finished", 1, rewards=(0.0, 0.0))
    for uid in ("same1", "same2"):
        _group(uid, "finished", 9, rewards=(1.0, 1.0))
    _group("failed", "failure", 9, rewards=(1.0,))
    # At threshold 8, a prompt of step 3 may be used at step 10, and one of step 2 may not.
    for place, uid in enumerate(("good1", "good2", "good3", "good4", "good5")):
        _group(uid, "finished", 3 + place)
    asked: list[int] = []

    def refill(count: int) -> None:
        asked.append(count)
        for number in range(count):
            _group(f"new{number}", "pending", 10, rewards=())

    buffer = _watched(ReplayBufferAsync, refill_fn=refill, filter_groups_metric="reward")
    check.equal("sampleable before", buffer.get_sampleable_count(10, "train"), 5)
    batch, metrics = buffer.sample(global_steps=10, partition_id="train", batch_size=4)

    check.equal("asked for", asked, [5])
    prefix = "training/off_policy/evicted_samples"
    for name, value in {
        prefix: 2,
        f"{prefix}_staleness/mean": 10,
        f"{prefix}_staleness/max": 10,
        f"{prefix}_staleness/min": 10,
        "training/filter_groups/evicted_samples": 3,
        "training/rollout_failure/evicted_samples": 1,
    }.items():
        check.equal(name, metrics[name], value)
    groups = [key.split("_")[0] for key in batch.keys]
    check.equal("the oldest", sorted(set(groups)), ["good1", "good2", "good3", "good4"])
    check.equal("rows", len(batch), 4 * SESSIONS)
    check.equal("sampleable after", buffer.get_sampleable_count(10, "train"), 1)
    left = {key for key, tag in listed("train").items() if tag.get("is_prompt")}
    check.equal("prompts left", left, {"good5", *(f"new{n}" for n in range(5))})


def _waiting(check: Checks) -> None:
    """Asynchronous with strategy `wait`: nothing is sampled while an old prompt is in work."""
    _group("old", "running", 3, rewards=())
    for uid in ("a", "b"):
        _group(uid, "finished", 9)
    buffer = _watched(
        ReplayBufferAsync, on_poll=lambda: _group("old", "finished", 3),
        max_off_policy_strategy="wait",
    )  # fmt: skip
    batch, metrics = buffer.sample(global_steps=10, partition_id="train", batch_size=2)
    check.equal("polls in which it waited", buffer.polls, 1)
    check.true("the old prompt comes first", "old" in {key.split("_")[0] for key in batch.keys})
    check.equal("nothing was dropped", metrics, {})


def _validation(check: Checks) -> None:
    """Nothing is evicted from the validation partition, whatever its age and outcome."""
    _group("v", "failure", 1, partition="val")
    _group("w", "finished", 1, rewards=(1.0, 1.0), partition="val")
    buffer = _watched(
        ReplayBufferAsync, refill_fn=lambda count: None, filter_groups_metric="reward"
    )
    batch, metrics = buffer.sample(global_steps=50, partition_id="val", batch_size=2)
    check.equal("sampled", sorted(batch.keys), ["v_0_0", "v_1_0", "w_0_0", "w_1_0"])
    check.equal("no metrics", metrics, {})


def _watched(base: type, *, on_poll: Callable[[], None] | None = None, **options: Any) -> Any:
    """A buffer that does `on_poll` in place of its first wait between polls."""

    class Watched(base):
        polls = 0

        def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
            assert self.polls == 0, "it waits a second time: what it waits for has come"
            assert on_poll is not None, "it waits, and nothing will come"
            self.polls += 1
            on_poll()
            return super()._wait_for_next_poll(partition_id, last_debug_time)

    settings: dict[str, Any] = {
        "trainer_mode": "sync" if base is ReplayBuffer else "colocate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "poll_interval": 0.01,
    }
    return Watched(**settings | options)


def _group(
    uid: str, status: str, step: int, *, rewards: tuple[float, ...] = (0.0, 1.0),
    partition: str = "train",
) -> None:  # fmt: skip
    """A prompt with one trajectory for each reward, as the agent loop would have put it."""
    tag = {"is_prompt": True, "status": status, "global_steps": step}
    if rewards:
        keys = [f"{uid}_{number}_0" for number in range(len(rewards))]
        scores = [torch.tensor([0.0] * number + [score]) for number, score in enumerate(rewards)]
        fields = TensorDict(
            {"rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)},
            batch_size=len(keys),
        )
        tags = [{"status": "success", "global_steps": step} for _ in keys]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=tags)
    tq.kv_put(key=uid, partition_id=partition, tag=tag)


def _clear_all(check: Checks) -> None:
    for partition, items in tq.kv_list().items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)
    check.true("nothing is left", not any(tq.kv_list().values()))
