"""verl's trainers with what needs a model left out, and each stage of a step held up to a check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync

from tests.interop.verl import script

Watch = Callable[..., None]

WITHIN_S = 60.0
"""A trainer's run is over by then, or something is wrong."""


def settings(*overrides: str) -> Any:
    """verl's own default configuration of a PPO run, with these changes."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "algorithm.adv_estimator=grpo",
                "trainer.logger=[]",
                "trainer.total_epochs=1",
                "trainer.test_freq=-1",
                "trainer.v1.sampler.max_off_policy_threshold=8",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
                f"actor_rollout_ref.rollout.n={script.SESSIONS}",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.default_agent_loop=played",
                *overrides,
            ],
        )


class Prompts:
    """A data loader over prompts 0, 1, 2, …, whose place can be saved."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            numbers = list(range(self.next, self.next + self.size))
            self.next += self.size
            yield columns(numbers)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def columns(numbers: list[int]) -> dict[str, Any]:
    """A batch of these prompts as verl's data set gives it: object arrays and a tensor."""

    def objects(make: Callable[[int], Any]) -> Any:
        column = np.empty(len(numbers), dtype=object)
        column[:] = [make(number) for number in numbers]
        return column

    return {
        "dummy_tensor": torch.zeros(len(numbers), 1, dtype=torch.uint8),
        "raw_prompt": objects(lambda n: [{"role": "user", "content": f"question {n}"}]),
        "data_source": objects(lambda n: "played"),
        "reward_model": objects(lambda n: {"style": "rule", "ground_truth": str(n)}),
        "extra_info": objects(lambda n: {"index": n, "split": None}),
        "index": objects(lambda n: n),
    }


class Tokens:
    """A tokenizer whose words are the token ids."""

    pad_token_id = 0
    eos_token_id = 2

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in ids if int(token) or not skip_special_tokens)


class Quiet:
    """In place of the parts that hold models: notes what is asked of them and does nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self.asked.append(name)


class Pool:
    def get_n_gpus(self) -> int:
        return 1


class Rewards:
    """A reward manager: with workers of its own, or asked after sampling for whole batches."""

    def __init__(self, streaming: bool) -> None:
        self.reward_loop_worker_handles = ["worker"] if streaming else None
        self.scored: list[list[str]] = []

    def compute_rm_score(self, data: Any) -> Any:
        from tensordict import TensorDict
        from verl.protocol import DataProto

        prompts, responses = data.batch["prompts"], data.batch["responses"]
        lengths = data.batch["attention_mask"][:, prompts.size(1) :].sum(dim=1)
        scores = torch.zeros(responses.shape, dtype=torch.float32)
        for row, length in enumerate(lengths.tolist()):
            scores[row, length - 1] = float(responses[row, :length].sum()) / 100
        asked = [messages[0]["content"] for messages in data.non_tensor_batch["raw_prompt"]]
        self.scored.append(asked)
        return DataProto(
            batch=TensorDict({"rm_scores": scores}, batch_size=len(data)),
            non_tensor_batch={"acc": np.array(lengths.tolist(), dtype=object)},
            meta_info={"reward_extra_keys": ["acc"]},
        )


class Watched:
    """Calls `self.watch(stage, …)` after each stage of verl's step, with what it was given and
    what it returned. Before PPOTrainer in the order of bases."""

    watch: Watch

    def furnish(self, ranks: Any, manager: Any, *, prompts: int, streaming: bool) -> None:
        """Put in place what verl's `_setup` makes."""
        self.tokenizer = Tokens()
        self.train_dataloader = Prompts(prompts)
        self.train_dataloader_it = None
        self.val_dataloader = [columns([0, 1, 2, 3])]
        self.actor_rollout_wg = ranks
        self.agent_loop_manager = manager
        self.checkpoint_manager = Quiet()
        self.reward_loop_manager = Rewards(streaming)
        self.resource_pool_manager = Pool()
        self.distillation_config = None
        self.ref_in_actor = False
        self.curr_step_profile = False
        _bound_waits(self.replay_buffer)
        self.recorded: list[dict[str, Any]] = []
        self._init_dump_executor()
        self._load_checkpoint()

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        uids = {int(n): uid for n, uid in zip(batch["index"], batch["uid"], strict=True)}
        count = super()._submit_batch_to_rollout(batch)
        self.watch("submit", self, uids)
        return count

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.watch("before_sample", self)

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.watch("sample", self)

    def _compute_reward_colocate(self, batch: Any, metrics: Any = None) -> Any:
        result = super()._compute_reward_colocate(batch, metrics)
        self.watch("reward", self, result)
        return result

    def _balance_batch(self, batch: Any, metrics: Any, **options: Any) -> Any:
        before = list(batch.keys)
        self.watch("sampled", self, batch)
        result = super()._balance_batch(batch, metrics, **options)
        self.watch("balance", self, before, result)
        return result

    def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
        result = super()._compute_old_log_prob(batch, metrics)
        self.watch("old_log_prob", self, batch, result)
        return result

    def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
        result = super()._compute_advantage(batch, metrics)
        self.watch("advantage", self, result)
        return result

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        result = super()._update_actor(batch, metrics)
        self.watch("update_actor", self, result)
        return result

    def _validate(self) -> dict[str, float]:
        result = super()._validate()
        self.watch("validate", self, result)
        return result

    def _save_checkpoint(self) -> None:
        self.watch("before_save", self)
        super()._save_checkpoint()

    def _compute_metrics(self, batch: Any, metrics: Any, *others: Any, **options: Any) -> None:
        super()._compute_metrics(batch, metrics, *others, **options)
        self.recorded.append(dict(metrics))
        self.watch("metrics", self, batch, metrics)


def _bound_waits(buffer: Any) -> None:
    """Make a buffer poll often, and give up: by itself it waits for ever for what never comes."""
    buffer.poll_interval = 0.02
    wait = buffer._wait_for_next_poll
    deadline = time.monotonic() + WITHIN_S

    def bounded(partition_id: str, last_debug_time: float) -> float:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no batch in {WITHIN_S:g} s; listed: {listed(partition_id)}")
        return wait(partition_id, last_debug_time)

    buffer._wait_for_next_poll = bounded


class SyncTrainer(Watched, PPOTrainerSync):
    """verl's synchronous trainer."""


class AsyncTrainer(Watched, PPOTrainerColocateAsync):
    """verl's asynchronous trainer that shares its GPUs with the rollout."""


def listed(partition: str) -> dict[str, dict[str, Any]]:
    """The keys and tags of a partition, as verl's buffers see them."""
    return (tq.kv_list(partition) or {}).get(partition, {})


def rows(keys: list[str], partition: str, *fields: str) -> dict[str, dict[str, Any]]:
    """Some fields of some keys, by key, as plain values."""
    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(fields))
    found: dict[str, dict[str, Any]] = {key: {} for key in keys}
    for field in fields:
        column = data[field]
        values = column.unbind() if isinstance(column, torch.Tensor) else list(column)
        for key, value in zip(keys, values, strict=True):
            found[key][field] = value.tolist() if isinstance(value, torch.Tensor) else value
    return found
