"""reasoning-gym's scorers, inside a judge's process, with nothing of an answer evaluated as Python.

Some of its scorers pass what the model wrote to `eval`, or to sympy's `parse_expr`, which evaluates
too. Here `eval` is replaced by the reading of literals, and `parse_expr` only sees arithmetic. A
scorer of another release that evaluates in a place not known here is refused.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import ModuleType
from typing import Any, Final

from agentloop.datasets.plain import unmarked

_LITERALS: Final = frozenset(
    "binary_matrix n_queens number_sorting spiral_matrix string_insertion".split()
)
"""Modules whose `eval` is of an answer that may be a list: literals are all they need."""

_ARITHMETIC: Final = frozenset(
    "countdown intermediate_integration polynomial_multiplication puzzle24 "
    "simple_integration".split()
)
"""Modules that give an answer to sympy."""

_OWN_TEXT: Final = frozenset(
    "basic_arithmetic bitwise_arithmetic codeio propositional_logic".split()
)
"""Modules that evaluate text of their own making, or have a harmless function of that name."""

_EVALUATES: Final = frozenset("eval exec compile".split())
_EVALUATES_ANYWHERE: Final = frozenset("parse_expr sympify".split())
"""Calls that are not safe for what a model wrote; the second kind as attributes too."""

# Not Integral: it would be a right answer to every task of integration.
_FUNCTIONS: Final = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs "
    "pi Rational".split()
)
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<name>[A-Za-z]+\d*)|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|\*\*|[-+*/^(),!])\s*"
)
_ARITHMETIC_CHARS: Final = 10_000


def judge(question: Mapping[str, Any]) -> dict[str, Any]:
    """`score`: what the task's scorer says to `answer`, for the entry that was asked."""
    scorer = _scorer(question["task"], json.dumps(question["config"], sort_keys=True))
    return {"score": float(scorer(question["answer"], unmarked(question["entry"])))}


@cache
def _scorer(task: str, config: str) -> Callable[[Any, Any], Any]:
    gym: Any = importlib.import_module("reasoning_gym")
    made = gym.create_dataset(task, **{**unmarked(json.loads(config)), "seed": 0})
    _guard()
    for owner in type(made).__mro__:
        _refuse_unknown(task, sys.modules[owner.__module__])
    return made.score_answer


@cache
def _guard() -> None:
    """Replace what evaluates, for this process: nothing else is done in it."""
    sympy: Any = importlib.import_module("sympy")
    sympy.parse_expr = _arithmetic_only(sympy.parse_expr)
    for name, module in list(sys.modules.items()):
        last = name.rpartition(".")[2]
        if not name.startswith("reasoning_gym."):
            continue
        if last in _LITERALS:
            vars(module)["eval"] = ast.literal_eval
        elif last in _ARITHMETIC and "parse_expr" in vars(module):
            vars(module)["parse_expr"] = sympy.parse_expr


def _arithmetic_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(parse)
    def checked(text: str, *args: Any, **kwargs: Any) -> Any:
        require_arithmetic(text)
        return parse(text, *args, **kwargs)

    return checked


def require_arithmetic(text: str) -> None:
    """Pass numbers, operators, parentheses, variables and known functions, and nothing else.

    Raises:
        ValueError: something else is in it: a name that is no variable, an attribute, a string.
    """
    if len(text) > _ARITHMETIC_CHARS:
        raise ValueError(f"{len(text)} characters are no answer")
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        name = token["name"] if token else None
        if token is None or (
            name and name.rstrip("0123456789") not in _FUNCTIONS and not _variable(name)
        ):
            raise ValueError(f"{text[position : position + 20]!r} is no arithmetic")
        position = token.end()


def _variable(name: str) -> bool:
    return len(name.rstrip("0123456789")) == 1


def _refuse_unknown(task: str, module: ModuleType) -> None:
    last = module.__name__.rpartition(".")[2]
    if last in _LITERALS | _ARITHMETIC | _OWN_TEXT or not module.__name__.startswith(
        "reasoning_gym"
    ):
        return
    for found in evaluating(inspect.getsource(module)):
        raise ValueError(
            f"the scorer of {task!r} calls {found}, maybe on the answer; this release of "
            f"reasoning-gym is not known here"
        )


def evaluating(source: str) -> list[str]:
    """The calls in a source that may evaluate text, as they are written."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _evaluates(ast.unparse(node.func))
    ]


def _evaluates(called: str) -> bool:
    return called in _EVALUATES or called.rpartition(".")[2] in _EVALUATES_ANYWHERE
