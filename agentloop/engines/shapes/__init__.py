"""How inference servers are asked and what their replies mean, one file per server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentloop.engines.shapes import sglang, transformers, vllm
from agentloop.engines.shapes.reply import Flavour, Shape

SHAPES: Final[Mapping[Flavour, Shape]] = MappingProxyType(
    {
        shape.flavour: shape
        for shape in (
            vllm.GENERATE,
            vllm.COMPLETIONS,
            vllm.CHAT,
            sglang.GENERATE,
            sglang.CHAT,
            transformers.CHAT,
        )
    }
)
"""Every endpoint that can be asked, by flavour."""
