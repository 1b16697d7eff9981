"""math-verify's comparison of two texts, inside a judge's process.

Its own time limits are signal handlers: they work in a main thread only, and no handler runs while
C code multiplies large numbers. They are off here; the process is killed instead.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from typing import Any, Final

_MATH_MARKS: Final = re.compile(r"\$|\\boxed|\\\(|\\\[")

# No types are shipped, and what it returns are expressions that nobody here looks into.
_library: Any = importlib.import_module("math_verify")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LATEX: Final[Any] = _library.LatexExtractionConfig()
_EXPRESSION: Final[Any] = _library.ExprExtractionConfig()


def judge(question: Mapping[str, Any]) -> dict[str, Any]:
    """`score` 1.0 if `response` ends in what `truth` says, else 0.0; `answer`: what it ends in."""
    truth = _parsed(_marked(str(question["truth"])))
    if not truth:
        raise ValueError(f"no expression was found in the right answer {question['truth']!r}")
    said = _parsed(str(question["response"]))
    right = bool(said) and bool(
        _library.verify(truth, said, strict=question["strict"], timeout_seconds=None)
    )
    # The last of a parse is the text itself. Printing an expression may take for ever.
    text = next((part for part in reversed(said) if isinstance(part, str)), None)
    return {"score": float(right), "answer": None if text is None else text[:1000]}


def _marked(truth: str) -> str:
    """LaTeX is only seen between marks, and datasets keep right answers without."""
    return truth if _MATH_MARKS.search(truth) else f"\\boxed{{{truth}}}"


def _parsed(text: str) -> list[Any]:
    return list(_library.parse(text, extraction_config=[_LATEX, _EXPRESSION], parsing_timeout=None))
