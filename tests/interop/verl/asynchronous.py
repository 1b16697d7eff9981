"""verl's asynchronous trainer: warm-up, eviction with refill, a checkpoint with a prompt in work,
a crash, and a second trainer that goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq

from tests.deadline import eventually
from tests.interop.verl import script
from tests.interop.verl.checks import Checks
from tests.interop.verl.trainers import AsyncTrainer, listed, rows, settings

PROMPTS = 2
WARM_UP = 3
HELD = 4
"""The prompt whose sessions wait, so that the checkpoint finds it in work."""


def run(check: Checks, worker_group: Any, manager: Any, folder: Path) -> None:
    """One step, a checkpoint, all lost, and a second step from the checkpoint."""
    config = settings(
        f"data.train_batch_size={PROMPTS}",
        "data.gen_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.v1.trainer_mode=colocate_async",
        f"trainer.v1.colocate_async.num_warmup_batches={WARM_UP / PROMPTS}",
        "trainer.val_before_train=false",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    )
    (folder / "checkpoints").mkdir()
    manager.configure(config, scores=False)
    worker = manager.worker
    ray.get(worker.hold.remote(HELD))

    first = _fit(config, worker_group, manager, _First(check), steps=1)
    _first_ended(check, first, worker)
    saved = first.watch.saved
    meta = json.loads(
        (folder / "checkpoints/global_step_1/transfer_queue/metadata.json").read_text()
    )
    check.equal("the checkpoint's own notes", meta["user_metadata"], {"global_steps": 1})

    ray.get(worker.hold.remote(None))
    second = _fit(config, worker_group, manager, _Second(check, saved), steps=2)
    check.equal("steps of the second trainer", second.recorded[0]["training/global_step"], 2)
    _wait_for_all(second.watch, set())
    left = listed("train")
    tq.kv_clear(keys=list(left), partition_id="train")
    check.equal("nothing is left", listed("train"), {})


def _fit(config: Any, worker_group: Any, manager: Any, watch: Any, *, steps: int) -> AsyncTrainer:
    trainer = AsyncTrainer(config)
    trainer.watch = watch
    # No reward workers: whole batches are scored after sampling.
    trainer.furnish(worker_group, manager, prompts=1, streaming=False)
    trainer.total_training_steps = steps
    trainer.steps_per_epoch = 100
    watch.restored(trainer)
    trainer.fit(manager)
    return trainer


class _Stages:
    def __init__(self, check: Checks) -> None:
        self.check = check
        self.uids: dict[str, int] = {}
        self.submitted: list[list[int]] = []
        self.saved: dict[str, dict[str, Any]] = {}

    def __call__(self, stage: str, *given: Any) -> None:
        getattr(self, f"on_{stage}", lambda *given: None)(*given)

    def restored(self, trainer: Any) -> None:
        """After what the constructor loaded."""

    def on_submit(self, trainer: Any, uids: dict[int, str]) -> None:
        self.uids |= {uid: number for number, uid in uids.items()}
        self.submitted.append(sorted(uids))

    def numbers(self, keys: Any) -> set[int]:
        """The prompts of these keys."""
        return {self.uids[key.split("_")[0]] for key in keys if not key.startswith("pad")}

    def on_reward(self, trainer: Any, batch: Any) -> None:
        data = rows(batch.keys, "train", "responses", "rm_scores", "acc", "prompts")
        for key, row in data.items():
            length = len(row["responses"])
            score = [0.0] * (length - 1) + [sum(row["responses"]) / 100]
            self.check.equal(f"score of {key}", row["rm_scores"], score)
            self.check.equal("its extra", int(row["acc"]), length)
        asked = [f"question {self.uids[key.split('_')[0]]}" for key in batch.keys]
        self.check.equal("questions in order", trainer.reward_loop_manager.scored[-1], asked)

    def on_advantage(self, trainer: Any, batch: Any) -> None:
        data = rows(batch.keys, "train", "advantages", "response_mask")
        for key, row in data.items():
            lengths = len(row["advantages"]), len(row["response_mask"])
            self.check.equal(f"length of {key}", *lengths)
            pairs = zip(row["advantages"], row["response_mask"], strict=True)
            self.check.true("no advantage outside the mask", all(m or a == 0 for a, m in pairs))


class _First(_Stages):
    def on_before_sample(self, trainer: Any) -> None:
        self.check.equal("submitted", self.submitted, [[0, 1, 2], [3, 4]])
        _wait_for_all(self, {HELD})

    def on_sampled(self, trainer: Any, batch: Any) -> None:
        # Prompt 3 failed: it was evicted, and the loader's next prompt asked for in its place.
        self.check.equal("refilled", self.submitted[2:], [[5]])
        numbers = self.numbers(batch.keys)
        self.check.equal("groups", len(numbers), PROMPTS)
        self.check.true(f"groups {numbers}", numbers <= {0, 1, 2, 5})

    def on_before_save(self, trainer: Any) -> None:
        _wait_for_all(self, {HELD})
        held = next(uid for uid, number in self.uids.items() if number == HELD)
        wrote = {row.key(held) for row in script.trajectories(HELD) if row.session == 0}
        eventually(lambda: wrote <= listed("train").keys(), "the held prompt's first session wrote")
        self.saved = listed("train")
        self.check.equal("the held prompt is in work", self.saved[held]["status"], "running")


def _first_ended(check: Checks, first: AsyncTrainer, worker: Any) -> None:
    """The step's keys are gone; then the rest goes too, as when the cluster is lost."""
    metrics = first.recorded[0]
    check.equal("evicted", metrics["training/rollout_failure/evicted_samples"], 1)
    left = listed("train")
    prompts = [key for key, tag in left.items() if tag.get("is_prompt")]
    check.equal("prompts left", len(prompts), 3)
    trained = first.watch.saved.keys() - left.keys()
    check.true("the step's rows are gone", trained)
    check.true("and no prompt with them", not trained & set(prompts))
    check.equal("prompts in work that are dropped", ray.get(worker.abandon.remote()), 1)
    tq.kv_clear(keys=list(left), partition_id="train")
    check.equal("nothing is left", listed("train"), {})


class _Second(_Stages):
    def __init__(self, check: Checks, saved: dict[str, dict[str, Any]]) -> None:
        super().__init__(check)
        self.before = saved

    def restored(self, trainer: Any) -> None:
        self.check.equal("prompts restored", trainer._restored_tq_prompt_count, 3)
        self.check.equal("step", trainer.global_steps, 1)
        self.check.equal("the loader's place", trainer.train_dataloader.next, 6)
        self.check.equal("keys and tags restored", listed("train"), self.before)
        prompts = [key for key, tag in self.before.items() if tag.get("is_prompt")]
        for key, row in rows(prompts, "train", "index", "raw_prompt", "dummy_tensor").items():
            number = int(row["index"])
            self.uids[key] = number
            question = [{"role": "user", "content": f"question {number}"}]
            self.check.equal("a stored prompt", row["raw_prompt"], question)
            self.check.equal("its tensor", row["dummy_tensor"], [0])
        for uid in {key.split("_")[0] for key in self.before} & self.uids.keys():
            number = self.uids[uid]
            keys = [r.key(uid) for r in script.trajectories(number) if r.key(uid) in self.before]
            got = rows(keys, "train", "responses")
            for row in script.trajectories(number):
                if row.key(uid) in keys:
                    wanted = row.output.response_ids
                    self.check.equal("a restored row", got[row.key(uid)]["responses"], wanted)

    def on_before_sample(self, trainer: Any) -> None:
        # Three were restored, which is the warm-up: only the step's own prompts are submitted.
        self.check.equal("submitted", self.submitted, [[6, 7]])
        _wait_for_all(self, set())
        held = next(uid for uid, number in self.uids.items() if number == HELD)
        tags = listed("train")
        self.check.equal("the held prompt's step", tags[held]["global_steps"], 2)
        wrote = {key for key in tags if key.split("_")[0] == held and key != held}
        self.check.equal("its rows", wrote, {r.key(held) for r in script.trajectories(HELD)})

    def on_sampled(self, trainer: Any, batch: Any) -> None:
        old = {
            self.uids[key]
            for key, tag in self.before.items()
            if tag.get("is_prompt") and self.uids[key] != HELD
        }
        self.check.equal("the oldest groups", self.numbers(batch.keys), old)
        self.check.equal("refilled", self.submitted[1:], [[8]])


def _wait_for_all(watch: _Stages, but: set[int]) -> None:
    """Until every prompt but these has come to an end."""

    def ended() -> bool:
        tags = listed("train")
        return all(
            tag["status"] in ("finished", "failure")
            for key, tag in tags.items()
            if tag.get("is_prompt") and watch.uids[key] not in but
        )

    eventually(ended, "the prompts in work come to an end", within_s=60.0)
