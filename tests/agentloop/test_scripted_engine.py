"""The scripted engine keeps the promises of the Protocol, and of its script."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from agentloop.engines.script import Turn
from agentloop.engines.scripted import ScriptedEngine
from agentloop.engines.types import Completion, Engine, EngineError, Request, Sampling
from agentloop.loops.chat import ChatTokenizer
from agentloop.tiny import tiny_tokenizer

SCRIPT: list[dict[str, Any]] = [
    {"token_ids": [20, 21, 22], "logprobs": [-0.1, -0.2, -0.3]},
    {"token_ids": [23, 24], "finish_reason": "tool_calls", "extra": {"tool_calls": []}},
]


def request(name: str = "a", ids: Any = (10, 11), *, turn: int = 0, **sampling: Any) -> Request:
    timeout_s = sampling.pop("timeout_s", None)
    return Request(name, ids, Sampling(**sampling), turn=turn, timeout_s=timeout_s)


async def under_way(engine: ScriptedEngine, count: int) -> None:
    for _ in range(1000):
        if engine.under_way == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{engine.under_way} requests are under way, not {count}")


async def test_it_is_an_engine_and_answers_turn_by_turn() -> None:
    engine: Engine = ScriptedEngine(SCRIPT, policy_version=3)
    first = await engine.generate(request())
    assert first == Completion(
        [20, 21, 22], [-0.1, -0.2, -0.3], [3, 3, 3], "", "stop", logprob_kind="processed"
    )
    second = await engine.generate(request("b", turn=1))
    assert (second.token_ids, second.finish_reason) == ([23, 24], "tool_calls")
    assert second.extra == {"tool_calls": []}
    assert second.logprobs is not None
    assert all(-2 <= value <= 0 for value in second.logprobs)
    with pytest.raises(EngineError, match="turn 2, and the script has 2"):
        await engine.generate(request("c", turn=2))


async def test_an_answer_is_cut_to_the_tokens_that_are_left() -> None:
    engine = ScriptedEngine(SCRIPT)
    cut = await engine.generate(request(max_tokens=2))
    assert (cut.token_ids, cut.finish_reason, cut.logprobs) == ([20, 21], "length", [-0.1, -0.2])
    whole = await engine.generate(request(max_tokens=3))
    assert (whole.token_ids, whole.finish_reason) == ([20, 21, 22], "stop")


async def test_log_probs_are_left_out_where_nobody_asks_for_them() -> None:
    completion = await ScriptedEngine(SCRIPT).generate(request(logprobs=False))
    assert completion.logprobs is None
    assert completion.logprob_kind is None


async def test_texts_are_tokenized_once_and_end_with_the_end_token() -> None:
    chat = ChatTokenizer(tiny_tokenizer())
    engine = ScriptedEngine(
        [{"text": "so it is"}, {"text": "and on", "finish_reason": "length"}], tokenizer=chat
    )
    first = await engine.generate(request())
    assert first.token_ids == [*chat.encode("so it is"), chat.eos_ids[0]]
    assert first.text == "so it is"
    second = await engine.generate(request("b", turn=1))
    assert second.token_ids == chat.encode("and on")
    cut = await engine.generate(request(max_tokens=1))
    assert cut.text == chat.decode(first.token_ids[:1])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [({"text": "x"}, "needs a tokenizer"), ({"tokens": [1]}, "no turn of a script"),
     ({"token_ids": [1], "logprobs": []}, "0 log-probs for 1")],
)  # fmt: skip
def test_a_script_that_cannot_be_read_is_refused(entry: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ScriptedEngine([entry])
    with pytest.raises(ValueError, match="latency_s"):
        ScriptedEngine([], latency_s=(2.0, 1.0))


async def test_the_same_seed_gives_the_same_answers_faults_and_latencies() -> None:
    async def run(seed: int) -> list[object]:
        engine = ScriptedEngine(
            lambda asked: Turn(token_ids=[asked.turn, 7]), seed=seed, error_rate=0.5,
            latency_s=(0.0, 0.001),
        )  # fmt: skip
        said: list[object] = []
        for i in range(40):
            try:
                said.append(await engine.generate(request(f"r{i}", turn=i)))
            except EngineError:
                said.append("error")
        return said

    first = await run(1)
    assert first == await run(1)
    assert first != await run(2)
    assert 5 < first.count("error") < 35


async def test_latencies_are_drawn_from_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(SCRIPT, latency_s=(0.02, 0.2))
    loop = asyncio.get_running_loop()
    drawn: list[float] = []

    def at_once(delay: float, call: Any, *args: Any) -> Any:
        drawn.append(delay)
        return loop.call_soon(call, *args)

    monkeypatch.setattr(loop, "call_later", at_once)
    for i in range(200):
        await engine.generate(request(f"r{i}"))
    monkeypatch.undo()
    assert min(drawn) >= 0.02
    assert max(drawn) <= 0.2
    assert max(drawn) - min(drawn) > 0.15


async def test_pausing_ends_what_is_under_way_with_what_it_has_and_new_requests_with_nothing() -> (
    None
):
    engine = ScriptedEngine(
        [{"token_ids": [20, 21, 22], "logprobs": [-0.1, -0.2, -0.3], "hold_after": 2}],
        policy_version=1,
    )
    held = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    await engine.pause()
    partial = await held
    assert (partial.token_ids, partial.logprobs, partial.versions, partial.finish_reason) == (
        [20, 21], [-0.1, -0.2], [1, 1], "abort",
    )  # fmt: skip
    nothing = await engine.generate(request("b"))
    assert (nothing.token_ids, nothing.finish_reason) == ([], "abort")
    await engine.update_weights({}, 2)
    await engine.resume()
    rest = await engine.generate(request("a2", (10, 11, 20, 21)))
    assert (rest.token_ids, rest.logprobs, rest.versions, rest.finish_reason) == (
        [22], [-0.3], [2], "stop",
    )  # fmt: skip


async def test_an_answer_is_finished_once_and_begun_anew_after_that() -> None:
    engine = ScriptedEngine([{"token_ids": [20, 21, 22], "hold_after": 1}])
    held = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    await engine.abort("a")
    assert (await held).token_ids == [20]
    rest = await engine.generate(request("b", (10, 11, 20)))
    assert rest.token_ids == [21, 22]
    again = asyncio.create_task(engine.generate(request("c", (10, 11, 20))))
    await under_way(engine, 1)
    await engine.abort("c")
    assert (await again).token_ids == [20], "the rest was taken: this is a new answer"


async def test_aborting_ends_one_request_and_no_other() -> None:
    engine = ScriptedEngine([{"token_ids": [20, 21], "hold_after": 1}])
    tasks = [asyncio.create_task(engine.generate(request(name))) for name in "ab"]
    await under_way(engine, 2)
    await engine.abort("a")
    await engine.abort("nobody")
    assert (await tasks[0]).finish_reason == "abort"
    assert not tasks[1].done()
    await engine.abort("b")
    assert (await tasks[1]).token_ids == [20]


async def test_an_interrupted_answer_has_what_its_time_allowed() -> None:
    engine = ScriptedEngine([{"token_ids": list(range(1000))}], latency_s=(30.0, 30.0))
    task = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    await engine.pause()
    assert len((await task).token_ids) < 500


async def test_tokens_made_before_new_weights_keep_their_version() -> None:
    engine = ScriptedEngine([{"token_ids": [20, 21, 22], "hold_after": 2}], policy_version=5)
    task = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    await engine.update_weights({}, 6)
    await engine.pause()
    assert (await task).versions == [5, 5]
    await engine.resume()
    rest = await engine.generate(request("b", (10, 11, 20, 21)))
    assert rest.versions == [6]
    slow = ScriptedEngine([{"token_ids": [1, 2]}], latency_s=(0.05, 0.05), policy_version=5)
    task = asyncio.create_task(slow.generate(request()))
    await under_way(slow, 1)
    await slow.update_weights({}, 6)
    versions = (await task).versions
    assert versions == sorted(versions)
    assert versions[-1] == 6


async def test_faults_come_when_they_are_asked_for() -> None:
    engine = ScriptedEngine([{"token_ids": [1]}, {"error": "out of memory"}])
    engine.fail_next(2, "gone")
    for _ in range(2):
        with pytest.raises(EngineError, match="gone"):
            await engine.generate(request())
    assert (await engine.generate(request())).token_ids == [1]
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(request(turn=1))
    assert engine.requests == 4
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request())


async def test_a_request_that_takes_longer_than_its_time_fails() -> None:
    engine = ScriptedEngine(SCRIPT, latency_s=(20.0, 20.0))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no answer within 0\.01 s"):
        await engine.generate(request(timeout_s=0.01))
    assert time.monotonic() - began < 10
    held = ScriptedEngine([{"token_ids": [1, 2], "hold_after": 1}])
    with pytest.raises(EngineError, match="no answer"):
        await held.generate(request(timeout_s=0.01))


async def test_an_answer_that_ignores_aborts_comes_whole() -> None:
    engine = ScriptedEngine(
        [{"token_ids": [20, 21], "ignores_abort": True}], latency_s=(0.02, 0.02)
    )
    task = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    await engine.pause()
    assert not task.done()
    assert ((await task).token_ids, task.result().finish_reason) == ([20, 21], "stop")


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    engine = ScriptedEngine(SCRIPT, latency_s=(20.0, 20.0))
    task = asyncio.create_task(engine.generate(request()))
    await under_way(engine, 1)
    with pytest.raises(EngineError, match="under way already"):
        await engine.generate(request())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.under_way == 0


async def test_experts_have_a_row_for_every_token_but_the_last() -> None:
    engine = ScriptedEngine(SCRIPT, experts=(2, 3, 8))
    completion = await engine.generate(request(routed_experts=True))
    assert completion.routed_experts is not None
    assert completion.routed_experts.shape == (2 + 3 - 1, 6)
    assert completion.routed_experts.dtype == np.uint16
    assert completion.routed_experts.max() < 8
    assert (await engine.generate(request())).routed_experts is None
