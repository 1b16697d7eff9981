"""verl's synchronous trainer, two steps of `fit` with validation before: every stage checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.interop.verl import ranks, script
from tests.interop.verl.checks import Checks
from tests.interop.verl.trainers import SyncTrainer, listed, rows, settings

PROMPTS = 4
MINI_BATCH = 3
MULTIPLE = math.lcm(2, MINI_BATCH * script.SESSIONS)
PAD = 128
"""The length of a padding row, of which one token is the response."""


def run(check: Checks, worker_group: Any, manager: Any, folder: Path) -> None:
    """Train two steps and hold each stage up to the script."""
    config = settings(
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        "actor_rollout_ref.rollout.temperature=0.7",
        "trainer.v1.trainer_mode=sync",
        "trainer.val_before_train=true",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.rollout_data_dir={folder / 'dump'}",
    )
    manager.configure(config, scores=True)
    trainer = SyncTrainer(config)
    watch = _Stages(check)
    trainer.watch = watch
    trainer.furnish(worker_group, manager, prompts=PROMPTS, streaming=True)
    trainer.total_training_steps = trainer.steps_per_epoch = 2

    trainer.fit(manager)

    check.equal("validations", watch.seen.count("validate"), 1)
    for stage in ("submit", "sampled", "balance", "old_log_prob", "advantage", "update_actor"):
        check.equal(f"times of {stage}", watch.seen.count(stage), 2)
    check.equal("nothing is left of the training", listed("train"), {})
    _dump(check, folder / "dump", watch)


class _Stages:
    def __init__(self, check: Checks) -> None:
        self.check = check
        self.seen: list[str] = []
        self.uids: dict[int, str] = {}
        """Of the step: prompt number to uid."""
        self.all_uids: dict[str, int] = {}
        self.order: list[str] = []

    def __call__(self, stage: str, *given: Any) -> None:
        self.seen.append(stage)
        getattr(self, f"on_{stage}", lambda *given: None)(*given)

    def expected(self) -> dict[str, script.Trajectory]:
        """What the step's rollout must have written, by key."""
        return {
            row.key(uid): row
            for number, uid in self.uids.items()
            for row in script.trajectories(number)
        }

    def on_validate(self, trainer: Any, metrics: dict[str, float]) -> None:
        # Of prompts 0 to 3 the first session alone: 0 and 1 score, 2 writes nothing, 3 fails.
        for name, value in {
            "val-aux/played/reward/mean@1": 0.5,
            "val-core/played/acc/mean@1": 0.25,
            "val-aux/num_turns/mean": 2,
        }.items():
            self.check.equal(name, metrics[name], value)
        self.check.equal("nothing is left of the validation", listed("val"), {})

    def on_submit(self, trainer: Any, uids: dict[int, str]) -> None:
        self.uids = uids
        self.all_uids.update({uid: number for number, uid in uids.items()})
        tags = listed("train")
        for uid in uids.values():
            self.check.true("a submitted prompt is listed", tags[uid]["is_prompt"] is True)
            # The agent loop merges its statuses into the tags that the trainer wrote.
            self.check.equal("its step", tags[uid]["global_steps"], trainer.global_steps)
            self.check.true(
                "its status", tags[uid]["status"] in ("pending", "running", "finished", "failure")
            )

    def on_sampled(self, trainer: Any, batch: Any) -> None:
        expected = self.expected()
        self.check.equal("sampled rows", sorted(batch.keys), sorted(expected))
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            self.check.equal(key, tag, script.tags(expected[key], trainer.global_steps))
        self.check.equal("fields after sampling", batch.fields, None)
        self.check.equal("prompts are gone", sorted(listed("train")), sorted(expected))
        data = rows(
            batch.keys, "train", "prompts", "responses", "response_mask", "loss_mask", "input_ids",
            "position_ids", "rollout_log_probs", "rm_scores", "routed_experts", "num_turns", "uid",
            "session_id", "reward_model", "extra_fields", "raw_prompt", "dummy_tensor",
        )  # fmt: skip
        for key, row in data.items():
            self._trajectory(key, row, expected[key], trainer.global_steps)

    def _trajectory(self, key: str, row: Any, wrote: script.Trajectory, step: int) -> None:
        output = wrote.output
        prompt, response = len(output.prompt_ids), len(output.response_ids)
        for name, value in {
            "prompts": output.prompt_ids,
            "responses": output.response_ids,
            "response_mask": output.mask,
            "loss_mask": output.mask,
            "input_ids": output.prompt_ids + output.response_ids,
            "position_ids": list(range(prompt + response)),
            "rollout_log_probs": output.log_probs,
            "rm_scores": [0.0] * (response - 1) + [wrote.score],
            "routed_experts": [*output.experts, [[0], [0]]],
            "num_turns": 2,
            "uid": key.rsplit("_", 2)[0],
            "session_id": wrote.session,
            "reward_model": {"style": "rule", "ground_truth": str(wrote.number)},
            "raw_prompt": [{"role": "user", "content": f"question {wrote.number}"}],
            "dummy_tensor": [0],
            "extra_fields": {
                **script.versions(wrote.number, step),
                "reward_extra_info": {"acc": wrote.score},
            },
        }.items():
            self.check.equal(f"{name} of {key}", row[name], value)

    def on_balance(self, trainer: Any, before: list[str], batch: Any) -> None:
        expected = self.expected()
        missing = -len(before) % MULTIPLE
        self.check.equal("rows after padding", len(batch), len(before) + missing)
        self.check.true("padding was needed", missing > 0)
        padding = [key for key in batch.keys if key not in expected]
        self.check.equal("padding rows", len(padding), missing)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            # The order changes; a row and its tags stay together.
            if key in expected:
                self.check.equal(key, tag, script.tags(expected[key], trainer.global_steps))
            else:
                self.check.true("a padding row says so", tag["is_padding"] is True)
                self.check.equal("its length", (tag["seq_len"], tag["response_len"]), (PAD, 1))
        data = rows(padding, "train", "responses", "response_mask", "rm_scores", "uid", "num_turns")
        for key, row in data.items():
            uid = key.rsplit("_", 2)[0]
            wanted = {"responses": [2], "response_mask": [0], "rm_scores": [0.0]}
            self.check.equal("a padding row", row, {**wanted, "uid": uid, "num_turns": 0})
        half = len(batch) // 2
        loads = [
            sum(24576 * tag["seq_len"] + tag["seq_len"] ** 2 for tag in part)
            for part in (batch.tags[:half], batch.tags[half:])
        ]
        heaviest = max(24576 * tag["seq_len"] + tag["seq_len"] ** 2 for tag in batch.tags)
        self.check.true(f"equal loads: {loads}", abs(loads[0] - loads[1]) <= heaviest)
        self.order = list(batch.keys)

    def on_old_log_prob(self, trainer: Any, given: Any, batch: Any) -> None:
        self.check.equal("order after the ranks", batch.keys, self.order)
        # The put returns all tags of the keys, not only what it wrote: the padding mark is one.
        self.check.equal("tags after the ranks", batch.tags, given.tags)
        for field in ("old_log_probs", "entropy", "log_probs", "advantages"):
            self.check.equal(f"{field} is there", field in batch.fields, field != "advantages")
        self.check.equal("fields are sorted", batch.fields, sorted(batch.fields))
        data = rows(batch.keys, "train", "input_ids", "old_log_probs", "entropy", "log_probs")
        expected = self.expected()
        for key, row in data.items():
            log_probs, entropy = script.forward(row["input_ids"])
            self.check.equal(f"log_probs of {key}", row["log_probs"], log_probs)
            if key in expected:
                output = expected[key].output
                cut = script.of_response(log_probs, output)
                self.check.equal(f"old_log_probs of {key}", row["old_log_probs"], cut)
                # The ranks wrote it at full length; the trainer over it at the response's.
                cut = script.of_response(entropy, output)
                self.check.equal(f"entropy of {key}", row["entropy"], cut)
        self._ranks(trainer, "compute_log_prob", {"temperature": 0.7, "calculate_entropy": True})

    def _ranks(self, trainer: Any, method: str, settings: dict[str, Any]) -> list[Any]:
        """Each rank was called once, with its share of the rows in order; siblings alike."""
        expected = self.expected()
        calls = trainer.actor_rollout_wg.calls()
        half = len(self.order) // 2
        for rank, noted in zip(ranks.DP_RANKS, calls, strict=True):
            self.check.equal("calls of a rank", [call["method"] for call in noted], [method])
            share = self.order[rank * half : (rank + 1) * half]
            got = [f"{row['uid']}_{row['session']}" for row in noted[0]["rows"]]
            self.check.equal("rows of a rank", got, [key.rsplit("_", 1)[0] for key in share])
            for key, row in zip(share, noted[0]["rows"], strict=True):
                if key in expected:
                    output = expected[key].output
                    ids = output.prompt_ids + output.response_ids
                    self.check.equal("input_ids at a rank", row["input_ids"], ids)
            for name, value in settings.items():
                self.check.equal(f"setting {name}", noted[0]["settings"][name], value)
        return calls

    def on_advantage(self, trainer: Any, batch: Any) -> None:
        self.check.equal("order after advantages", batch.keys, self.order)
        data = rows(batch.keys, "train", "advantages", "returns")
        for key, row in data.items():
            wanted = self._advantage(key)
            self.check.equal(f"advantages of {key}", row, {"advantages": wanted, "returns": wanted})
        # The worked vector, literally: two outputs of session 0, a session without signal.
        uid = next(uid for number, uid in self.uids.items() if number % 4 == 0)
        worked = {"0_0": [1, 0, 1], "0_1": [1, 1, 0], "1_0": [-1, -1, -1], "2_0": [0, 0, 0]}
        for suffix, value in worked.items():
            self.check.equal(f"worked {suffix}", data[f"{uid}_{suffix}"]["advantages"], value)

    def _advantage(self, key: str) -> list[float]:
        row = self.expected().get(key)
        if row is None:
            return [0.0]
        return script.advantages(row.number)[row.session, row.index]

    def on_update_actor(self, trainer: Any, batch: Any) -> None:
        size = MINI_BATCH * script.SESSIONS
        calls = self._ranks(trainer, "update_actor", {"global_batch_size": size, "epochs": 1})
        half = len(self.order) // 2
        for rank, noted in zip(ranks.DP_RANKS, calls, strict=True):
            for key, got in zip(
                self.order[rank * half : (rank + 1) * half], noted[0]["advantages"], strict=True
            ):
                self.check.equal(f"advantages of {key} at a rank", got, self._advantage(key))

    def on_metrics(self, trainer: Any, batch: Any, metrics: dict[str, Any]) -> None:
        expected = self.expected()
        lengths = [len(row.output.response_ids) for row in expected.values()]
        scores = [row.score for row in expected.values()]
        for name, value in {
            "actor/pg_loss": 0.5,
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": max(lengths),
            "critic/score/mean": sum(scores) / len(scores),
            "critic/rewards/max": max(scores),
            # Prompts 1, 5, … span three weight versions, the others one, up to the last.
            "training/off_policy/trajectory_spans/max": 3,
            "training/off_policy/trajectory_spans/min": 1,
            "training/off_policy/trajectory_staleness/max": 0,
            "training/off_policy/trajectory_staleness_worst/max": 2,
            "training/num_turns/min": 2,
            "training/global_step": trainer.global_steps,
        }.items():
            self.check.equal(name, metrics[name], value)


def _dump(check: Checks, folder: Path, watch: _Stages) -> None:
    """The trainer's own dump of the rollouts: all rows, by uid, session and index."""
    for step in (1, 2):
        lines = [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]
        keys = [line["uid"] for line in lines]
        check.equal("dumped in order", keys, sorted(keys, key=_place))
        known = {key: line for key, line in zip(keys, lines, strict=True) if key[:3] != "pad"}
        wanted: dict[str, script.Trajectory] = {}
        for uid, number in watch.all_uids.items():
            if number // PROMPTS == step - 1:
                wanted |= {row.key(uid): row for row in script.trajectories(number)}
        check.equal("dumped rows", sorted(known), sorted(wanted))
        for key, row in wanted.items():
            check.equal("dumped score", known[key]["score"], row.score)
            words = " ".join(str(t) for t in row.output.response_ids if t)
            check.equal("dumped response", known[key]["output"], words)


def _place(key: str) -> tuple[str, int, int]:
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)
