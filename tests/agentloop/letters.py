"""A tokenizer of one token a letter, for datasets: real chat tokenizers are tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class Letters:
    """Counts what it was asked, and writes roles, contents and tools one after the other."""

    def __init__(self) -> None:
        self.asked = 0

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        self.asked += 1
        text = "".join(f"{m['role']}:{m.get('content')};" for m in messages)
        return [ord(letter) for letter in text + (json.dumps(list(tools)) if tools else "")]
