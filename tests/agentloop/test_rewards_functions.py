"""Rule functions: both forms, blocking or not, and what happens when they misbehave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from agentloop.dotted import load
from agentloop.rewards import FunctionReward, RewardError
from agentloop.trajectory.state import RolloutState
from tests.agentloop.judged import judged
from tests.deadline import until


def exact(state: RolloutState) -> float:
    return float(state.response == state.row["answer"])


async def exact_later(state: RolloutState) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": exact(state), "seen": state.response}


def by_length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(c[0]["content"])) for c in completions]


class Holder:
    @staticmethod
    def rule(state: RolloutState) -> float:
        return 0.5


not_callable = 3

ME = __name__


async def scores(reward: FunctionReward, *states: RolloutState) -> list[float]:
    return [said["score"] for said in await reward.score(states)]


async def test_one_trajectory_at_a_time_in_order() -> None:
    states = [judged(str(n), answer="3") for n in range(6)]
    assert await scores(FunctionReward(exact), *states) == [0, 0, 0, 1, 0, 0]
    assert await FunctionReward(exact_later).score(states[3:4]) == [{"score": 1.0, "seen": "3"}]


async def test_functions_are_found_by_dotted_path() -> None:
    for path in (f"{ME}:exact", f"{ME}.exact"):
        assert await scores(FunctionReward(path), judged("4", answer="4")) == [1.0]
    assert await scores(FunctionReward(f"{ME}:Holder.rule"), judged("4")) == [0.5]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact", "is no dotted name"), (":x", "is no dotted name"),
        (f"{ME}:nothing", "has no 'nothing'"),
        ("no.such.module:f", "cannot be imported"), (f"{ME}:Holder.other", "has no 'other'"),
        ("", "is no dotted name"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(path)


def test_what_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="is a int, not a function"):
        FunctionReward(f"{ME}:not_callable")


async def test_the_batch_form_gets_what_trl_gives() -> None:
    got: dict[str, Any] = {}

    def rule(prompts: Any, completions: Any, answer: Any, **rest: Any) -> list[float]:
        got.update(prompts=prompts, completions=completions, answer=answer, **rest)
        return [0.0, 1.0]

    first, second = judged("3", answer="4", level=1), judged("4", answer="4", prompts="mine")
    assert await scores(FunctionReward(rule), first, second) == [0.0, 1.0]
    assert got == {
        "prompts": [[{"role": "user", "content": "What is 2 + 2?"}]] * 2,
        "completions": [[{"role": "assistant", "content": t}] for t in ("3", "4")],
        "completion_ids": [[1, 2, 3]] * 2,
        "answer": ["4", "4"],
        "level": [1, None],
    }


async def test_the_batch_form_gets_plain_text_on_request() -> None:
    def rule(prompts: list[str], completions: list[str]) -> list[float]:
        assert prompts == ["What is 2 + 2?"]
        assert completions == ["abcd"]
        return [float(len(completions[0]))]

    assert await scores(FunctionReward(rule, texts="text"), judged("abcd", other=1)) == [4.0]


async def test_a_function_that_changes_its_arguments_changes_no_trajectory() -> None:
    def rude(prompts: Any, completions: Any, completion_ids: Any) -> list[float]:
        prompts[0][0]["role"] = "nobody"
        completion_ids[0].clear()
        return [1.0]

    state = judged("4")
    await FunctionReward(rude).score([state])
    assert state.messages[0]["role"] == "user"
    assert state.response_ids == [1, 2, 3]


async def test_a_column_that_no_row_has_is_named() -> None:
    def rule(completions: Any, solution: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match="takes the columns solution, and the rows have answer"):
        await FunctionReward(rule).score([judged("4", answer="4")])


async def test_a_coroutine_function_may_be_of_the_batch_form() -> None:
    async def rule(prompts: Any, completions: Any, **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.25 for _ in completions]

    assert await scores(FunctionReward(rule), judged("a"), judged("b")) == [0.25, 0.25]


async def test_an_object_with_an_async_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, state: RolloutState) -> float:
            return 0.75

    assert await scores(FunctionReward(Judge()), judged("a")) == [0.75]
    assert await scores(FunctionReward(lambda state: Judge()(state)), judged("a")) == [0.75]


async def test_none_is_an_error_or_the_score_it_is_declared_to_be() -> None:
    def one(state: RolloutState) -> float | None:
        return None if state.response == "b" else 1.0

    def batch(completions: Any, **_: Any) -> list[float | None]:
        return [None if c[0]["content"] == "b" else 1.0 for c in completions]

    for rule in (one, batch):
        with pytest.raises(RewardError, match="NoneType"):
            await FunctionReward(rule).score([judged("a"), judged("b")])
        declared = FunctionReward(rule, none_score=0.0)
        assert await scores(declared, judged("a"), judged("b")) == [1.0, 0.0]


async def test_blocking_functions_do_not_hold_up_the_event_loop() -> None:
    release = threading.Event()
    reward = FunctionReward(lambda state: float(release.wait(30)), timeout_s=30)
    scoring = asyncio.create_task(scores(reward, judged("a"), judged("b")))
    await asyncio.sleep(0)
    assert not scoring.done()
    release.set()
    assert await scoring == [1.0, 1.0]


async def test_at_most_so_many_blocking_calls_run_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0
    both = threading.Barrier(2)

    def rule(state: RolloutState) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(30)
        with lock:
            running -= 1
        return 1.0

    assert await scores(FunctionReward(rule, threads=2), *[judged("a")] * 8) == [1.0] * 8
    assert most == 2


async def test_a_function_that_hangs_is_given_up_and_others_still_run() -> None:
    release = threading.Event()
    try:
        reward = FunctionReward(
            lambda state: float(state.response == "ok" or release.wait(60)),
            timeout_s=0.05,
            threads=1,
        )
        with pytest.raises(RewardError, match=r"did not answer within 0\.05 s"):
            await reward.score([judged("hang")])
        assert await scores(reward, judged("ok")) == [1.0]
    finally:
        release.set()


async def test_a_function_that_always_hangs_is_no_longer_called() -> None:
    release = threading.Event()
    calls = 0

    def rule(state: RolloutState) -> float:
        nonlocal calls
        calls += 1
        release.wait(60)
        return 1.0

    reward = FunctionReward(rule, timeout_s=0.01, threads=4)
    try:
        for _ in range(16):
            with pytest.raises(RewardError, match="did not answer"):
                await reward.score([judged("a")])
        with pytest.raises(RewardError, match="not called again: 16 calls"):
            await reward.score([judged("a")])
        assert calls == 16
    finally:
        release.set()
    await until(lambda: reward._threads.overrunning == 0)  # they come back, and it is called again
    assert await scores(reward, judged("a")) == [1.0]


async def test_an_async_function_that_hangs_is_given_up() -> None:
    async def rule(state: RolloutState) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match="did not answer"):
        await FunctionReward(rule, timeout_s=0.05).score([judged("a")])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), StopIteration(), KeyError("x")])
@pytest.mark.parametrize("kind", ["blocking", "async"])
async def test_what_a_function_raises_ends_nothing_but_its_call(
    error: BaseException, kind: str
) -> None:
    def blocking(state: RolloutState) -> float:
        raise error

    async def later(state: RolloutState) -> float:
        raise error

    reward = FunctionReward(blocking if kind == "blocking" else later)
    with pytest.raises(RewardError, match=r"blocking|later"):
        await reward.score([judged("a")])


async def test_a_batch_of_another_length_is_no_reward() -> None:
    with pytest.raises(RewardError, match=r"2 rewards were due.*got 1"):
        await FunctionReward(lambda completions: [1.0]).score([judged("a"), judged("b")])


def test_a_hanging_function_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import asyncio, threading\n"
        "from agentloop.rewards import FunctionReward, RewardError\n"
        "from agentloop.trajectory.state import RolloutState\n"
        "hang = FunctionReward(lambda state: threading.Event().wait(), timeout_s=0.05)\n"
        "try: asyncio.run(hang.score([RolloutState(messages=[])]))\n"
        "except RewardError: print('given up')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "given up\n"


def test_importing_rewards_and_datasets_loads_no_heavy_library() -> None:
    code = (
        "import sys, agentloop.rewards, agentloop.datasets as d\n"
        "from agentloop.rewards import FunctionReward, WeightedReward, make_reward\n"
        "from agentloop.datasets import make_dataset, PromptRow, Sampler\n"
        "print({'torch','transformers','reasoning_gym','math_verify','sympy','aiohttp','pyarrow'}"
        " & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "set()"
