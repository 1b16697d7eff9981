"""The main program of a judge's process: one question in, one answer out, as JSON.

Started by `processes.py`, which kills it when it takes too long. What it limits itself is for the
case that nobody is left to do so.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final, TypeAlias, cast

Judge: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]

JUDGES: Final = {
    "math_verify": ("agentloop.rewards.math_scorer", "judge"),
    "reasoning_gym": ("agentloop.rewards.gym_scorer", "judge"),
}
"""Judges that a process can be started as, and where they are."""


def main(name: str, memory_bytes: int) -> None:
    """Judge until the other side closes."""
    questions, answers = _channel()
    try:
        module, function = JUDGES[name]
        judge = cast(Judge, getattr(importlib.import_module(module), function))
    except Exception as error:
        _send(answers, {"error": _text(error)})
        return
    _limit(memory_bytes)
    _send(answers, {"ready": True})
    while (question := _receive(questions)) is not None:
        # The kernel ends the process when that much CPU time is used, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, float(question.pop("cpu_s")))
        try:
            answer: Mapping[str, Any] = judge(question)
        except Exception as error:
            answer = {"error": _text(error)}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(answers, answer)


def _channel() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, moved away: libraries print, and read what they should not."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return questions, answers


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _receive(questions: BinaryIO) -> dict[str, Any] | None:
    size = questions.read(4)
    if len(size) < 4:
        return None
    text = questions.read(int.from_bytes(size, "big"))
    return cast(dict[str, Any], json.loads(text))


def _send(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    text = json.dumps(answer).encode()
    answers.write(len(text).to_bytes(4, "big") + text)
    answers.flush()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
