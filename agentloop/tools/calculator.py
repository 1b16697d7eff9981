"""A calculator as an example of a tool: arithmetic on numbers, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentloop.tools.types import ToolError

MAX_CHARS: Final = 200
MAX_BITS: Final = 4096
"""Of an integer: what is larger is refused before it is computed."""

# No names, no strings, no attributes: what is left can only be arithmetic, or wrong.
_ALPHABET: Final = re.compile(r"[0-9eE.+\-*/%() ]*")

_operator: Any = operator  # its types are those of any operands, ours are numbers

_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: _operator.add,
    ast.Sub: _operator.sub,
    ast.Mult: _operator.mul,
    ast.Div: _operator.truediv,
    ast.FloorDiv: _operator.floordiv,
    ast.Mod: _operator.mod,
    ast.Pow: _operator.pow,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {
    ast.UAdd: _operator.pos,
    ast.USub: _operator.neg,
}


class Calculator:
    """Evaluates an arithmetic expression."""

    name = "calculator"
    description = "Compute an arithmetic expression with + - * / // % ** and parentheses."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "What to compute, like (3+4)*5."}
        },
        "required": ["expression"],
    }

    async def __call__(self, arguments: Mapping[str, Any]) -> object:
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolError("calculator needs the argument `expression`, a string")
        return str(compute(expression))


def compute(expression: str) -> int | float:
    """The value of an arithmetic expression.

    Raises:
        ToolError: it is no arithmetic, has no value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
    expression = " ".join(expression.split())
    if not _ALPHABET.fullmatch(expression):
        raise ToolError("only numbers, + - * / // % ** and parentheses are understood")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is no arithmetic expression") from None
    try:
        value: Any = _value(tree.body)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    if isinstance(value, complex):
        raise ToolError("the result is no real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        _check_size(node.op, left, right)
        return _BINARY[type(node.op)](left, right)
    raise ToolError("only numbers, + - * / // % ** and parentheses are understood")


def _check_size(op: ast.operator, left: Any, right: Any) -> None:
    if isinstance(left, complex) or isinstance(right, complex):
        raise ToolError("the result is no real number")
    if not isinstance(left, int) or not isinstance(right, int):
        return  # floats have one size
    bits = left.bit_length() + right.bit_length()
    if isinstance(op, ast.Pow):
        bits = left.bit_length() * abs(right)
    if bits > MAX_BITS:
        raise ToolError("the result is too large")
