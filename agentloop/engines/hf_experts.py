"""Which experts the routers of a model chose. Owns the hooks on routers.

transformers names the class of a model's routers where it records router logits; what a router
returns beside them are the experts that it chose, which need not be the largest logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentloop.engines.types import EngineError

if TYPE_CHECKING:
    import torch

MAX_EXPERTS = 1 << 16


class ExpertRecorder:
    """Records the experts of the latest forward pass, while it is switched on."""

    def __init__(self, model: Any) -> None:
        self.active = False
        self._chosen: list[torch.Tensor] = []  # per router: [B * S, topk]
        self._routers = _routers_of(model)
        for router in self._routers:
            router.register_forward_hook(self._record)

    @property
    def available(self) -> bool:
        """Whether the model has routers that say what they chose."""
        return bool(self._routers)

    def _record(self, router: Any, args: Any, output: Any) -> None:
        if self.active:
            self._chosen.append(_indices_in(output))

    def take(self, batch: int) -> npt.NDArray[np.uint16]:  # [B, S, layers * topk]
        """What the pass since the last `take` chose."""
        import torch

        chosen, self._chosen = self._chosen, []
        if len(chosen) != len(self._routers):
            raise EngineError(f"{len(chosen)} of {len(self._routers)} routers reported experts")
        joined = torch.cat([part.view(batch, -1, part.shape[-1]) for part in chosen], dim=-1)
        experts: npt.NDArray[np.int64] = joined.to(torch.int64).cpu().numpy()
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < MAX_EXPERTS:
            raise EngineError(f"an expert beyond {MAX_EXPERTS - 1} does not fit the field")
        return experts.astype(np.uint16)

    def forget(self) -> None:
        """Drop what a pass that failed has left."""
        self._chosen = []


def _routers_of(model: Any) -> list[Any]:
    recorded: Any = {}
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" in recorded:
            break
    else:
        return []
    kind = getattr(recorded["router_logits"], "target_class", recorded["router_logits"])
    return [module for module in model.modules() if isinstance(module, kind)]


def _indices_in(output: Any) -> torch.Tensor:
    import torch

    parts: Any = output
    for part in parts if isinstance(output, tuple) else (output,):
        if isinstance(part, torch.Tensor) and not part.is_floating_point():
            return part
    raise EngineError(
        "the routers of this model return logits without the experts chosen; "
        "run it without routed_experts"
    )
