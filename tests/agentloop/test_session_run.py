"""One session from prompt to what is published: the order of its steps, and that it fails alone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast

import pytest

from agentloop.engines.scripted import ScriptedEngine
from agentloop.engines.types import EngineError, Sampling
from agentloop.loops.loop import AgentLoop, Session, SessionAborted
from agentloop.loops.session_run import JUDGE_GRACE_S, run_session
from agentloop.loops.single_turn import SingleTurnLoop
from agentloop.rewards.types import Reward, RewardError
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.state import Canonical, RolloutState, Status

EX_2_1 = [{"token_ids": [20, 21, 22], "logprobs": [-0.1, -0.2, -0.3]}]


class Numbers:
    """A tokenizer that has nothing to say but numbers."""

    eos_ids = (2,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str) -> list[int]:
        return [999, 998]


class Judge:
    """Says what it is told to, and counts."""

    def __init__(self, says: Any = None) -> None:
        self.says = [{"score": 0.5, "why": "so"}] if says is None else says
        self.asked: list[RolloutState] = []
        self.judging = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        self.asked += states
        self.judging.set()
        await self.go.wait()
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says


class Does(AgentLoop):
    """A loop that does as its function does."""

    def __init__(self, work: Callable[[RolloutState, Session], Any]) -> None:
        self._work = work

    async def run(self, state: RolloutState, session: Session) -> Any:
        result = self._work(state, session)
        return await result if asyncio.iscoroutine(result) else result


def session(script: Any = EX_2_1, **more: Any) -> Session:
    sampling = Sampling(max_tokens=more.pop("max_tokens", 100))
    engine = more.pop("engine", None) or ScriptedEngine(script)
    return Session(engine, cast("Any", Numbers()), sampling, **more)


def state(**more: Any) -> RolloutState:
    more = {"uid": "u", "session_id": 3, "prompt_ids": [10, 11, 12], **more}
    return RolloutState([{"role": "user", "content": "?"}], **more)


def ended(state: RolloutState, ids: Sequence[int] = (20, 21), reason: str = "stop") -> RolloutState:
    state.append_generated(list(ids), [-0.5] * len(ids), [1] * len(ids))
    state.finish_reason = reason
    return state


def copies(state: RolloutState, count: int) -> list[RolloutState]:
    return [deepcopy(ended(deepcopy(state), [20 + i, 2])) for i in range(count)]


async def run(
    loop: AgentLoop | Callable[..., Any],
    begun: RolloutState | None = None,
    its: Session | None = None,
    reward: Any = None,
    timeout_s: float | None = 30,
    **more: Any,
) -> list[RolloutState]:
    loop = loop if isinstance(loop, AgentLoop) else Does(loop)
    states = await run_session(
        loop, begun or state(), its or session(), cast("Reward | None", reward),
        timeout_s=timeout_s, **more,
    )  # fmt: skip
    assert states, "never none"
    for each in states:
        trajectory_tags(each)  # whatever it is, it can be published
        trajectory_fields(each)
    return states


def completed() -> RolloutState:
    """A member that a group keeps: judged and canonical."""
    done = ended(state())
    done.status = Status.COMPLETED
    done.reward = {"score": 1.0}
    return done


# -- completed -------------------------------------------------------------------------------


async def test_a_session_is_run_judged_and_made_canonical() -> None:
    judge = Judge()
    (done,) = await run(SingleTurnLoop(), reward=judge)
    assert (done.status, done.finish_reason, done.error_msg) == ("completed", "stop", None)
    assert done.reward == {"score": 0.5, "why": "so"}
    assert done.canonical == Canonical(
        [10, 11, 12, 20, 21, 22], [-100, -100, -100, 20, 21, 22], [0, 0, 0, -0.1, -0.2, -0.3]
    )
    assert done.meta is not None
    assert judge.asked == [done]
    assert trajectory_tags(done)["score"] == 0.5


async def test_without_a_judge_there_is_no_reward() -> None:
    (done,) = await run(SingleTurnLoop())
    assert (done.status, done.reward) == ("completed", None)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "STOP"])
async def test_ex_1_finish_reasons_that_complete(reason: str) -> None:
    (done,) = await run(lambda state, _: ended(state, reason=reason))
    assert done.status is Status.COMPLETED


@pytest.mark.parametrize("reason", ["error", "weird", None])
async def test_ex_1_finish_reasons_that_fail(reason: Any) -> None:
    judge = Judge()
    (done,) = await run(lambda state, _: ended(state, reason=reason), reward=judge)
    assert done.status is Status.FAILED
    assert repr(reason) in (done.error_msg or "")
    assert judge.asked == []


async def test_text_without_tokens_is_tokenized() -> None:
    """EX-2.6, for engines that say nothing of tokens."""

    def says(state: RolloutState, session: Session) -> RolloutState:
        state.response, state.finish_reason = "ok", "stop"
        return state

    (done,) = await run(says)
    assert done.response_ids == [999, 998]
    assert done.canonical is not None
    assert done.canonical.labels == [-100, -100, -100, 999, 998]


async def test_a_score_that_the_loop_gave_is_taken() -> None:
    def scores(state: RolloutState, session: Session) -> RolloutState:
        state.reward = {"score": 0.75}
        return ended(state)

    judge = Judge()
    (done,) = await run(scores, reward=judge)
    assert (done.reward, judge.asked) == ({"score": 0.75}, [])


# -- several trajectories --------------------------------------------------------------------


async def test_trajectories_of_a_session_share_one_reward_of_one_judgement() -> None:
    judge = Judge()
    states = await run(lambda state, _: copies(state, 3), reward=judge)
    assert [each.index for each in states] == [0, 1, 2]
    assert {(each.uid, each.session_id) for each in states} == {("u", 3)}
    assert judge.asked == [states[2]], "the last one stands for the session"
    assert [each.reward for each in states] == [{"score": 0.5, "why": "so"}] * 3
    assert states[0].reward is not states[1].reward
    assert all(each.canonical is not None for each in states)


async def test_they_belong_to_the_session_whatever_the_loop_says() -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        return [ended(RolloutState(state.messages, prompt_ids=[1], index=9)) for _ in range(2)]

    begun = state(task_name="t", data_source="d")
    states = await run(makes, begun)
    assert [each.key for each in states] == ["u_3_0", "u_3_1"]
    assert [(each.task_name, each.data_source) for each in states] == [("t", "d")] * 2


async def test_what_failed_is_left_out_as_long_as_there_are_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        states = copies(state, 3)
        states[1].prompt_ids = None
        return states

    judge = Judge()
    states = await run(makes, reward=judge)
    assert [(each.index, each.status) for each in states] == [(0, "completed"), (2, "completed")]
    assert len(judge.asked) == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "u_3_1: canonicalize_train_fields failed" in errors[0].getMessage()


async def test_if_all_have_failed_all_are_returned() -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        states = copies(state, 2)
        for each in states:
            each.prompt_ids = None
        return states

    assert [each.status for each in await run(makes)] == ["failed", "failed"]


async def test_a_trajectory_that_its_loop_failed_stays_so() -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        states = copies(state, 2)
        states[0].fail("dropped a tool")
        return states

    judge = Judge()
    (kept,) = await run(makes, reward=judge)
    assert (kept.index, kept.status) == (1, "completed")
    assert (len(judge.asked), kept.reward) == (1, judge.says[0])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda state: [], "returned no trajectory"),
        (lambda state: None, "NoneType"),
        (lambda state: "done", "str"),
        (lambda state: [ended(state), 3], "int"),
        (lambda state: [ended(state), state], "the same trajectory twice"),
    ],
)
async def test_a_result_that_is_none_fails_the_session(result: Any, reason: str) -> None:
    (done,) = await run(lambda state, _: result(state))
    assert done.status is Status.FAILED
    assert reason in (done.error_msg or "")
    assert done.key == "u_3_0"


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError("bad"), "loop"), (EngineError("gone"), "engine"), (TimeoutError("t"), "loop"),
     (MemoryError(), "loop")],
)  # fmt: skip
async def test_an_exception_of_the_loop_fails_this_session(error: Exception, kind: str) -> None:
    def raises(state: RolloutState, session: Session) -> RolloutState:
        ended(state)
        raise error

    judge = Judge()
    (done,) = await run(raises, reward=judge)
    assert (done.status, done.failure, done.finish_reason) == ("failed", kind, "error")
    assert done.error_msg == f"{type(error).__name__}: {error}"
    assert (done.response_ids, done.reward, judge.asked) == ([], None, [])
    assert trajectory_fields(done) == {}


async def test_rg_16_a_malformed_trajectory_fails_and_nothing_is_raised() -> None:
    """EX-2.7: no prompt."""

    def loses(state: RolloutState, session: Session) -> RolloutState:
        state.prompt_ids = None
        return ended(state)

    (done,) = await run(loses)
    assert done.status is Status.FAILED
    assert (done.error_msg or "").startswith("canonicalize_train_fields failed")


async def test_a_response_of_no_token_fails_and_is_not_judged() -> None:
    judge = Judge()
    (done,) = await run(SingleTurnLoop(), its=session([{"token_ids": []}]), reward=judge)
    assert (done.status, done.failure, judge.asked) == ("failed", "empty", [])
    assert done.error_msg == "the policy generated nothing"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (RewardError("is out"), "judging failed: the judge: is out"),
        (ZeroDivisionError("x"), "judging failed: the judge raised ZeroDivisionError: x"),
        ([], "1 rewards were due"),
        ([{"score": 1.0}] * 2, "got 2"),
        (3, "a list of 1 rewards was due"),
        (["high"], "reward 0 of 1"),
        ([{}], "needs a 'score'"),
        ([{"score": "high"}], "a score is a number"),
        ([{"score": math.nan}], "got nan"),
        ([{"score": math.inf}], "got inf"),
    ],
)
async def test_a_judge_that_fails_fails_the_session_and_not_its_tokens(
    says: Any, reason: str
) -> None:
    (done,) = await run(SingleTurnLoop(), reward=Judge(says))
    assert (done.status, done.failure) == ("failed", "reward")
    assert reason in (done.error_msg or "")
    assert done.response_ids == [20, 21, 22], "they were produced, and are counted"
    assert done.reward is None


async def test_a_session_that_takes_too_long_fails_in_time() -> None:
    engine = ScriptedEngine([{"token_ids": [5, 6], "hold_after": 1}])
    began = time.monotonic()
    (done,) = await run(SingleTurnLoop(), its=session(engine=engine), timeout_s=0.02)
    assert time.monotonic() - began < 10
    assert (done.status, done.failure, done.finish_reason) == ("failed", "timeout", "timeout")
    assert engine.under_way == 0


async def test_a_loop_that_ignores_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.loops.session_run.STOP_S", 0.01)
    go, ended_late = asyncio.Event(), asyncio.Event()

    async def stubborn(state: RolloutState, session: Session) -> RolloutState:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        ended(state)
        ended_late.set()
        return state

    (done,) = await run(stubborn, timeout_s=0.02)
    assert (done.status, done.response_ids) == ("failed", [])
    go.set()
    await asyncio.wait_for(ended_late.wait(), 10)
    assert (done.status, done.response_ids) == ("failed", []), "what came late changes nothing"


async def test_a_judge_that_takes_too_long_fails_the_session_in_time() -> None:
    judge = Judge()
    judge.go.clear()
    (done,) = await run(SingleTurnLoop(), reward=judge, timeout_s=0.05)
    assert (done.status, done.failure) == ("failed", "timeout")
    assert "judge" in (done.error_msg or "")


async def test_cancellation_passes_through_and_reaches_the_loop() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def waits(state: RolloutState, session: Session) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    task = asyncio.create_task(run(waits))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


async def test_a_loop_that_cancels_itself_fails_its_session() -> None:
    def cancels(state: RolloutState, session: Session) -> None:
        raise asyncio.CancelledError

    (done,) = await run(cancels)
    assert done.status is Status.FAILED
    assert "cancelled" in (done.error_msg or "")


async def test_what_went_before_is_forgotten() -> None:
    begun = state()
    begun.fail("an earlier try", "engine")
    (done,) = await run(SingleTurnLoop(), begun)
    assert (done.status, done.error_msg, done.failure) == ("completed", None, None)


# -- it is asked to stop ---------------------------------------------------------------------


async def test_rg_41_what_is_completed_stays_so_when_a_pause_is_asked_for() -> None:
    kept = completed()
    (kept,) = await run(SingleTurnLoop(), kept)
    before = deepcopy(kept)
    its = session()
    its.abort_requested.set()
    judge = Judge()
    (done,) = await run(SingleTurnLoop(), kept, its, judge)
    assert done is kept
    assert done == before, "field by field"
    assert (judge.asked, cast("ScriptedEngine", its.engine).requests) == ([], 0)
    (other,) = await run(SingleTurnLoop(), state(), its, judge)
    assert (other.status, other.finish_reason, other.reward) == ("aborted", "abort", None)
    assert (judge.asked, cast("ScriptedEngine", its.engine).requests) == ([], 0)


async def test_rg_43_a_kept_member_is_judged_once_however_often_its_group_is_tried() -> None:
    judge = Judge()
    (kept,) = await run(SingleTurnLoop(), reward=judge)
    for _ in range(2):
        (kept,) = await run(SingleTurnLoop(), kept, reward=judge)
    assert len(judge.asked) == 1
    assert kept.reward == {"score": 0.5, "why": "so"}


async def test_a_kept_member_without_a_score_is_judged() -> None:
    kept = completed()
    kept.reward = None
    judge = Judge()
    (done,) = await run(SingleTurnLoop(), kept, reward=judge)
    assert (done.status, done.reward, len(judge.asked)) == ("completed", judge.says[0], 1)


async def test_a_paused_engine_ends_the_session_as_aborted_with_what_it_has() -> None:
    engine = ScriptedEngine([{"token_ids": [20, 21, 22], "hold_after": 2}])
    judge = Judge()
    task = asyncio.create_task(run(SingleTurnLoop(), its=session(engine=engine), reward=judge))
    for _ in range(1000):
        if engine.under_way:
            break
        await asyncio.sleep(0)
    else:
        raise AssertionError("nothing is asked of the engine")
    await engine.pause()
    (done,) = await task
    assert (done.status, done.finish_reason, done.reward) == ("aborted", "abort", None)
    assert (done.response_ids, done.canonical, judge.asked) == ([20, 21], None, [])
    await engine.resume()
    (done,) = await run(SingleTurnLoop(), done, session(engine=engine), judge)
    assert (done.status, done.response_ids) == ("completed", [20, 21, 22])
    assert len(judge.asked) == 1


async def test_xtuner_1827_three_of_eight_are_aborted_and_the_one_that_took_no_notice_too() -> None:
    """What comes late carries the status aborted, and is neither judged nor canonical."""
    running = asyncio.Event()
    go = asyncio.Event()

    async def works(state: RolloutState, session: Session) -> RolloutState:
        if state.session_id >= 5:
            if state.session_id == 7:
                running.set()
                await go.wait()  # ignores the abort
            else:
                await session.abort_requested.wait()
                ended(state, [20], "abort")
                return state
        return ended(state)

    its = session()
    judge = Judge()
    tasks = [asyncio.create_task(run(works, state(session_id=i), its, judge)) for i in range(8)]
    await running.wait()
    await asyncio.wait(tasks[:5], timeout=10)
    its.abort_requested.set()
    _, left = await asyncio.wait(tasks[:7], timeout=10)
    assert not left
    assert not tasks[7].done(), "the others did not wait for it"
    go.set()
    states = [state for task in tasks for state in await task]
    assert [state.status for state in states] == ["completed"] * 5 + ["aborted"] * 3
    late = states[7]
    assert (late.finish_reason, late.reward, late.canonical) == ("abort", None, None)
    assert late.response_ids == [20, 21], "it may be gone on with"
    assert {state.session_id for state in judge.asked} == {0, 1, 2, 3, 4}


async def test_a_session_that_is_being_judged_has_time_to_complete() -> None:
    judge = Judge()
    judge.go.clear()
    its = session()
    task = asyncio.create_task(run(SingleTurnLoop(), its=its, reward=judge, judge_grace_s=30.0))
    await judge.judging.wait()
    its.abort_requested.set()
    for _ in range(20):
        await asyncio.sleep(0)
    judge.go.set()
    (done,) = await task
    assert (done.status, done.reward) == ("completed", judge.says[0])


async def test_a_judge_that_is_not_done_in_its_time_aborts_the_session() -> None:
    judge = Judge()
    judge.go.clear()
    its = session()
    task = asyncio.create_task(run(SingleTurnLoop(), its=its, reward=judge, judge_grace_s=0.02))
    await judge.judging.wait()
    its.abort_requested.set()
    (done,) = await task
    assert (done.status, done.finish_reason, done.reward) == ("aborted", "abort", None)
    assert (done.response_ids, done.canonical) == ([20, 21, 22], None)


def test_a_judge_has_ten_seconds_at_a_pause() -> None:
    assert JUDGE_GRACE_S == 10.0


async def test_a_loop_that_lets_an_abort_through_is_aborted() -> None:
    async def waits(state: RolloutState, session: Session) -> RolloutState:
        state.append_generated([20], None, [0])
        session.abort_requested.set()
        await session.unless_aborted(asyncio.sleep(60))
        raise AssertionError

    (done,) = await run(waits)
    assert (done.status, done.response_ids) == ("aborted", [20])


async def test_work_ends_with_its_result_or_with_the_abort() -> None:
    its = session()

    async def gives() -> int:
        return 4

    assert await its.unless_aborted(gives()) == 4
    its.abort_requested.set()
    assert await its.unless_aborted(gives()) == 4, "what is done at once is done"
    stopped = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(SessionAborted):
        await its.unless_aborted(waits())
    await asyncio.wait_for(stopped.wait(), 10)


async def test_one_aborted_trajectory_aborts_its_session() -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        states = copies(state, 2)
        states[0].finish_reason = "abort"
        return states

    judge = Judge()
    states = await run(makes, reward=judge)
    assert [each.status for each in states] == ["aborted", "aborted"]
    assert judge.asked == []


# -- evaluation ------------------------------------------------------------------------------


async def test_an_evaluation_counts_failures_as_zero_and_keeps_all() -> None:
    def makes(state: RolloutState, session: Session) -> list[RolloutState]:
        states = copies(state, 3)
        states[0].prompt_ids = None
        states[1].fail("tool broke")
        return states

    states = await run(makes, its=session(evaluates=True), reward=Judge())
    assert [each.status for each in states] == ["completed"] * 3
    assert [(each.reward or {}).get("score") for each in states] == [0.0, 0.0, 0.5]
    assert states[1].error_msg == "tool broke"
    assert [trajectory_tags(each)["score"] for each in states] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("judge_fails", [True, False])
async def test_an_evaluation_s_session_that_failed_is_completed_with_score_0(
    judge_fails: bool,
) -> None:
    def raises(state: RolloutState, session: Session) -> RolloutState:
        if not judge_fails:
            raise ValueError("x")
        return ended(state)

    judge = Judge(RewardError("out"))
    (done,) = await run(raises, its=session(evaluates=True), reward=judge)
    assert (done.status, done.reward) == ("completed", {"score": 0.0})
    assert done.error_msg == ("judging failed: the judge: out" if judge_fails else "ValueError: x")
    assert bool(trajectory_fields(done)) is judge_fails, "tokens that are there are kept"


async def test_an_evaluation_that_is_asked_to_stop_is_aborted() -> None:
    its = session(evaluates=True)
    its.abort_requested.set()
    (done,) = await run(SingleTurnLoop(), its=its)
    assert done.status is Status.ABORTED
