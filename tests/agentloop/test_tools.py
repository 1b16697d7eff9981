"""Tools: whatever a call does becomes an observation; functions as tools; the calculator."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.dotted import load
from agentloop.tools.calculator import Calculator, compute
from agentloop.tools.function import from_function
from agentloop.tools.parse import MalformedCall, ToolCall
from agentloop.tools.registry import make_tools
from agentloop.tools.threads import DaemonThreads, OneAtATime, ThreadsBusy
from agentloop.tools.types import Tool, ToolError, cut, observe, schema_of, text_of
from tests.deadline import until


class Does:
    """A tool that does as its function does."""

    description = "?"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    def __init__(self, work: Any, name: str = "does") -> None:
        self.name = name
        self._work = work

    async def __call__(self, arguments: Mapping[str, Any]) -> object:
        result = self._work(**arguments)
        return await result if asyncio.iscoroutine(result) else result


async def told(work: Any, *, timeout_s: float = 5.0, max_chars: int = 200, **arguments: Any) -> str:
    tool = Does(work)
    call = ToolCall("does", arguments)
    return await observe(call, {"does": tool}, timeout_s=timeout_s, max_chars=max_chars)


def raises(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


# -- observe ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (4, "4"),
        (None, "null"),
        ({"é": [1, None]}, '{"é": [1, null]}'),
        ({7}, '"{7}"'),
        ([{"type": "text", "text": "a"}, {"type": "image", "image": 0}], "a\n[image left out]"),
        ([], "[]"),
    ],
)
async def test_a_result_is_told_as_text(result: object, text: str) -> None:
    assert await told(lambda: result) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("no such city"), "error: no such city"),
        (ValueError("bad\nx"), "error: does failed: ValueError: bad\nx"),
        (TimeoutError(), "error: does failed: TimeoutError: "),
        (SystemExit(3), "error: does failed: SystemExit: 3"),
        (asyncio.CancelledError(), "error: does was cancelled"),
    ],
)
async def test_what_goes_wrong_is_told(error: BaseException, text: str) -> None:
    assert await told(raises(error)) == text


async def test_an_error_that_cannot_say_why_is_told_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert await told(raises(Mute())) == "error: does failed: Mute: it does not say why"


async def test_a_result_that_is_no_json_is_told_as_a_failure() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert (await told(lambda: loop)).startswith("error: does failed: ValueError")


async def test_a_slow_tool_is_cancelled_and_told_of() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert await told(slow, timeout_s=0.01) == "error: does took longer than 0.01 s"
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_tool_that_ignores_its_cancellation_keeps_nobody_waiting() -> None:
    go = asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    assert await told(stubborn, timeout_s=0.01) == "error: does took longer than 0.01 s"
    go.set()
    await asyncio.sleep(0)


async def test_cancelling_the_caller_passes_through_and_ends_the_tool() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(told(slow))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)


async def test_unknown_tools_and_unreadable_calls_are_told() -> None:
    tools: dict[str, Tool] = {"b": Does(print, "b"), "a": Does(print, "a")}
    unknown = await observe(ToolCall("c", {}), tools, timeout_s=1, max_chars=200)
    assert unknown == "error: there is no tool 'c'; there are: a, b"
    unread = await observe(MalformedCall("it has no name"), tools, timeout_s=1, max_chars=200)
    assert unread == "error: the call could not be read: it has no name"


@pytest.mark.parametrize("work", [lambda: "x" * 50, raises(ValueError("x" * 50))])
async def test_observations_are_cut(work: Any) -> None:
    text = await told(work, max_chars=30)
    assert text[:30] == cut(text, 30)[:30]
    assert text[30:].startswith("\n[")
    assert text.endswith(" more characters]")


def test_a_text_of_the_limit_is_left_whole() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc\n[1 more characters]"
    assert text_of("x") == "x"


# -- functions -------------------------------------------------------------------------------


def multiply(a: int, b: int = 2) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


async def where() -> str:
    """Say which thread this is."""
    return threading.current_thread().name


def where_blocking() -> str:
    """Say which thread this is."""
    return threading.current_thread().name


def no_docstring(a: int) -> int:
    return a


def untyped(a, b: int):  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: One.
        b: Two.
    """
    return a, b


async def test_a_function_becomes_a_tool_with_its_schema() -> None:
    tool = from_function(multiply)
    assert schema_of(tool) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a"],
            },
        },
    }
    assert await tool({"a": 3}) == 6


@pytest.mark.parametrize("arguments", [{}, {"a": 1, "c": 2}, {"x": 1}])
async def test_wrong_arguments_are_told_with_the_right_ones(arguments: dict[str, Any]) -> None:
    call = ToolCall("multiply", arguments)
    text = await observe(call, {"multiply": from_function(multiply)}, timeout_s=5, max_chars=500)
    assert text.startswith("error: multiply(a, b): ")


async def test_blocking_functions_run_in_a_thread_and_coroutines_do_not() -> None:
    here = threading.current_thread().name
    assert await from_function(where)({}) == here
    assert str(await from_function(where_blocking)({})).startswith("tool-")


@pytest.mark.parametrize("function", [no_docstring, untyped])
def test_a_function_that_says_too_little_is_no_tool(function: Any) -> None:
    with pytest.raises(ValueError, match=f"{function.__name__} cannot be a tool"):
        from_function(function)


async def test_a_blocking_tool_that_hangs_is_told_of_and_left_behind() -> None:
    go = threading.Event()

    def hangs() -> str:
        """Hang."""
        go.wait(30)
        return "late"

    tool = from_function(hangs)
    text = await observe(ToolCall("hangs", {}), {"hangs": tool}, timeout_s=0.02, max_chars=200)
    assert text == "error: hangs took longer than 0.02 s"
    assert await from_function(multiply)({"a": 1}) == 2
    go.set()


# -- threads ---------------------------------------------------------------------------------


async def test_threads_are_used_again_and_no_more_than_the_limit() -> None:
    threads = DaemonThreads(2, name="few")
    gate = threading.Event()
    names = {await threads.submit(where_blocking) for _ in range(20)}
    assert names == {"few-1"}
    held = [threads.submit(gate.wait, 30) for _ in range(2)]
    with pytest.raises(ThreadsBusy, match="2 blocking calls"):
        threads.submit(where_blocking)
    gate.set()
    assert await asyncio.gather(*held) == [True, True]
    assert await threads.submit(where_blocking) in ("few-1", "few-2")
    threads.close()
    with pytest.raises(ThreadsBusy, match="ended"):
        threads.submit(where_blocking)


async def test_a_thread_survives_whatever_its_function_raises() -> None:
    threads = DaemonThreads(1)
    for error, seen in (
        (ValueError("v"), ValueError),
        (SystemExit(1), RuntimeError),
        (StopIteration("s"), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
    ):
        with pytest.raises(seen):
            await threads.submit(raises(error))
    assert await threads.submit(multiply, 2, 3) == 6
    threads.close()


async def test_idle_threads_end() -> None:
    threads = DaemonThreads(4, idle_s=0.01, name="brief")
    await threads.submit(multiply, 1)
    await until(lambda: not any(t.name.startswith("brief") for t in threading.enumerate()))


async def test_functions_of_one_object_never_run_at_the_same_time_and_in_one_thread() -> None:
    """Also if the caller of one has given up: it still runs."""
    runner = OneAtATime()
    gate, order = threading.Event(), []

    def first() -> str:
        gate.wait(30)
        order.append("first")
        return threading.current_thread().name

    async def second() -> None:
        order.append("second")

    def third() -> str:
        order.append("third")
        return threading.current_thread().name

    given_up = asyncio.create_task(runner.run(first))
    await asyncio.sleep(0)
    others = [asyncio.create_task(runner.run(work)) for work in (second, third)]
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert order == []
    gate.set()
    _, name = await asyncio.gather(*others)
    assert order == ["first", "second", "third"]
    assert name == "one-1"
    with pytest.raises(ValueError, match="v"):
        await runner.run(raises(ValueError("v")))
    assert await runner.run(third) == "one-1"
    runner.close()


# -- calculator ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+2", 4), ("-(3 - 5) * 1.5", 3.0), ("7//2%2", 1), ("2**10", 1024), ("1/8", 0.125),
     ("+4", 4), ("  1 +\n 1 ", 2), ("2**-1", 0.5), ("1e3", 1000.0), (".5", 0.5),
     ("9**0.5", 3.0), ("10**100 // 10**98", 100)],
)  # fmt: skip
def test_arithmetic_has_a_value(expression: str, value: float) -> None:
    assert compute(expression) == value
    assert type(compute(expression)) is type(value)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("10**99999", "too large"),
        ("2**-99999999999", "too large"),
        ("1e999", "too large"),
        ("1e308*10", "too large"),
        ("1e200**2", "too large"),
        ("(-8)**0.5", "no real number"),
        ("(-8)**0.5*2", "no real number"),
        ("__import__('os')", "only numbers"),
        ("a+1", "only numbers"),
        ("1,2", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 2", "no arithmetic"),
        ("1+", "no arithmetic"),
        ("", "no arithmetic"),
        ("(" * 90 + ")" * 90, "only numbers|no arithmetic"),
        ("1()", "only numbers"),
        ("1.e", "only numbers|no arithmetic"),
        ("1+" * 200, "longer than"),
        ("007", "no arithmetic"),
        ("1e", "no arithmetic"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason), warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(expression)


@given(st.text("0123456789eE.+-*/%() ", max_size=60))
def test_whatever_is_computed_ends_soon_with_a_number_or_a_refusal(expression: str) -> None:
    try:
        value = compute(expression)
    except ToolError:
        return
    assert len(str(value)) < 1300


async def test_the_calculator_is_a_tool() -> None:
    tools = {"calculator": Calculator()}
    for arguments, text in (
        ({"expression": "6*7"}, "42"),
        ({"expression": 3}, "error: calculator needs the argument `expression`, a string"),
        ({}, "error: calculator needs the argument `expression`, a string"),
    ):
        call = ToolCall("calculator", arguments)
        assert await observe(call, tools, timeout_s=5, max_chars=200) == text


# -- by name ---------------------------------------------------------------------------------


async def test_tools_are_made_of_their_names() -> None:
    tools = make_tools(
        [
            "agentloop.tools.calculator:Calculator",
            f"{__name__}.multiply",
            {"tool": f"{__name__}:Does", "arguments": {"work": len, "name": "length"}},
        ]
    )
    assert [tool.name for tool in tools] == ["calculator", "multiply", "length"]
    assert await tools[1]({"a": 2, "b": 5}) == 10


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("nowhere:x", "cannot be imported"),
        ("agentloop.tools.calculator:Nothing", "has no 'Nothing'"),
        ("calculator", "no dotted name"),
        ("agentloop.tools.calculator:MAX_CHARS", "no tool"),
        ({"name": "x"}, "configured by"),
        ({"tool": "x:y", "more": 1}, "configured by"),
        (f"{__name__}:no_docstring", "cannot be a tool"),
    ],
)
def test_what_names_no_tool_is_refused(entry: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_tools([entry])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named calculator"):
        make_tools(["agentloop.tools.calculator:Calculator"] * 2)


def test_a_dotted_name_leads_into_a_class() -> None:
    assert load("agentloop.tools.calculator:Calculator.name") == "calculator"
