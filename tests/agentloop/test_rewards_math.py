"""math-verify in processes of its own: what it finds equal, and what it cannot hang up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from agentloop.rewards import MathVerifyReward, RewardError
from agentloop.rewards.processes import JudgeProcesses, Overrun
from tests.agentloop.judged import judged
from tests.deadline import until

EQUAL = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5"), ("the answer is 1/2", r"\frac{1}{2}"), ("$x=3$", "3"),
    ("answer: 0.50", "1/2"), (r"\boxed{B}", "B"), ("$[1,2)$", "[1,2)"), ("1,234", "1234"),
    (r"the result is $\sqrt{8}$", r"2\sqrt{2}"), (r"\boxed{10000000000}", "10^{10}"), ("4", "$4$"),
    (r"First 7. Then \boxed{3}", r"\boxed{3}"),
]  # fmt: skip
DIFFERENT = [(r"\boxed{2}", "3"), ("no idea", "3"), ("", "3"), (r"\boxed{3} no, \boxed{4}", "3")]

HANGS = r"\boxed{9^{9^{9^{9}}}}"
"""No signal handler runs while its value is multiplied out."""


async def test_equal_expressions_score_one_and_others_zero() -> None:
    reward = MathVerifyReward(timeout_s=30, processes=1)
    states = [judged(said, answer=truth) for said, truth in [*EQUAL, *DIFFERENT]]
    got = await reward.score(states)
    await reward.close()
    assert [one["score"] for one in got] == [1.0] * len(EQUAL) + [0.0] * len(DIFFERENT)
    assert got[0]["answer"] == r"\frac{1}{2}"
    assert got[len(EQUAL) + 1] == {"score": 0.0, "answer": None}


async def test_the_right_answer_is_found_where_datasets_keep_it() -> None:
    reward = MathVerifyReward(timeout_s=30, processes=1)
    states = [
        judged("4", reward_model={"style": "rule", "ground_truth": "4"}),
        judged("4", ground_truth=["4"]),
        judged("4", solution=r"2 + 2 = \boxed{4}"),
        judged("4", answer=4),
        judged("4", answer="4", ground_truth="5"),
    ]
    assert [one["score"] for one in await reward.score(states)] == [1.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.raises(RewardError, match=r"no right answer: none of .*ground_truth.*it has level"):
        await reward.score([judged("4", level=3)])
    with pytest.raises(RewardError, match="no expression was found in the right answer"):
        await reward.score([judged("4", answer="$$")])
    assert reward._processes.started == 1  # no error of an answer costs a process
    await reward.close()


async def test_an_answer_that_hangs_is_ended_and_the_others_are_judged() -> None:
    reward = MathVerifyReward(timeout_s=1.0, processes=2)
    states = [judged("4", answer="4"), judged(HANGS, answer="7"), judged("5", answer="4")]
    right, hung, wrong = await reward.score(states)
    assert (right["score"], wrong["score"]) == (1.0, 0.0)
    assert hung == {"score": 0.0, "overran": True}
    assert (await reward.score(states[:1]))[0]["score"] == 1.0
    await reward.close()


async def test_an_overrun_can_be_an_error_instead_of_a_zero() -> None:
    reward = MathVerifyReward(timeout_s=0.5, processes=1, overrun_score=None)
    with pytest.raises(RewardError, match=r"did not answer within 0\.5 s"):
        await reward.score([judged(HANGS, answer="7")])
    await reward.close()


def test_it_judges_in_an_event_loop_outside_the_main_thread() -> None:
    got: list[float] = []

    async def score() -> None:
        reward = MathVerifyReward(timeout_s=30, processes=1)
        got.extend(one["score"] for one in await reward.score([judged("4", answer="4")]))
        await reward.close()

    thread = threading.Thread(target=lambda: asyncio.run(score()))
    thread.start()
    thread.join(60)
    assert got == [1.0]


# -- the processes ---------------------------------------------------------------------------

QUESTION = {"truth": "4", "response": "4", "strict": True}


def _pids(judges: JudgeProcesses) -> list[int]:
    return [process._child.pid for process in judges._all]


async def _gone(pid: int) -> None:
    await until(lambda: not Path(f"/proc/{pid}").exists())


def _proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_a_process_that_was_killed_is_replaced_and_the_question_asked_again() -> None:
    judges = JudgeProcesses("math_verify", processes=1)
    await judges.ask(QUESTION, timeout_s=30)
    (pid,) = _pids(judges)
    os.kill(pid, signal.SIGKILL)
    assert (await judges.ask(QUESTION, timeout_s=30))["score"] == 1.0
    assert judges.started == 2
    await judges.close()


async def test_a_cancelled_question_ends_its_process() -> None:
    judges = JudgeProcesses("math_verify", processes=1)
    await judges.ask(QUESTION, timeout_s=30)
    (pid,) = _pids(judges)
    asking = asyncio.create_task(judges.ask({**QUESTION, "response": HANGS}, timeout_s=60))
    await until(lambda: not judges._idle)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await _gone(pid)
    assert _pids(judges) == []
    await judges.close()


async def test_closing_ends_idle_and_busy_processes_and_refuses_questions() -> None:
    judges = JudgeProcesses("math_verify", processes=2)
    await asyncio.gather(*(judges.ask(QUESTION, timeout_s=30) for _ in range(2)))
    pids = _pids(judges)
    busy = asyncio.create_task(judges.ask({**QUESTION, "response": HANGS}, timeout_s=60))
    await until(lambda: len(judges._idle) < len(pids))
    await judges.close()
    with pytest.raises(RewardError):
        await busy
    for pid in pids:
        await _gone(pid)
    with pytest.raises(RewardError, match="closed"):
        await judges.ask(QUESTION, timeout_s=1)


async def test_a_process_is_bounded_and_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    judges = JudgeProcesses("math_verify", processes=1, memory_bytes=3 << 30)
    await judges.ask(QUESTION, timeout_s=30)
    (pid,) = _pids(judges)
    limits = _proc(pid, "limits").decode()
    assert f"Max address space         {3 << 30}" in limits
    assert "Max file size             0 " in limits
    assert b"hunter2" not in _proc(pid, "environ")
    await judges.close()


async def test_a_process_without_a_parent_ends_by_itself() -> None:
    """Its CPU timer is the kernel's: it needs no interpreter that still runs."""
    judges = JudgeProcesses("math_verify", processes=1)
    await judges.ask(QUESTION, timeout_s=30)
    (process,) = judges._all
    text = (
        b'{"truth": "7", "response": "%s", "strict": true, "cpu_s": 0.3}'
        % HANGS.encode().replace(b"\\", b"\\\\")
    )
    assert await asyncio.wait_for(process.ask(text), 30) is None
    assert await asyncio.to_thread(process._child.wait, 30) == -signal.SIGPROF
    await judges.close()


async def test_a_judge_that_cannot_start_says_why() -> None:
    judges = JudgeProcesses("no_such_judge", processes=1)
    with pytest.raises(RewardError, match="cannot start: KeyError: 'no_such_judge'") as caught:
        await judges.ask(QUESTION, timeout_s=5)
    assert not isinstance(caught.value, Overrun)
    await judges.close()


async def test_what_has_no_json_form_or_is_too_large_is_not_sent() -> None:
    judges = JudgeProcesses("math_verify", processes=1)
    with pytest.raises(RewardError, match="no JSON form"):
        await judges.ask({**QUESTION, "truth": object()}, timeout_s=5)
    with pytest.raises(RewardError, match="the limit is"):
        await judges.ask({**QUESTION, "response": "x" * (17 << 20)}, timeout_s=5)
    assert judges.started == 0
    await judges.close()
