"""The columns that a pack can have: their type, what pads them, and how rows are cut for them.

A model is given tokens 0 to N - 2 of a row and is to predict tokens 1 to N - 1, so a pack holds
T = N - 1 entries of it: inputs lose their last entry, what belongs to predicted tokens its first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from dataplane.fields import IGNORED, KNOWN_FIELDS


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a pack."""

    name: str
    """Also the name of the field that it is read from, where there is one."""
    dtype: torch.dtype
    pad: float
    """What fills a pack behind its rows, and a pack whose rows do not have it."""
    trim: tuple[int, int] = (1, 0)
    """Entries that a row of the field loses at its head and its tail."""


def _of_fields() -> Mapping[str, Column]:
    """Every field of one number a predicted token, as the table of fields has it."""
    found = {
        name: Column(name, torch.float32, float(field.pad))
        for name, field in KNOWN_FIELDS.items()
        if field.align == "full" and field.dtype == "float32"
    }
    found["input_ids"] = Column("input_ids", torch.int64, 0, trim=(0, 1))
    found["labels"] = Column("labels", torch.int64, IGNORED)
    return MappingProxyType(found)


COLUMNS: Final[Mapping[str, Column]] = _of_fields()
"""Those that are read as they are: one number a token, cut by one entry."""

TEACHER_LOGPROBS: Final = Column("teacher_logprobs", torch.float32, 0.0)
TEACHER_IDS: Final = Column("teacher_ids", torch.int64, 0)
TEACHER_INDICES: Final = Column("teacher_indices", torch.int64, -1)
"""Which of several teachers in the training worker scores a token."""
IS_WEIGHTS: Final = Column("is_weights", torch.float32, 1.0)
"""Made by importance correction; padding has no weight to correct."""

ALL_COLUMNS: Final[Mapping[str, Column]] = MappingProxyType(
    {
        **COLUMNS,
        **{c.name: c for c in (TEACHER_LOGPROBS, TEACHER_IDS, TEACHER_INDICES, IS_WEIGHTS)},
    }
)
"""Every column that a pack can have, with what pads it."""
