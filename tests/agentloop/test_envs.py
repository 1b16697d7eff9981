"""Environments as TRL has them: accepted as they are, one per session, closed at the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from agentloop.engines.scripted import ScriptedEngine
from agentloop.envs.loop import EnvLoop
from agentloop.loops.chat import ChatTokenizer
from agentloop.loops.loop import Session
from agentloop.loops.session_run import run_session
from agentloop.tiny import tiny_tokenizer
from agentloop.tools.calculator import Calculator
from agentloop.trajectory.state import RolloutState, Status
from tests.deadline import until


class Counter:
    """As in TRL's guide: counts, and scores itself."""

    made: ClassVar[list[Counter]] = []

    def __init__(self) -> None:
        self.closed = 0
        self.threads: set[str] = {threading.current_thread().name}
        Counter.made.append(self)

    def reset(self, target: int, **row: Any) -> str | None:
        self.counter = 0
        self.target = target
        self.row = row
        self.threads.add(threading.current_thread().name)
        return f" Count to {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: How far.

        Returns:
            The counter.
        """
        self.threads.add(threading.current_thread().name)
        if step < 0:
            raise ValueError("steps are positive")
        self.counter += step
        return self.counter

    async def decrement(self, step: int) -> int:
        """
        Decrement the counter.

        Args:
            step: How far.
        """
        self.counter -= step
        return self.counter

    @classmethod
    def rules(cls) -> str:
        """Tell the rules."""
        return "count"

    @property
    def costly(self) -> str:
        raise AssertionError("a property is no tool, and is not touched")

    def close(self) -> None:
        self.closed += 1

    def _hidden(self) -> None: ...


class Plain:
    """The least that an environment is."""

    def reset(self, **row: Any) -> None:
        self.reward: Any = 0.25


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(tiny_tokenizer())


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Counter.made.clear()


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def session(chat: ChatTokenizer, *texts: str) -> Session:
    return Session(ScriptedEngine([{"text": text} for text in texts], tokenizer=chat), chat)


def state(**row: Any) -> RolloutState:
    return RolloutState([{"role": "user", "content": "Play."}], uid="u", row=row)


async def run(loop: EnvLoop, state: RolloutState, session: Session) -> RolloutState:
    (done,) = await run_session(loop, state, session, None, timeout_s=30)
    return done


async def test_its_methods_are_tools_and_its_reward_the_score(chat: ChatTokenizer) -> None:
    texts = (call("increment", step=2), call("increment", step=1) + call("rules"), "done")
    done = await run(EnvLoop(Counter), state(target=3, level="easy"), session(chat, *texts))
    assert done.status is Status.COMPLETED, done.error_msg
    assert done.reward == {"score": 1.0}
    assert [m["content"] for m in done.dialogue if m["role"] == "tool"] == ["2", "3", "count"]
    (made,) = Counter.made
    assert made.row == {"level": "easy", "prompt": done.messages}
    assert made.closed == 1
    assert len(made.threads) == 1, "one thread, for what belongs to a thread"
    assert threading.main_thread().name not in made.threads


async def test_the_tools_are_those_that_are_meant(chat: ChatTokenizer) -> None:
    loop = EnvLoop(Counter, [Calculator()])
    async with loop.toolbox(state(target=1)) as box:
        assert sorted(box.tools) == ["calculator", "decrement", "increment", "rules"]
        assert [schema["function"]["name"] for schema in box.schemas] == list(box.tools)
        assert box.schemas[2]["function"]["parameters"]["properties"]["step"]["type"] == "integer"
        assert await box.tools["decrement"]({"step": 3}) == -3


async def test_what_it_says_first_stands_behind_the_prompt(chat: ChatTokenizer) -> None:
    done = await run(EnvLoop(Counter), state(target=3), session(chat, "no"))
    assert done.dialogue[0] == {"role": "user", "content": "Play. Count to 3."}
    assert done.messages == [{"role": "user", "content": "Play."}], "the prompt stays the prompt"
    assert "Play. Count to 3." in chat.decode(done.prompt_ids or [])
    assert done.reward == {"score": 0.0}


async def test_a_prompt_may_come_from_the_environment_alone(chat: ChatTokenizer) -> None:
    begun = state(target=3)
    begun.messages = []
    done = await run(EnvLoop(Counter), begun, session(chat, "no"))
    assert done.dialogue[0] == {"role": "user", "content": " Count to 3."}


async def test_a_prompt_in_parts_gets_one_more(chat: ChatTokenizer) -> None:
    begun = state(target=3)
    begun.messages = [{"role": "user", "content": [{"type": "text", "text": "Play."}]}]
    done = await run(EnvLoop(Counter), begun, session(chat, "no"))
    assert done.dialogue[0]["content"][1] == {"type": "text", "text": " Count to 3."}


async def test_what_a_method_raises_is_told(chat: ChatTokenizer) -> None:
    texts = (call("increment", step=-1), call("increment", far=1), "hm")
    done = await run(EnvLoop(Counter), state(target=3), session(chat, *texts))
    told = [m["content"] for m in done.dialogue if m["role"] == "tool"]
    assert told[0] == "error: increment failed: ValueError: steps are positive"
    assert told[1].startswith("error: increment(step): ")
    assert done.status is Status.COMPLETED


async def test_every_session_has_its_own(chat: ChatTokenizer) -> None:
    loop = EnvLoop(Counter)
    done = await asyncio.gather(
        *(
            run(loop, state(target=2), session(chat, *[call("increment", step=1)] * i, "done"))
            for i in range(4)
        )
    )
    assert [each.reward for each in done] == [{"score": float(i == 2)} for i in range(4)]
    assert [made.closed for made in Counter.made] == [1] * 4


async def test_a_plain_one_has_a_reward_and_no_tools(chat: ChatTokenizer) -> None:
    done = await run(EnvLoop(f"{__name__}:Plain"), state(), session(chat, "hello"))
    assert done.reward == {"score": 0.25}
    assert done.dialogue[0]["content"] == "Play."


async def test_one_that_is_done_ends_its_session(chat: ChatTokenizer) -> None:
    class Ends(Counter):
        done = False

        def finish(self) -> str:
            """End it."""
            self.done = True
            return "over"

    texts = (call("finish"), "never said")
    done = await run(EnvLoop(Ends), state(target=0), session(chat, *texts))
    assert (done.finish_reason, done.num_turns, done.reward) == ("stop", 1, {"score": 1.0})
    assert done.dialogue[-1]["content"] == "over"
    assert done.generated is None, "what nobody reads is no token"


async def test_rows_choose_among_several(chat: ChatTokenizer) -> None:
    loop = EnvLoop({"count": Counter, "plain": f"{__name__}:Plain"})
    counted = await run(loop, state(environment="count", target=0), session(chat, "x"))
    plain = await run(loop, state(environment="plain"), session(chat, "x"))
    assert (counted.reward, plain.reward) == ({"score": 1.0}, {"score": 0.25})
    assert "environment" not in Counter.made[0].row
    lost = await run(loop, state(environment="chess"), session(chat, "x"))
    assert lost.status is Status.FAILED
    assert "no environment 'chess'; there are count, plain" in (lost.error_msg or "")


async def test_an_interrupted_session_begins_anew_in_an_environment_of_its_own(
    chat: ChatTokenizer,
) -> None:
    loop = EnvLoop(Counter)
    begun = state(target=1)
    begun.append_generated([5, 6], [-0.1, -0.1], [0, 0])
    done = await run(loop, begun, session(chat, call("increment", step=1), "done"))
    assert done.reward == {"score": 1.0}
    assert (done.response_ids or [])[:2] != [5, 6]


# -- what goes wrong -------------------------------------------------------------------------


class Fails(Counter):
    """Fails where it is told to."""

    at = ""

    def __init__(self) -> None:
        super().__init__()
        self._maybe("made")

    def _maybe(self, where: str) -> None:
        if self.at == where:
            raise OSError(f"not {where}")

    def reset(self, **row: Any) -> str | None:
        self._maybe("reset")
        return super().reset(**row)

    def get_reward(self) -> float:
        self._maybe("rewarded")
        return super().get_reward()

    def close(self) -> None:
        super().close()
        self._maybe("closed")


@pytest.mark.parametrize(
    ("where", "reason", "closed"),
    [("made", "could not be made: OSError: not made", 0),
     ("reset", "could not reset: OSError: not reset", 1),
     ("rewarded", "could not say its reward: OSError: not rewarded", 1)],
)  # fmt: skip
async def test_one_that_fails_fails_its_session_and_is_closed(
    chat: ChatTokenizer, where: str, reason: str, closed: int
) -> None:
    failing = type("Failing", (Fails,), {"at": where})
    done = await run(EnvLoop(failing), state(target=1), session(chat, "x"))
    assert done.status is Status.FAILED
    assert done.failure == "environment"
    assert reason in (done.error_msg or "")
    assert [made.closed for made in Counter.made] == [closed]


async def test_one_that_cannot_be_closed_is_logged_and_fails_nothing(
    chat: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    failing = type("Failing", (Fails,), {"at": "closed"})
    done = await run(EnvLoop(failing), state(target=0), session(chat, "x"))
    assert done.status is Status.COMPLETED
    assert "Failing could not close: OSError" in caplog.text


@pytest.mark.parametrize("reward", ["much", float("nan"), [1]])
async def test_a_reward_that_is_no_number_fails_the_session(
    chat: ChatTokenizer, reward: Any
) -> None:
    class Odd(Plain):
        def reset(self, **row: Any) -> None:
            self.reward = reward

    done = await run(EnvLoop(Odd), state(), session(chat, "x"))
    assert done.status is Status.FAILED
    assert "the reward of" in (done.error_msg or "")


async def test_one_without_reset_or_with_a_method_that_is_no_tool_is_refused(
    chat: ChatTokenizer,
) -> None:
    class Mute(Plain):
        def move(self, to):  # type: ignore[no-untyped-def]
            return to

    for factory, reason in ((dict, "has no method `reset`"), (Mute, "move cannot be a tool")):
        done = await run(EnvLoop(factory), state(), session(chat, "x"))
        assert done.status is Status.FAILED
        assert reason in (done.error_msg or "")
    with pytest.raises(ValueError, match="cannot be called"):
        EnvLoop("agentloop.tools.calculator:MAX_CHARS")


async def test_one_that_hangs_fails_its_session_in_time_and_is_closed_later(
    chat: ChatTokenizer,
) -> None:
    go, closed = threading.Event(), threading.Event()

    class Hangs(Plain):
        def __init__(self) -> None:
            go.wait(30)

        def close(self) -> None:
            closed.set()

    done = await run(EnvLoop(Hangs, environment_timeout_s=0.02), state(), session(chat, "x"))
    assert done.status is Status.FAILED
    assert "could not be made: within 0.02 s" in (done.error_msg or "")
    go.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_a_method_that_hangs_is_told_of_and_the_next_waits_for_it(
    chat: ChatTokenizer,
) -> None:
    go = threading.Event()

    class Slow(Plain):
        def think(self) -> str:
            """Think."""
            go.wait(30)
            return "thought"

        def act(self) -> str:
            """Act."""
            return "acted"

    texts = (call("think"), call("act"), "x")
    loop = EnvLoop(Slow, tool_timeout_s=0.02, environment_timeout_s=0.05)
    done = await run(loop, state(), session(chat, *texts))
    told = [m["content"] for m in done.dialogue if m["role"] == "tool"]
    assert told == ["error: think took longer than 0.02 s", "error: act took longer than 0.02 s"]
    go.set()


async def test_cancelling_a_session_closes_its_environment(chat: ChatTokenizer) -> None:
    engine = ScriptedEngine([{"token_ids": [5, 6], "hold_after": 0}])
    task = asyncio.create_task(run(EnvLoop(Counter), state(target=1), Session(engine, chat)))
    await until(lambda: engine.under_way, "the engine is asked")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [made.closed for made in Counter.made] == [1]
