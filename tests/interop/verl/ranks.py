"""The ranks of an actor: verl's worker, dispatch and bridge around a played model."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.worker import Worker
from verl.utils import tensordict_utils as tu

from tests.interop.verl import script

DP_RANKS = [0, 1, 1]
"""Three processes: the last two hold parts of one model and get the same rows; one collects."""


class PlayedActor(Worker):
    """A rank that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        first = DP_RANKS.index(DP_RANKS[self.rank]) == self.rank
        self._register_dispatch_collect_info("actor", DP_RANKS[self.rank], first)
        self._collects = first
        self._calls: list[dict[str, Any]] = []

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: Any) -> Any:
        self._note("compute_log_prob", data)
        rows = [script.forward(row.tolist()) for row in data["input_ids"].unbind()]
        if not self._collects:
            return None
        return tu.get_tensordict(
            {"log_probs": _jagged(r[0] for r in rows), "entropy": _jagged(r[1] for r in rows)},
            non_tensor_dict={"metrics": {"loss": 0.0}},
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: Any) -> Any:
        self._note("update_actor", data)
        if not self._collects:
            return None
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"pg_loss": [0.5], "mfu": 0.1}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def calls(self) -> list[dict[str, Any]]:
        """What this rank was given since the last question."""
        calls, self._calls = self._calls, []
        return calls

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, *others: Any, **options: Any) -> None:
        os.makedirs(path, exist_ok=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, **options: Any) -> None:
        assert os.path.isdir(local_path)

    def _note(self, method: str, data: Any) -> None:
        given: dict[str, Any] = {
            "method": method,
            "settings": {
                name: tu.get(data, name)
                for name in ("temperature", "global_batch_size", "epochs", "calculate_entropy")
            },
            "fields": sorted(data.keys()),
            "rows": [
                {"input_ids": ids.tolist(), "uid": uid, "session": int(session)}
                for ids, uid, session in zip(
                    data["input_ids"].unbind(), data["uid"], data["session_id"], strict=True
                )
            ],
        }
        if "advantages" in data:
            given["advantages"] = [row.tolist() for row in data["advantages"].unbind()]
        self._calls.append(given)


def _jagged(rows: Any) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=torch.float32) for row in rows], layout=torch.jagged
    )


def start() -> Any:
    """verl's worker group of these ranks."""
    import ray
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
    )

    pool = RayResourcePool([len(DP_RANKS)], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(PlayedActor))
    )
