"""From scores to advantages: by groups from tags alone, or per token from values.

Owns which trajectories are one session, the estimators, and the statistics of a batch. A scalar
advantage counts on supervised tokens only; `per_token` spreads it. Nothing here fetches a value:
workers call `gae` with what they fetched.

    result = advantages(selection.groups, AdvantageConfig(estimator="grpo"))
    result.values    # one per trajectory, in the order of selection.trajectories
"""

from __future__ import annotations

from trainer.advantage.batch import Advantages, advantages
from trainer.advantage.config import AdvantageConfig
from trainer.advantage.estimators import ESTIMATORS
from trainer.advantage.gae import gae, normalized, per_token, session_gae
from trainer.advantage.sessions import Sessions, cluster
from trainer.advantage.statistics import batch_statistics

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "Advantages",
    "Sessions",
    "advantages",
    "batch_statistics",
    "cluster",
    "gae",
    "normalized",
    "per_token",
    "session_gae",
]
