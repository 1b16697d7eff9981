"""Every status of the contract, the limits, and who may do what."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from agentloop.capture import keys, server
from agentloop.capture.server import CaptureServer
from agentloop.capture.settings import RunLimits, UpstreamSettings
from agentloop.engines.http import Limits
from agentloop.engines.retry import Budget
from agentloop.trajectory.state import Status
from dataplane import (
    AlreadyWritten,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
    StaleWrite,
    Unreachable,
)
from tests.agentloop.capture.captured import (
    ADMIN,
    FAST,
    OfRun,
    Setup,
    Shelf,
    capturing,
    user,
)
from tests.deadline import until

CHAT = "/v1/chat/completions"
HI = [user("hi")]


def code(told: Any) -> str:
    return told["error"]["code"]


# -- keys ------------------------------------------------------------------------------------------


async def test_a_wrong_key_learns_nothing() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        other = await setup.agent.start()
        answers = [
            await setup.agent.ask(method, path, {}, key=key)
            for key in (None, "wrong", other.key, keys.new_key(run.run_id))
            for method, path in (
                ("GET", f"/v1/runs/{run.run_id}"),
                ("POST", f"/v1/runs/{run.run_id}/end"),
                ("POST", f"/v1/runs/{run.run_id}/reward"),
                ("DELETE", f"/v1/runs/{run.run_id}"),
                ("POST", f"/runs/{run.run_id}{CHAT}"),
                ("GET", f"/runs/{run.run_id}/v1/models"),
                ("GET", f"/v1/runs/{keys.new_run_id()}"),
                ("POST", "/v1/runs"),
                ("POST", "/v1/steps"),
                ("POST", "/v1/groups"),
                ("POST", "/v1/groups/end"),
                ("GET", "/v1/stats"),
            )
        ]
        assert {status for status, _ in answers} == {401}
        assert len({told["error"]["message"] for _, told in answers}) == 1
        status, _ = await setup.agent.ask("GET", "/health", key=None)
        assert status == 200


async def test_a_runs_key_is_no_servers_key() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        for method, path in (("POST", "/v1/runs"), ("POST", "/v1/steps"), ("GET", "/v1/stats")):
            status, _ = await setup.agent.ask(method, path, {}, key=run.key)
            assert status == 401


async def test_agents_may_be_kept_from_their_own_reward() -> None:
    async with capturing(agents_may_reward=False) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        status, told = await run.end()
        assert (status, code(told)) == (403, "forbidden")
        for method, path in (("POST", "reward"), ("DELETE", "")):
            path = f"/v1/runs/{run.run_id}/{path}".rstrip("/")
            status, _ = await setup.agent.ask(method, path, {"reward": 9}, key=run.key)
            assert status == 403
        run.key = ADMIN
        assert (await run.end())[0] == 200


async def test_keys_are_neither_kept_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with capturing() as setup:
        run = await setup.agent.start()
        kept = setup.capture.runs.find(run.run_id)
        assert kept is not None
        shown = str(await run.shown()) + repr(kept) + repr(vars(setup.capture))
        await setup.agent.ask("GET", "/v1/runs/x", key="a-wrong-secret")
        await run.end()
    for secret in (run.key, ADMIN, "a-wrong-secret"):
        assert secret not in shown
        assert secret not in caplog.text


async def test_others_are_not_let_in_without_a_key() -> None:
    async with capturing() as setup:
        for host in ("0.0.0.0", "::", "example.invalid"):
            listens = CaptureServer(setup.capture, setup.capture._settings)
            with pytest.raises(ValueError, match="insecure_allow_anyone"):
                await listens.start(host, 0)


# -- what is wrong with a request ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"messages": [{"role": "user"}], "temperature": NaN}', "NaN"),
        (b"[]", "JSON object"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": ["hi"]}', "JSON object"),
        (b'{"messages": [{"role": "user"}], "n": 2}', "one choice"),
        (b'{"messages": [{"role": "user"}], "stream": "yes"}', "stream"),
        (b'{"messages": [{"role": "user"}], "stream": 1}', "stream"),
        (b'{"messages": [{"role": "user"}], "seed": 18446744073709551616}', "64 bits"),
        (b'{"messages": [{"role": "user"}], "temperature": 1e999}', "not finite"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        (b'{"messages": [{"\\udc00": "user"}]}', "surrogate"),
        (b'{"messages": [{"role": ' + b"[" * 40 + b"]" * 40 + b"}]}", "levels"),
    ],
)
async def test_a_wrong_chat_request_is_refused(body: bytes, told: str) -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        status, answer = await setup.agent.ask("POST", f"/runs/{run.run_id}{CHAT}", body)
        assert (status, code(answer)) == (400, "invalid_request")
        assert told in answer["error"]["message"]
        assert (await run.shown())["turns"] == []
        assert setup.upstream.bodies(CHAT) == []


@pytest.mark.parametrize(
    "body",
    [
        {"uid": ""}, {"uid": 3}, {"uid": "x" * 513}, {"session_id": -1}, {"session_id": True},
        {"attempt": "1"}, {"tags": []}, {"tags": {"status": "completed"}},
        {"tags": {"dataplane.lost": []}}, {"tags": {"uid": "x"}}, {"colour": 1},
        {"tags": {"level": 1 << 64}}, {"uid": "\ud800"},
    ],
)  # fmt: skip
async def test_a_wrong_start_is_refused(body: dict[str, Any]) -> None:
    async with capturing() as setup:
        status, answer = await setup.agent.ask("POST", "/v1/runs", body)
        assert (status, code(answer)) == (400, "invalid_request")
        assert len(setup.capture.runs) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"reward": "1"}, {"reward": {"why": "x"}}, {"reward": {"score": None}},
        {"reward": 1.0, "finish_reason": "bored"}, {"extra": 3}, {"error": 3},
        {"reward": {"score": 1.0, "seed": 1 << 64}}, {"extra": {"a": "\udfff"}},
    ],
)  # fmt: skip
async def test_a_wrong_reward_is_refused(body: dict[str, Any]) -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        for path in ("reward", "end"):
            status, answer = await setup.agent.ask("POST", f"/v1/runs/{run.run_id}/{path}", body)
            assert (status, code(answer)) == (400, "invalid_request")
        assert (await run.shown())["status"] == "open"
        assert (await run.shown())["reward"] is None


async def test_a_reward_of_no_number_is_no_json_either() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        for raw in (b'{"reward": NaN}', b'{"reward": Infinity}'):
            status, _ = await setup.agent.ask("POST", f"/v1/runs/{run.run_id}/reward", raw)
            assert status == 400


async def test_paths_and_methods_that_are_none() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        for method, path, expected in (
            ("POST", f"/runs/{run.run_id}/v1/responses", (404, "no_such_path")),
            ("PUT", "/v1/runs", (405, "no_such_method")),
            ("GET", f"/v1/runs/{keys.new_run_id()}", (404, "no_such_run")),
            ("POST", CHAT, (400, "invalid_request")),
        ):
            status, told = await setup.agent.ask(method, path, {})
            assert (status, code(told)) == expected


async def test_a_body_that_is_too_large_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with capturing(limits=RunLimits(max_body_bytes=1000)) as setup:
        run = await setup.agent.start()
        status, told = await run.chat([user("x" * 1000)])
        assert (status, code(told)) == (413, "too_large")
        monkeypatch.setattr(server, "BODY_S", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(setup.agent.url[-5:]))
        head = f"POST /runs/{run.run_id}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        writer.write(f"{head}Authorization: Bearer {run.key}\r\n\r\n{{".encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        await writer.wait_closed()


# -- the upstream ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_the_upstream_says_of_a_request_is_told_as_it_is(status: int) -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        setup.upstream.refusals = [(status, {})]
        found, told, headers = await setup.agent.whole(
            "POST", f"/runs/{run.run_id}{CHAT}", {"messages": HI, "max_tokens": 2}
        )
        assert (found, code(told)) == (status, "upstream_refused")
        assert told["error"]["message"] == "not now"
        assert headers["x-should-retry"] == "false"
        assert (await run.shown())["turns"] == []


@pytest.mark.parametrize("refusals", [[(500, {})] * 2, [(401, {})], [(403, {})], [(302, {})]])
async def test_an_upstream_that_fails_is_502(refusals: list[Any]) -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        setup.upstream.refusals = list(refusals)
        status, told = await run.chat(HI)
        assert (status, code(told)) == (502, "upstream_failed")
        assert (await run.shown())["turns"] == []
        assert (await run.chat(HI))[0] == 200  # the run goes on


async def test_an_upstream_that_is_not_there_breaks_off_or_talks_nonsense_is_502() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        setup.upstream.cuts = 2
        assert (await run.chat(HI))[0] == 502
        setup.upstream.raw_body = b"<html>"
        assert (await run.chat(HI))[0] == 502
        setup.upstream.raw_body = b"[]"
        assert (await run.chat(HI))[0] == 502
        setup.upstream.raw_body = None
        setup.upstream.claimed_bytes = 1 << 40
        assert (await run.chat(HI))[0] == 502
    async with capturing(upstream={"url": "http://127.0.0.1:1"}) as setup:
        run = await setup.agent.start()
        status, told = await run.chat(HI)
        assert (status, code(told)) == (502, "upstream_failed")


async def test_an_upstream_that_hangs_is_504() -> None:
    limits = replace(FAST, request_timeout_s=0.1)
    async with capturing(upstream={"limits": limits}) as setup:
        run = await setup.agent.start()
        setup.upstream.hangs = 1
        status, told = await run.chat(HI)
        assert (status, code(told)) == (504, "upstream_timeout")
        assert (await run.shown())["under_way"] == []


async def test_an_upstream_that_is_busy_is_waited_for() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        setup.upstream.refusals = [(503, {}), (429, {}), (503, {})]
        assert (await run.chat(HI))[0] == 200


async def test_a_server_that_says_no_tokens_is_not_captured() -> None:
    async with capturing("transformers", upstream={"flavour": "auto"}) as setup:
        run = await setup.agent.start()
        status, told = await run.chat(HI)
        assert (status, code(told)) == (502, "upstream_failed")
        assert "no token ids" in told["error"]["message"]


async def test_the_upstreams_key_is_sent_and_never_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("UPSTREAM_KEY", "sk-of-upstream")
    async with capturing(upstream={"api_key_env": "UPSTREAM_KEY"}) as setup:
        run = await setup.agent.start()
        setup.upstream.key = "sk-of-upstream"
        assert (await run.chat(HI))[0] == 200
        assert setup.upstream.keys[-1] == "Bearer sk-of-upstream"
        setup.upstream.key = "another"
        status, told = await run.chat(HI)
        assert status == 502
        assert "sk-of-upstream" not in str(told) + caplog.text


# -- a run's end -----------------------------------------------------------------------------------


async def test_a_run_ends_once_and_answers_the_same() -> None:
    async with capturing() as setup:
        run = await setup.agent.start(uid="u", tags={"level": 3})
        await run.say(HI)
        status, told = await run.end(0.5, extra={"won": True})
        assert status == 200
        (row,) = told["trajectories"]
        assert (row["key"], row["status"], row["policy_len"]) == ("u_0_0", "completed", 6)
        assert await run.end(0.5) == (200, told)
        assert await run.end(None) == (200, told)
        status, refused = await run.end(0.75)
        assert (status, code(refused)) == (409, "run_ended")
        status, refused = await run.chat(HI)
        assert (status, code(refused)) == (409, "run_ended")
        path = f"/v1/runs/{run.run_id}/reward"
        status, refused = await setup.agent.ask("POST", path, {"reward": 1})
        assert (status, code(refused)) == (409, "run_ended")
        assert (await run.shown())["outcome"] == told
        (state,) = setup.publisher.states
    assert state.reward == {"score": 0.5}
    assert state.extra["won"] is True


async def test_a_reward_before_the_end_and_with_it() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        await run.say(HI)
        path = f"/v1/runs/{run.run_id}/reward"
        status, told = await run.end(None)
        assert (status, code(told)) == (409, "no_reward")
        status, told = await setup.agent.ask("POST", path, {"reward": {"score": 1, "why": "x"}})
        assert (status, told["reward"]) == (200, {"score": 1.0, "why": "x"})
        await run.say(HI)  # it may go on
        status, told = await setup.agent.ask("POST", path, {"reward": 2.0, "end": True})
        assert (status, told["reward"]) == (200, {"score": 2.0})
        assert len(setup.publisher.states) == 2


@pytest.mark.parametrize(("finish", "status"), [("abort", "aborted"), ("error", "failed")])
async def test_a_run_without_a_reward_ends_as_aborted_or_failed(finish: str, status: str) -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        await run.say(HI)
        found, told = await run.end(None, finish_reason=finish, error="out of time")
        assert found == 200
        (row,) = told["trajectories"]
        assert (row["status"], row["error"]) == (status, "out of time")
        assert told["rejected"] == []


class Slow(Shelf):
    """Publishes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def publish(self, publication: Any) -> None:
        self.asked.set()
        await self.gate.wait()
        await super().publish(publication)


async def test_two_ends_at_once_are_one() -> None:
    slow = Slow()
    async with capturing(publisher=slow) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        first = asyncio.create_task(run.end())
        await slow.asked.wait()
        status, told = await run.end()
        assert (status, code(told)) == (409, "run_ending")
        assert (await run.chat(HI))[1]["error"]["code"] == "run_ended"
        status, told = await setup.agent.ask("DELETE", f"/v1/runs/{run.run_id}")
        assert (status, code(told)) == (409, "run_ending")
        slow.gate.set()
        assert await first == await run.end()
        assert len(slow.publications) == 1


async def test_who_gives_up_on_an_end_does_not_stop_it() -> None:
    slow = Slow()
    async with capturing(publisher=slow) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        kept = setup.capture.runs.find(run.run_id)
        assert kept is not None
        ending = asyncio.create_task(setup.capture.end(kept, {"reward": 1.0}))
        await slow.asked.wait()
        ending.cancel()
        await asyncio.wait({ending})
        slow.gate.set()
        await until(lambda: kept.phase == "ended")
        assert len(slow.publications) == 1


async def test_a_turn_that_comes_after_the_end_is_not_recorded() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        await run.say(HI)
        setup.upstream.hold_after = 1
        late = asyncio.create_task(run.chat([user("late")]))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        assert (await run.end())[0] == 200
        setup.upstream.gate.set()
        status, told = await late
        assert (status, code(told)) == (409, "run_ended")
        assert len(setup.publisher.states) == 1
        assert setup.capture.runs.counts.late_turns == 1


@pytest.mark.parametrize("error", [Unreachable("x"), OutcomeUnknown("x", request_id="c/1")])
async def test_a_plane_that_cannot_be_had_keeps_the_run(error: Exception) -> None:
    shelf = Shelf(errors=[error, error])
    async with capturing(publisher=shelf) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        for _ in range(2):
            status, told = await run.end()
            assert (status, code(told)) == (503, "plane_unavailable")
        assert (await run.chat(HI))[0] == 409  # its rows may be there in part
        assert (await run.shown())["status"] == "closed"
        assert (await run.end(0.25))[0] == 409
        status, told = await run.end()
        assert (status, told["reward"]) == (200, {"score": 1.0})
        assert len(shelf.states) == 1


@pytest.mark.parametrize(
    ("error", "word"),
    [(StaleWrite("closed"), "attempt_closed"), (AlreadyWritten("there"), "already_written")],
)
async def test_a_run_that_comes_too_late_says_so_each_time(error: Exception, word: str) -> None:
    async with capturing(publisher=Shelf(errors=[error])) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        for _ in range(2):
            status, told = await run.end()
            assert (status, code(told)) == (409, word)
        assert (await run.shown())["status"] == "ended"


@pytest.mark.parametrize("error", [InvalidRequest("no"), PermissionDenied("no")])
async def test_a_plane_that_refuses_keeps_the_run(error: Exception) -> None:
    async with capturing(publisher=Shelf(errors=[error])) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        status, told = await run.end()
        assert (status, code(told)) == (409, "plane_refused")
        assert (await run.end())[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "error", "expected"),
    [
        ("", {"n": 2}, None, (201, None)),
        ("", {"n": 0}, None, (400, "invalid_request")),
        ("", {"uid": "", "n": 1}, None, (400, "invalid_request")),
        ("", {"n": 1, "declared_bytes": -1}, None, (400, "invalid_request")),
        ("", {"n": 2}, InvalidRequest("x"), (409, "plane_refused")),
        ("", {"n": 2}, Unreachable("x"), (503, "plane_unavailable")),
        ("/end", {"attempt": 17}, None, (200, None)),
        ("/end", {}, None, (400, "invalid_request")),
        ("/end", {"attempt": 17}, StaleWrite("x"), (409, "attempt_closed")),
        ("/end", {"attempt": 17}, Unreachable("x"), (503, "plane_unavailable")),
    ],
)
async def test_groups_are_begun_and_ended(
    path: str, body: dict[str, Any], error: Exception | None, expected: tuple[int, str | None]
) -> None:
    shelf = Shelf(errors=[] if error is None else [error])
    async with capturing(publisher=shelf) as setup:
        status, told = await setup.agent.ask("POST", f"/v1/groups{path}", body)
        assert (status, told.get("error", {}).get("code")) == expected


async def test_a_run_that_is_dropped_is_gone() -> None:
    async with capturing() as setup:
        run = await setup.agent.start(uid="u")
        await run.say(HI)
        path = f"/v1/runs/{run.run_id}"
        status, told = await setup.agent.ask("DELETE", path, key=run.key)
        assert (status, told) == (204, "")
        status, told = await setup.agent.ask("GET", path)
        assert (status, code(told)) == (404, "no_such_run")
        assert setup.publisher.publications == []
        await setup.agent.start(uid="u")  # its name is free again


# -- limits ----------------------------------------------------------------------------------------


async def _refused(setup: Setup, run: OfRun, status: int, word: str) -> Any:
    found, told, headers = await setup.agent.whole(
        "POST", f"/runs/{run.run_id}{CHAT}", {"messages": HI, "max_tokens": 2}
    )
    assert (found, code(told)) == (status, word)
    return headers


async def test_there_are_only_so_many_runs() -> None:
    async with capturing(limits=RunLimits(max_runs=2)) as setup:
        run, _ = await setup.agent.start(), await setup.agent.start()
        status, told, headers = await setup.agent.whole("POST", "/v1/runs", {})
        assert (status, code(told)) == (429, "too_many_runs")
        assert int(headers["Retry-After"]) >= 1
        await run.end(None, finish_reason="abort")
        await setup.agent.start()


async def test_a_run_has_only_so_many_turns() -> None:
    async with capturing(limits=RunLimits(max_turns=2)) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        setup.upstream.edit = lambda reply: reply.pop("prompt_token_ids")
        await run.say(HI)  # one that is refused counts
        headers = await _refused(setup, run, 413, "run_full")
        assert headers["x-should-retry"] == "false"
        assert (await run.end())[0] == 200


async def test_turns_under_way_count() -> None:
    async with capturing(limits=RunLimits(max_turns=1)) as setup:
        run = await setup.agent.start()
        setup.upstream.hold_after = 1
        asking = asyncio.create_task(run.chat(HI))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        await _refused(setup, run, 413, "run_full")
        setup.upstream.gate.set()
        assert (await asking)[0] == 200


async def test_a_run_has_only_so_many_bytes() -> None:
    async with capturing(limits=RunLimits(max_run_bytes=12_000)) as setup:
        run = await setup.agent.start()
        for _ in range(20):
            status, told = await run.chat(HI)
            if status != 200:
                break
        assert (status, code(told)) == (413, "run_full")
        shown = await run.shown()
        assert shown["bytes"] < 12_000 + 3_000  # one turn may go over it
        assert len(shown["turns"]) > 2
        assert (await run.end())[0] == 200
        assert setup.capture.runs.nbytes == 0


async def test_all_runs_have_only_so_many_bytes() -> None:
    async with capturing(limits=RunLimits(max_bytes=12_000)) as setup:
        run = await setup.agent.start()
        other = await setup.agent.start()
        while (await run.chat(HI))[0] == 200:
            pass
        await _refused(setup, other, 429, "too_many_bytes")
        status, told = await setup.agent.ask("POST", "/v1/runs", {})
        assert (status, code(told)) == (429, "too_many_bytes")
        await run.end()
        assert (await other.chat(HI))[0] == 200


async def test_there_are_only_so_many_requests() -> None:
    async with capturing(limits=RunLimits(max_requests=1)) as setup:
        run = await setup.agent.start()
        setup.upstream.hold_after = 1
        asking = asyncio.create_task(run.chat(HI))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        await _refused(setup, run, 429, "too_many_requests")
        setup.upstream.gate.set()
        assert (await asking)[0] == 200
        assert (await run.chat(HI))[0] == 200


async def test_only_so_many_answers_of_ended_runs_are_known() -> None:
    async with capturing(limits=RunLimits(max_ended=2)) as setup:
        runs = [await setup.agent.start(uid=f"u{number}") for number in range(3)]
        for run in runs:
            await run.say(HI)
            assert (await run.end())[0] == 200
        assert (await runs[0].end())[0] == 401  # as if it had never been
        assert [(await run.end())[0] for run in runs[1:]] == [200, 200]


async def test_a_session_has_one_run() -> None:
    async with capturing() as setup:
        run = await setup.agent.start(uid="u", session_id=1)
        await setup.agent.start(uid="u", session_id=2)
        for _ in range(2):
            status, told = await setup.agent.ask("POST", "/v1/runs", {"uid": "u", "session_id": 1})
            assert (status, code(told)) == (409, "identity_in_use")
            assert run.run_id in told["error"]["message"]
            await run.end(None, finish_reason="abort")


async def test_what_is_too_old_for_the_trainer_is_not_begun_and_not_gone_on_with() -> None:
    async with capturing(limits=RunLimits(max_lag=1)) as setup:
        setup.upstream.version = "3"
        run = await setup.agent.start()
        await run.say(HI)
        steps = setup.agent.ask
        assert (await steps("POST", "/v1/steps", {"global_steps": 5}))[0] == 200
        assert (await run.chat(HI))[0] == 200  # 5 - 3 - 1 is what is allowed
        other = await setup.agent.start()
        assert (await steps("POST", "/v1/steps", {"global_steps": 6}))[0] == 200
        headers = await _refused(setup, run, 429, "too_stale")
        assert headers["x-should-retry"] == "false"
        status, told = await setup.agent.ask("POST", "/v1/runs", {})
        assert (status, code(told)) == (429, "too_stale")
        assert (await run.end())[0] == 200
        assert (await steps("POST", "/v1/steps", {"global_steps": -1}))[0] == 400
        (state,) = (s for s in setup.publisher.states if s.index == 0)
        assert setup.publisher.publications[0].identity.global_steps is None
        assert state.response_model_steps == [3] * 6
        await other.end(None, finish_reason="abort")
        assert setup.publisher.publications[1].identity.global_steps == 5


# -- runs that nobody ends -------------------------------------------------------------------------


@pytest.mark.parametrize("on_idle", ["publish", "drop"])
async def test_a_run_that_is_idle_ends_by_itself(on_idle: Any) -> None:
    async with capturing(limits=RunLimits(idle_s=10.0, on_idle=on_idle)) as setup:
        idle, busy = await setup.agent.start(), await setup.agent.start()
        await idle.say(HI)
        setup.clock.now_s += 9.0
        await busy.say(HI)
        assert await setup.capture.expire() == 0
        setup.clock.now_s += 2.0
        assert await setup.capture.expire() == 1
        assert setup.capture.runs.counts.expired_runs == 1
        assert len(setup.capture.runs) == 1
        if on_idle == "publish":
            (state,) = setup.publisher.states
            assert (state.status, state.reward) == (Status.ABORTED, None)
            assert state.response_ids
        else:
            assert setup.publisher.publications == []
            assert setup.capture.runs.counts.dropped_runs == 1
        assert (await busy.end())[0] == 200


async def test_a_run_that_is_idle_keeps_the_reward_that_it_was_given() -> None:
    async with capturing(limits=RunLimits(idle_s=10.0)) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        await setup.agent.ask("POST", f"/v1/runs/{run.run_id}/reward", {"reward": 0.5})
        setup.clock.now_s += 11.0
        assert await setup.capture.expire() == 1
        (state,) = setup.publisher.states
        assert (state.status, state.reward) == (Status.COMPLETED, {"score": 0.5})


async def test_a_run_with_a_turn_under_way_is_not_idle() -> None:
    async with capturing(limits=RunLimits(idle_s=10.0)) as setup:
        run = await setup.agent.start()
        setup.upstream.hold_after = 1
        asking = asyncio.create_task(run.chat(HI))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        setup.clock.now_s += 100.0
        assert await setup.capture.expire() == 0
        setup.upstream.gate.set()
        await asking
        assert await setup.capture.expire() == 0  # it was asked for something just now


async def test_a_run_that_could_not_be_published_is_tried_again_when_it_is_idle() -> None:
    shelf = Shelf(errors=[Unreachable("x"), Unreachable("x")])
    async with capturing(publisher=shelf, limits=RunLimits(idle_s=10.0)) as setup:
        run = await setup.agent.start()
        await run.say(HI)
        assert (await run.end())[0] == 503
        for _ in range(2):
            setup.clock.now_s += 11.0
            assert await setup.capture.expire() == 1
        (state,) = shelf.states
        assert (state.status, state.reward) == (Status.COMPLETED, {"score": 1.0})
        assert setup.capture.runs.counts.expired_runs == 0


async def test_what_happened_is_counted() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        await run.say(HI)
        await run.end()
        await run.chat(HI)
        status, told = await setup.agent.ask("GET", "/v1/stats")
        assert status == 200
        assert (told["runs"], told["ended"], told["bytes"]) == (0, 1, 0)
        counts = told["counts"]
        assert (counts["started"], counts["turns"], counts["published_trajectories"]) == (1, 1, 1)
        assert counts["refusals"] == {"run_ended": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_runs": 0}, {"max_turns": 0}, {"idle_s": 0}, {"on_idle": "sleep"}, {"max_lag": -1},
    ],
)  # fmt: skip
def test_limits_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunLimits(**wrong)


def test_a_flavour_that_cannot_be_captured_is_refused() -> None:
    limits = Limits(retry=Budget())
    with pytest.raises(ValueError, match="vllm-chat"):
        UpstreamSettings("http://x", flavour="transformers", limits=limits)
