"""Who shows how sums are done: by the calculator, or from knowing the result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from agentloop.engines.demonstrator import Demonstrator
from agentloop.engines.types import EngineError, Request
from agentloop.quickstart.tokenizer import ANSWER, ANSWER_END
from agentloop.tools.calculator import compute
from agentloop.tools.parse import CLOSE, OPEN

if TYPE_CHECKING:
    from agentloop.loops.chat import ChatTokenizer

TOOL: Final = "calculator"


class SumDemonstrator(Demonstrator):
    """Answers questions of reasoning-gym's `chain_sum`, always truly.

    It calls the calculator and gives its result as the answer. A share of the sessions is answered
    at once instead: true answers, which a policy can only guess at.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, seed: int = 0, direct_share: float = 0.0
    ) -> None:
        """`direct_share` of the sessions, drawn by the seed, are answered without the tool."""
        super().__init__(tokenizer, seed=seed)
        if not 0.0 <= direct_share <= 1.0:
            raise ValueError(f"direct_share is a share from 0 to 1, not {direct_share}")
        self._direct_share = direct_share

    def answer(self, request: Request) -> str:
        last: dict[str, Any] = dict(request.messages[-1]) if request.messages else {}
        if last.get("role") == "tool":
            return _answered(str(last["content"]))
        expression = expression_of(str(last.get("content", "")))
        if self.chance(request, "direct") < self._direct_share:
            return _answered(str(compute(expression)))
        call = {"name": TOOL, "arguments": {"expression": expression}}
        return f"{OPEN}{json.dumps(call)}{CLOSE}"


def expression_of(question: str) -> str:
    """The sum in a question.

    Example: expression_of("State the final answer to …: 4 + 37 =") == "4 + 37".

    Raises:
        EngineError: it is none of `chain_sum`.
    """
    _, colon, rest = question.rpartition(":")
    expression, equals, nothing = rest.partition("=")
    if not colon or not equals or nothing.strip():
        raise EngineError(f"no question of chain_sum: {question!r:.200}")
    return expression.strip()


def _answered(result: str) -> str:
    return f"{ANSWER}{result}{ANSWER_END}"
