"""An engine in a process of its own: what dies with the process, and what does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentloop
from agentloop.engines import supervised
from agentloop.engines.messages import (
    pack_completion,
    pack_request,
    unpack_completion,
    unpack_request,
)
from agentloop.engines.supervised import SupervisedEngine
from agentloop.engines.types import Completion, EngineError, Request, Sampling, WeightsError
from tests.agentloop.fake_engine import (
    ANSWER,
    BUG,
    DIE,
    DIE_ONCE,
    HANG,
    REFUSE,
    WAIT,
)
from tests.deadline import until

FAKE = "tests.agentloop.fake_engine:FakeEngine"
ROOT = str(Path(agentloop.__file__).parents[1])
WAIT_S = 100.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds the fake wherever the tests were started."""
    monkeypatch.setenv("PYTHONPATH", ROOT)


@asynccontextmanager
async def fake(folder: Path, **settings: Any) -> AsyncIterator[SupervisedEngine]:
    options = {"folder": str(folder), **settings.pop("options", {})}
    engine = SupervisedEngine(FAKE, options, **{"backoff_s": 0.01, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def asks(what: int, request_id: str = "r", **more: Any) -> Request:
    return Request(request_id, [what], more.pop("sampling", Sampling()), **more)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def folders(where: Path) -> list[Path]:
    """Private folders of engines."""
    return list(where.glob("engine-*"))


def kept(where: Path) -> list[Path]:
    """Files of weights in them."""
    return list(where.glob("engine-*/*"))


def kill(engine: SupervisedEngine) -> int:
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


# -- messages --------------------------------------------------------------------------------


def test_requests_and_completions_travel_whole() -> None:
    import msgpack

    def travelled(plain: Any) -> Any:
        return msgpack.unpackb(msgpack.packb(plain))

    request = Request(
        "id", np.arange(3), Sampling(stop=("a",), stop_token_ids=(1, 2), seed=1 << 62), turn=2,
        messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}], timeout_s=1.5,
    )  # fmt: skip
    got = unpack_request(travelled(pack_request(request)))
    assert got.token_ids == [0, 1, 2]
    assert (got.sampling, got.messages, got.tools) == (
        request.sampling, request.messages, request.tools,
    )  # fmt: skip
    assert (got.request_id, got.turn, got.timeout_s) == ("id", 2, 1.5)
    experts = np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2]
    completion = Completion(
        [1], [-0.125], [7], "é", "stop", "engine", "raw", experts, [9], {"k": 1}
    )
    back = unpack_completion(travelled(pack_completion(completion)))
    assert back.routed_experts is not None
    assert back.routed_experts.dtype == np.uint16
    assert np.array_equal(back.routed_experts, experts)
    back.routed_experts[0, 0] = 5  # it is the caller's own
    assert pack_completion(back) | {"routed_experts": 0} == pack_completion(completion) | {
        "routed_experts": 0
    }


async def test_a_request_reaches_the_engine_and_its_answer_comes_back(tmp_path: Path) -> None:
    async with fake(tmp_path, options={"version": 5}) as engine:
        assert engine.policy_version == 5
        assert engine.pid is None
        sampling = Sampling(routed_experts=True, stop=("x",), seed=3)
        request = asks(ANSWER, sampling=sampling, messages=[{"role": "user"}], tools=[])
        answer = await engine.generate(request)
        assert (answer.token_ids, answer.versions) == ([0] * 3, [5] * 3)
        assert answer.logprobs == [-0.5] * 3
        assert answer.routed_experts is not None
        assert answer.routed_experts.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert answer.extra == {"asked": repr(request)}
        assert engine.pid not in (None, os.getpid())


async def test_errors_of_the_engine_come_back_as_what_they_are(tmp_path: Path) -> None:
    async with fake(tmp_path) as engine:
        with pytest.raises(EngineError, match=r"^refused, as asked$"):
            await engine.generate(asks(REFUSE))
        with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
            await engine.generate(asks(BUG))
        with pytest.raises(EngineError, match="'generate' is not plain data"):
            await engine.generate(asks(ANSWER, messages=[{"image": object()}]))
        assert (await engine.generate(asks(ANSWER))).finish_reason == "length"
        assert engine.restarts == 0


# -- deaths ----------------------------------------------------------------------------------


async def test_requests_under_way_when_the_process_dies_are_asked_once_more(
    tmp_path: Path,
) -> None:
    async with fake(tmp_path) as engine:
        await engine.start()
        first = engine.pid
        answers = await asyncio.gather(
            *(engine.generate(asks(DIE_ONCE, "same")) for _ in range(20))
        )
        assert [answer.finish_reason for answer in answers] == ["stop"] * 20
        assert engine.restarts == 1
        assert engine.pid != first


async def test_a_request_under_which_two_processes_die_is_given_up_and_the_engine_is_not(
    tmp_path: Path,
) -> None:
    async with fake(tmp_path) as engine:
        with pytest.raises(
            EngineError, match="died under request 'poison', and so did the next"
        ) as e:
            await engine.generate(asks(DIE, "poison"))
        assert str(e.value).count("killed by SIGKILL") == 2
        assert (await engine.generate(asks(ANSWER))).finish_reason == "length"
        assert engine.restarts == 2


async def test_a_process_that_died_between_requests_costs_them_nothing(tmp_path: Path) -> None:
    async with fake(tmp_path, max_restarts=2) as engine:
        for _ in range(3):
            await engine.start()
            dead = kill(engine)
            # The next request may or may not see the death first: it is answered either way.
            assert (await engine.generate(asks(ANSWER))).finish_reason == "length"
            assert engine.pid != dead


async def test_a_request_that_meets_a_process_that_is_being_buried_waits_for_the_next(
    tmp_path: Path,
) -> None:
    async with fake(tmp_path) as engine:
        await engine.start()
        child = engine._supervisor.child
        assert child is not None
        kill(engine)
        while child.alive:  # noqa: ASYNC110 (to the very turn of the loop)
            await asyncio.sleep(0)
        assert engine._supervisor.child is child
        assert (await engine.generate(asks(ANSWER))).finish_reason == "length"
        assert engine.restarts == 1


async def test_restarts_are_bounded(tmp_path: Path) -> None:
    async with fake(tmp_path, max_restarts=3) as engine:
        await engine.start()
        (tmp_path / "die-at-start").touch()
        kill(engine)
        with pytest.raises(
            EngineError, match="died 4 times in a row and is not started again"
        ) as e:
            await engine.generate(asks(ANSWER))
        assert "while it started, killed by SIGKILL" in str(e.value)
        (tmp_path / "die-at-start").unlink()
        with pytest.raises(EngineError, match="died 4 times in a row"):
            await engine.generate(asks(ANSWER))


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with fake(tmp_path, max_restarts=50) as engine:
        await engine.start()
        (tmp_path / "die-at-start").touch()
        kill(engine)
        waiting = asyncio.create_task(engine.generate(asks(ANSWER)))
        await until(lambda: engine.restarts >= 2)
        (tmp_path / "die-at-start").unlink()
        assert (await waiting).finish_reason == "length"


async def test_pauses_between_restarts_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentloop.engines import supervisor

    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay: float) -> None:
        pauses.append(delay)
        await sleep(0)

    async with fake(tmp_path, max_restarts=4, backoff_s=1.0, max_backoff_s=3.0) as engine:
        await engine.start()
        (tmp_path / "die-at-start").touch()
        monkeypatch.setattr(supervisor.asyncio, "sleep", counted)
        kill(engine)
        with pytest.raises(EngineError, match="died 5 times"):
            await engine.generate(asks(ANSWER))
        monkeypatch.undo()
    assert pauses == [1.0, 2.0, 3.0, 3.0]


async def test_an_engine_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    async with fake(tmp_path, options={"fail": "no such model"}, backoff_s=1000) as engine:
        with pytest.raises(EngineError, match="no such model"):
            await engine.start()
        with pytest.raises(EngineError, match="no such model"):
            await engine.generate(asks(ANSWER))
    unknown = SupervisedEngine("agentloop.engines.hf:NoSuchEngine", {})
    with pytest.raises(EngineError, match="NoSuchEngine"):
        await unknown.start()
    await unknown.close()


async def test_a_request_that_waits_for_a_process_keeps_its_deadline(tmp_path: Path) -> None:
    async with fake(tmp_path, backoff_s=1000, max_backoff_s=1000) as engine:
        await engine.start()
        kill(engine)
        with pytest.raises(EngineError, match=r"'late' was not answered in 0\.2 s"):
            await engine.generate(asks(ANSWER, "late", timeout_s=0.2))


async def test_a_process_that_hangs_is_killed_when_a_request_ran_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_PING_S", 0.2)
    monkeypatch.setattr(supervised, "_GRACE_S", 0.1)
    async with fake(tmp_path) as engine:
        await engine.start()
        hung = engine.pid
        with pytest.raises(EngineError, match="was not answered in"):
            await engine.generate(asks(HANG, timeout_s=0.1))
        await until(lambda: engine.restarts == 1 and engine.pid is not None)
        assert engine.pid != hung
        assert (await engine.generate(asks(ANSWER))).finish_reason == "length"


async def test_a_process_that_only_keeps_one_request_waiting_lives(tmp_path: Path) -> None:
    async with fake(tmp_path) as engine:
        await engine.start()
        pid = engine.pid
        task = asyncio.create_task(engine.generate(asks(WAIT, "w", timeout_s=WAIT_S)))
        await until((tmp_path / "waiting-w").exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until((tmp_path / "left-w").exists)
        assert engine.pid == pid


# -- pause and abort -------------------------------------------------------------------------


async def test_pause_ends_what_is_under_way_and_holds_over_a_restart(tmp_path: Path) -> None:
    async with fake(tmp_path) as engine:
        tasks = [asyncio.create_task(engine.generate(asks(WAIT, str(i)))) for i in range(3)]
        await until(lambda: len(list(tmp_path.glob("waiting-*"))) == 3)
        await engine.pause()
        assert all(task.done() for task in tasks)
        assert [task.result().token_ids for task in tasks] == [[0]] * 3
        assert {task.result().finish_reason for task in tasks} == {"abort"}
        kill(engine)
        none = await engine.generate(asks(ANSWER))
        assert (none.finish_reason, none.token_ids, none.logprobs) == ("abort", [], [])
        assert none.logprob_kind == "processed"
        await until(lambda: engine.restarts == 1 and engine.pid is not None)
        await engine.resume()
        assert (await engine.generate(asks(ANSWER))).finish_reason == "length"


async def test_a_pause_while_a_process_starts_reaches_it(tmp_path: Path) -> None:
    (tmp_path / "start-slowly").touch()
    async with fake(tmp_path) as engine:
        starting = asyncio.create_task(engine.start())
        waiting = asyncio.create_task(engine.generate(asks(ANSWER)))
        await until((tmp_path / "starts").exists)
        await engine.pause()
        assert (await waiting).finish_reason == "abort"
        (tmp_path / "start-slowly").unlink()
        await starting
        child = engine._supervisor.child
        assert child is not None
        plain = await child.call("generate", pack_request(asks(ANSWER)))
        assert plain["finish_reason"] == "abort"


async def test_abort_ends_one_request_and_one_that_waits_for_a_process(tmp_path: Path) -> None:
    async with fake(tmp_path, backoff_s=1000, max_backoff_s=1000) as engine:
        tasks = {i: asyncio.create_task(engine.generate(asks(WAIT, i))) for i in ("a", "b")}
        await until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2)
        await engine.abort("a")
        assert (await tasks["a"]).token_ids == [0]
        assert not tasks["b"].done()
        kill(engine)
        await until(lambda: engine.pid is None)
        await engine.abort("b")
        answer = await tasks["b"]
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])


# -- weights ---------------------------------------------------------------------------------


async def test_a_new_process_has_the_current_weights_and_version_before_it_answers(
    tmp_path: Path,
) -> None:
    async with fake(tmp_path, weights_dir=str(tmp_path)) as engine:
        for version in (1, 2):
            await engine.update_weights({"w": torch.tensor([version * 11.0])}, version)
            assert engine.policy_version == version
        assert len(kept(tmp_path)) == 1
        kill(engine)
        answer = await engine.generate(asks(ANSWER))
        assert (answer.token_ids, answer.versions) == ([22] * 3, [2] * 3)
        assert engine.restarts == 1
        assert engine.policy_version == 2
    assert not folders(tmp_path)


async def test_weights_that_do_not_fit_change_nothing_now_or_after_a_restart(
    tmp_path: Path,
) -> None:
    async with fake(tmp_path, weights_dir=str(tmp_path)) as engine:
        await engine.update_weights({"w": torch.tensor([4.0])}, 1)
        with pytest.raises(WeightsError, match="these do not fit"):
            await engine.update_weights({"bad": torch.zeros(1)}, 2)
        with pytest.raises(EngineError, match="under the update to version 3, and so did the next"):
            await engine.update_weights({"deadly": torch.zeros(1)}, 3)
        assert engine.policy_version == 1
        answer = await engine.generate(asks(ANSWER))
        assert engine.restarts == 2
        assert (answer.token_ids, answer.versions) == ([4] * 3, [1] * 3)
        assert len(kept(tmp_path)) == 1


async def test_tied_and_strided_weights_are_kept_in_full(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from agentloop.engines.supervisor import Supervisor

    supervisor = Supervisor(
        FAKE, {}, max_restarts=0, backoff_s=0, max_backoff_s=0, start_timeout_s=1,
        weights_dir=str(tmp_path),
    )  # fmt: skip
    flat = torch.arange(12.0)
    weights = {"a": flat, "tied": flat, "part": flat[3:6], "turned": flat.view(3, 4).T}
    path = await supervisor.write_weights(weights)
    found = load_file(path)
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    await supervisor.close()
    assert not path.exists()


# -- ends ------------------------------------------------------------------------------------


async def test_close_ends_the_process_and_what_is_under_way(tmp_path: Path) -> None:
    async with fake(tmp_path) as engine:
        task = asyncio.create_task(engine.generate(asks(WAIT)))
        await until((tmp_path / "waiting-r").exists)
        pid = engine.pid
        assert pid is not None
        await engine.close()
        assert not runs(pid)
        with pytest.raises(EngineError, match="the engine was closed"):
            await task
        with pytest.raises(EngineError, match="the engine was closed"):
            await engine.generate(asks(ANSWER))
        await engine.close()


async def test_close_while_the_process_starts_ends_it(tmp_path: Path) -> None:
    async with fake(tmp_path) as engine:
        task = asyncio.create_task(engine.generate(asks(ANSWER)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await task


OWNER = textwrap.dedent(
    """
    import asyncio, os, sys, time
    from agentloop.engines.supervised import SupervisedEngine

    async def main():
        engine = SupervisedEngine(
            "tests.agentloop.fake_engine:FakeEngine", {"folder": sys.argv[1]},
            weights_dir=sys.argv[1],
        )
        await engine.start()
        forked = os.fork()
        if not forked:
            time.sleep(600)
        print(engine.pid, forked, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
    """
)


@pytest.mark.faults
async def test_a_sigkill_of_the_owner_ends_the_process_though_a_fork_of_the_owner_lives(
    tmp_path: Path,
) -> None:
    owner = subprocess.Popen(  # noqa: ASYNC220 (a test's own process)
        [sys.executable, "-W", "ignore", "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        line = await asyncio.to_thread(owner.stdout.readline)
        process, forked = map(int, line.split())
        try:
            assert runs(process)
            assert folders(tmp_path)
            owner.kill()
            await until(lambda: not runs(process))
            assert runs(forked)
            assert not folders(tmp_path)
        finally:
            os.kill(forked, signal.SIGKILL)


# -- a model ---------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_model_is_killed_while_it_generates_and_goes_on_with_its_last_weights(
    tmp_path: Path,
) -> None:
    from agentloop.engines.hf import HFEngine
    from agentloop.tiny import make_tiny_model, tiny_model, tiny_tokenizer

    folder = make_tiny_model(tmp_path / "model", family="qwen3")
    trained = tiny_model(tiny_tokenizer(), family="qwen3", seed=1)
    engine = SupervisedEngine(options={"model": str(folder), "threads": 1}, backoff_s=0.01)
    sampling = Sampling(max_tokens=3000, min_tokens=3000, seed=5)
    try:
        await engine.start()
        long = asyncio.create_task(engine.generate(Request("long", [7, 8], sampling)))
        await engine.update_weights(trained.state_dict(), 9)
        kill(engine)
        await until(lambda: engine.restarts == 1 and engine.pid is not None)
        answer = await engine.generate(
            Request("short", [7, 8], Sampling(max_tokens=6, min_tokens=6, seed=5))
        )
        await engine.pause()
        part = await long
    finally:
        await engine.close()
    assert answer.versions == [9] * 6
    assert part.finish_reason == "abort"
    assert set(part.versions) <= {9}
    same = HFEngine(trained, tiny_tokenizer(), threads=1)
    expected = await same.generate(
        Request("short", [7, 8], Sampling(max_tokens=6, min_tokens=6, seed=5))
    )
    await same.close()
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
