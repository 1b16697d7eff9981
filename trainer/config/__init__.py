"""Settings of a run: read from one YAML file, checked as a whole, handed to its parts.

Owns names, defaults, short forms and the rules between sections. Settings of parts (`loss`, `plan`,
`advantage`, `replay`, `optimizer`) are those of the parts themselves.
"""

from __future__ import annotations

from trainer.config.errors import ConfigError
from trainer.config.loading import load_settings, settings_from
from trainer.config.masking import looks_secret, masked
from trainer.config.sections import (
    CheckpointSection,
    DebugSection,
    DumpSection,
    EvaluateSection,
    KindSection,
    ModelSection,
    RanksSection,
    ReportSection,
    RolloutSection,
    StopAt,
    TrainSection,
    Until,
    WarmupStage,
)
from trainer.config.settings import RunSettings

__all__ = [
    "CheckpointSection",
    "ConfigError",
    "DebugSection",
    "DumpSection",
    "EvaluateSection",
    "KindSection",
    "ModelSection",
    "RanksSection",
    "ReportSection",
    "RolloutSection",
    "RunSettings",
    "StopAt",
    "TrainSection",
    "Until",
    "WarmupStage",
    "load_settings",
    "looks_secret",
    "masked",
    "settings_from",
]
