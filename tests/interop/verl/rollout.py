"""verl's agent-loop worker and manager for V1, with a played agent loop and reward."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from tests.interop.verl import script

_gate: asyncio.Event | None = None
"""While it is closed, all sessions but the first of the prompt `_held` wait before they speak."""
_held: int | None = None


@register("played")
class PlayedLoop(AgentLoopBase):
    """An agent loop that says what the script says."""

    def __init__(self, trainer_config: Any, **others: Any) -> None:
        self.config = trainer_config.config

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        number, which, step = int(kwargs["index"]), kwargs["session_id"], kwargs["global_steps"]
        if number == _held and which > 0:
            assert _gate is not None
            await _gate.wait()
        said = script.session(number, which)
        if said is None:
            raise RuntimeError(f"session {which} of prompt {number} fails, as it is told to")
        outputs, _ = said
        return [
            AgentLoopOutput(
                prompt_ids=output.prompt_ids,
                response_ids=output.response_ids,
                response_mask=output.mask,
                response_logprobs=output.log_probs,
                routed_experts=output.experts,
                num_turns=2,
                metrics={},
                extra_fields=dict(script.versions(number, step)),
            )
            for output in outputs
        ]


class _Method:
    """Called as a Ray actor's method is, but in this process."""

    async def remote(self, data: Any) -> dict[str, Any]:
        fields = data.non_tensor_batch
        said = script.session(int(fields["index"][0]), int(fields["session_id"][0]))
        assert said is not None
        assert len(data) == len(said[0])
        return {"reward_score": said[1], "reward_extra_info": {"acc": said[1]}}


class PlayedReward:
    """The handle of a reward worker: the score of a session, by the script."""

    compute_score = _Method()


class PlayedWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker without what its constructor loads: tokenizer, model settings, tools."""

    def __init__(self) -> None:
        self.config = None
        self.llm_client = None
        self.teacher_client = None
        self.reward_loop_worker_handles = None
        self.dataset_cls = None
        self.tokenizer = None
        self.processor = None
        self.hf_model_type = None
        self.mm_processor_kwargs = {}
        self.distillation_enabled = False
        self.tools = []
        tq.init()
        self.background_tasks: set[asyncio.Task[Any]] = set()

    async def configure(self, config: Any, scores: bool) -> None:
        """Work for this trainer from now on, and score each session or leave that to it."""
        self.config = config
        self.reward_loop_worker_handles = [PlayedReward()] if scores else None

    async def hold(self, number: int | None) -> None:
        """From now on, sessions of this prompt wait after the first; None lets all go on."""
        global _gate, _held
        if _gate is not None:
            _gate.set()
        _gate, _held = asyncio.Event(), number

    async def abandon(self) -> int:
        """Drop all prompts in work, as a worker that dies does; returns how many there were."""
        tasks = list(self.background_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)


class PlayedManager(AgentLoopManagerTQ):
    """verl's manager over one worker, an actor with its own process, that is there already."""

    def __init__(self) -> None:
        self.worker = ray.remote(PlayedWorker).options(num_cpus=0).remote()
        self.agent_loop_workers = [self.worker]

    def configure(self, config: Any, *, scores: bool) -> None:
        """Work for this trainer from now on."""
        ray.get(self.worker.configure.remote(config, scores), timeout=120)
