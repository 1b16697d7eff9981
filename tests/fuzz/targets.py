"""Every target by its name. Whatever decodes bytes from outside this process has one here."""

from __future__ import annotations

import itertools
from typing import Final

from tests.fuzz import checkpoints, codec, journals, outside, requests, wire
from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in itertools.chain(
        wire.TARGETS, codec.TARGETS, journals.TARGETS, checkpoints.TARGETS, outside.TARGETS,
        requests.TARGETS,
    )
}  # fmt: skip
