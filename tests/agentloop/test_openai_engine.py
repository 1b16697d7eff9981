"""The engine over HTTP, against a server with real sockets that speaks each shape, and lies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentloop.engines.admin import Unsupported
from agentloop.engines.http import (
    EngineTimeout,
    Limits,
    ReplyTooLarge,
    ServerError,
    ServerUnreachable,
)
from agentloop.engines.openai import OpenAIEngine
from agentloop.engines.probe import logprob_kind_of
from agentloop.engines.retry import Budget
from agentloop.engines.shapes.checks import RefusedReply
from agentloop.engines.types import Completion, Engine, EngineError, Request, Sampling
from tests.agentloop.rollout_server import LETTERS, RolloutServer
from tests.deadline import eventually_async

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = LETTERS.prompt(MESSAGES)
FLAVOURS = ["vllm", "vllm-completions", "vllm-chat", "sglang", "sglang-chat"]

SLOW = Budget(base_s=60.0, cap_s=60.0)

FAST = Budget(tries=3, base_s=0.001, cap_s=0.01)


def _request(name: str = "r", **changes: Any) -> Request:
    sampling = Sampling(max_tokens=6, seed=5)
    return replace(Request(name, PROMPT, sampling, messages=MESSAGES, timeout_s=20), **changes)


@asynccontextmanager
async def _engine(
    server: RolloutServer, flavour: str = "auto", **arguments: Any
) -> AsyncIterator[OpenAIEngine]:
    limits = {"retry": FAST, "abort_grace_s": 5.0, **arguments.pop("limits", {})}
    given = {"tokenizer": LETTERS, "logprob_kind": "raw", **arguments}
    engine = OpenAIEngine(server.url, flavour=flavour, limits=Limits(**limits), **given)
    try:
        yield engine
    finally:
        await engine.close()


def _software(flavour: str) -> str:
    return flavour.split("-")[0]


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_every_endpoint_gives_the_same_tokens_and_log_probs(flavour: str) -> None:
    async with RolloutServer("vllm") as other, _engine(other) as engine:
        expected = await engine.generate(_request())
    async with (
        RolloutServer(_software(flavour), version="12", raw_logprobs=True) as server,
        _engine(server, flavour) as engine,
    ):
        found = await engine.generate(_request())
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs)
        assert found.versions == [12] * len(found.token_ids)
        assert found.text == LETTERS.decode(found.token_ids)
        assert (found.ids_source, found.logprob_kind) == ("engine", "raw")
        assert found.prompt_ids in (PROMPT, None)
        # What the server says of its weights is known from then on.
        assert engine.policy_version == 12


@pytest.mark.parametrize(
    ("software", "switches", "path"),
    [
        ("vllm", {}, "/inference/v1/generate"),
        ("vllm", {"scale_out": False}, "/v1/completions"),
        ("sglang", {}, "/generate"),
        ("transformers", {}, "/v1/chat/completions"),
    ],
)
async def test_the_best_endpoint_of_a_server_is_found(
    software: str, switches: dict[str, Any], path: str
) -> None:
    async with RolloutServer(software, **switches) as server, _engine(server) as engine:
        await asyncio.gather(*(engine.generate(_request(f"r{i}")) for i in range(3)))
        assert [asked for asked, _ in server.asked[-3:]] == [path] * 3
        # It is asked once what it is, however many requests wait for that.
        assert len(server.asked) - 3 <= 1


async def test_transformers_is_tokenized_again_and_says_so() -> None:
    async with RolloutServer("transformers") as server, _engine(server, version=3) as engine:
        found = await engine.generate(_request())
        assert (found.ids_source, found.logprobs, found.logprob_kind) == ("retokenized", None, None)
        assert found.token_ids == LETTERS.encode(found.text)[: len(found.token_ids)]
        assert found.versions == [3] * len(found.token_ids)
        # Fields that it does not know would be refused, and none was sent but by the question
        # that finds out what it is.
        assert [body for _, body in server.asked if "return_token_ids" in body] == [
            server.asked[0][1]
        ]


async def test_an_unknown_server_has_to_be_named() -> None:
    async with RolloutServer("other") as server, _engine(server) as engine:
        with pytest.raises(EngineError, match="say which one of"):
            await engine.generate(_request())


async def test_a_server_that_refuses_for_another_reason_is_not_taken_for_transformers() -> None:
    async with RolloutServer("other", refusals=[(422, {})]) as server, _engine(server) as engine:
        with pytest.raises(EngineError, match="say which one of"):
            await engine.generate(_request())


async def test_a_continuation_goes_in_by_ids_where_messages_cannot_say_it() -> None:
    """A response that was cut off is no turn: the template would end it."""
    async with RolloutServer("vllm") as server, _engine(server, "vllm-chat") as engine:
        whole = await engine.generate(_request())
        begun = _request(
            "r2",
            token_ids=[*PROMPT, *whole.token_ids[:2]],
            sampling=Sampling(max_tokens=4, seed=5),
        )
        rest = await engine.generate(begun)
        assert [*whole.token_ids[:2], *rest.token_ids] == whole.token_ids
        assert len(server.bodies("/v1/chat/completions")) == 1
        assert len(server.bodies("/v1/completions")) == 1


@pytest.mark.parametrize("flavour", ["vllm-chat", "sglang-chat"])
async def test_a_template_that_is_another_is_noticed(flavour: str) -> None:
    async with (
        RolloutServer(_software(flavour), prompt_shift=[5, 6]) as server,
        _engine(server, flavour) as engine,
    ):
        if flavour == "sglang-chat":  # ids go past the template
            assert (await engine.generate(_request())).prompt_ids == PROMPT
            return
        with pytest.raises(RefusedReply) as refused:
            await engine.generate(_request())
        assert (refused.value.rule, refused.value.index) == ("prompt", 0)


async def test_spans_of_a_completion_are_versions_of_its_tokens() -> None:
    async with (
        RolloutServer("vllm", spans=[("6", 2), ("7", 100)]) as server,
        _engine(server, version=5) as engine,
    ):
        found = await engine.generate(_request())
        assert found.versions == [6, 6, 7, 7, 7, 7]
        assert engine.policy_version == 7


async def test_a_server_that_says_no_version_has_the_one_that_was_told() -> None:
    async with (
        RolloutServer("vllm", says_versions=False) as server,
        _engine(server, version=5) as engine,
    ):
        found = await engine.generate(_request())
        assert set(found.versions) == {5}
        assert "versions" in found.extra["missing"]


async def test_tokens_keep_the_version_that_they_were_asked_with() -> None:
    async with (
        RolloutServer("vllm", says_versions=False, admin=False) as server,
        _engine(server, version=5) as engine,
    ):
        (task,) = await _under_way(server, engine, 1)
        await engine.set_version(6)
        server.gate.set()
        assert set((await task).versions) == {5}
        assert set((await engine.generate(_request("b"))).versions) == {6}


async def test_routed_experts_cover_every_input_token() -> None:
    for software in ("vllm", "sglang"):
        async with RolloutServer(software, experts_width=4) as server, _engine(server) as engine:
            sampling = Sampling(max_tokens=3, seed=5, routed_experts=True)
            found = await engine.generate(_request(sampling=sampling))
            assert found.routed_experts is not None
            assert found.routed_experts.shape == (len(PROMPT) + len(found.token_ids) - 1, 4)


async def test_stop_strings_make_the_server_write_text() -> None:
    async with RolloutServer("vllm") as server, _engine(server) as engine:
        free = await engine.generate(_request())
        stop = free.text[2]
        sampling = Sampling(max_tokens=6, seed=5, stop=(stop,))
        found = await engine.generate(_request("s", sampling=sampling))
        assert (found.finish_reason, found.text.count(stop)) == ("stop", 1)
        assert found.text.endswith(stop)
        modes = [body["output_mode"] for body in server.bodies("/inference/v1/generate") if body]
        assert modes == ["tokens", "text"]


# -- which log-probs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("software", "raw", "kind"),
    [
        ("vllm", True, "raw"),
        ("vllm", False, "processed"),
        ("sglang", True, "raw"),
        ("sglang", False, "processed"),
    ],
)
async def test_what_log_probs_are_of_is_found_out_once(software: str, raw: bool, kind: str) -> None:
    async with (
        RolloutServer(software, raw_logprobs=raw) as server,
        _engine(server, logprob_kind="probe") as engine,
    ):
        found = await asyncio.gather(*(engine.generate(_request(f"r{i}")) for i in range(3)))
        assert {completion.logprob_kind for completion in found} == {kind}
        probes = [
            body
            for _, body in server.asked
            if "probe" in str(body.get("request_id", body.get("rid")))
        ]
        assert len(probes) in (2, 3)


class _Told:
    """Answers with these log-probs, one list a request, and what was asked."""

    def __init__(self, *answers: list[float], tokens: tuple[list[int], ...] = ()) -> None:
        self.answers = list(answers)
        self.tokens = tokens
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        number = len(self.asked) - 1
        logprobs = self.answers[number]
        ids = self.tokens[number] if self.tokens else [7] * len(logprobs)
        return Completion(ids, logprobs, [0] * len(logprobs), "", "length")


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        # The same but for what batches change in the last bits.
        (([-0.70, -0.31, -1.20], [-0.71, -0.30, -1.19]), "raw"),
        (([-0.70, -0.31, -1.20], [-0.20, -0.05, -0.60]), "processed"),
        (([-0.02, -0.01], [-0.0005, -0.0001]), "processed"),
        # One token is left, and renormalized: 0 at either. The third request has no top-k.
        (([0.0, 0.0], [0.0, 0.0], [-2.0]), "processed"),
        # Sure of everything: nothing can be told.
        (([-1e-5, 0.0], [0.0, 0.0], [-1e-5]), None),
        (([-0.2, -0.2], [-1.0, -1.0]), None),
    ],
)
async def test_the_kind_follows_from_what_temperature_changes(
    answers: tuple[list[float], ...], kind: str | None
) -> None:
    told = _Told(*answers)
    assert await logprob_kind_of(told, _request()) == kind
    sampled = [(r.sampling.temperature, r.sampling.top_k) for r in told.asked]
    assert sampled == [(1.0, 1), (0.5, 1), (1.0, 0)][: len(answers)]


async def test_tokens_after_two_completions_part_tell_nothing_of_the_kind() -> None:
    told = _Told([-0.5, -0.9, -4.0], [-0.5, -0.1, -0.1], tokens=([1, 2, 3], [1, 4, 5]))
    assert await logprob_kind_of(told, _request()) == "raw"


async def test_no_kind_is_claimed_where_none_is_true() -> None:
    async with (
        RolloutServer("sglang", raw_logprobs=False) as server,
        _engine(server, logprob_kind="probe") as engine,
    ):
        cut = Sampling(max_tokens=6, seed=5, top_k=3)
        assert (await engine.generate(_request(sampling=cut))).logprob_kind is None


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_not_now_is_waited_for_and_broken_is_tried_again(flavour: str) -> None:
    async with RolloutServer(_software(flavour)) as server, _engine(server, flavour) as engine:
        # More often than a broken server is tried.
        server.refusals = [(503, {})] * 6 + [(429, {"Retry-After": "0"})] + [(500, {}), (502, {})]
        found = await engine.generate(_request())
        assert len(found.token_ids) == 6
        assert len([1 for _, body in server.asked if body]) == 10


async def test_retry_after_is_waited() -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        await engine.generate(_request())
        server.refusals = [(429, {"Retry-After": "1"})]
        begin = time.monotonic()
        await engine.generate(_request("r2"))
        assert time.monotonic() - begin >= 1


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_the_caller_did_wrong_is_not_tried_again(status: int) -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        server.refusals = [(status, {})]
        with pytest.raises(ServerError, match="not now") as refused:
            await engine.generate(_request())
        assert refused.value.status == status
        assert len(server.bodies("/generate")) == 1


async def test_a_broken_server_is_given_up_after_the_budget() -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        server.refusals = [(500, {})] * 9
        with pytest.raises(ServerError):
            await engine.generate(_request())
        assert len(server.bodies("/generate")) == FAST.tries


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_connection_that_breaks_in_the_body_is_tried_again(flavour: str) -> None:
    async with RolloutServer(_software(flavour)) as server, _engine(server, flavour) as engine:
        server.cuts = 2
        found = await engine.generate(_request())
        assert len(found.token_ids) == 6
        # The server may still know the broken try, and takes a name once.
        path = server.asked[-1][0]
        names = [body.get("request_id", body.get("rid")) for body in server.bodies(path) if body]
        assert [name.partition("~")[0] for name in names] == ["r"] * 3
        assert len(set(names)) == 3
        server.cuts = 3
        with pytest.raises(ServerUnreachable):
            await engine.generate(_request("again"))


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with RolloutServer("vllm") as server:
        pass
    async with _engine(server) as engine:
        with pytest.raises(ServerUnreachable):
            await engine.generate(_request())


@pytest.mark.parametrize("fault", ["hang", "not now"])
async def test_one_deadline_holds_for_all_tries(fault: str) -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        await engine.generate(_request())
        if fault == "hang":
            server.hangs = 1
        else:
            server.refusals = [(503, {})] * 100_000
        begin = time.monotonic()
        with pytest.raises(EngineTimeout, match=r"within 1 s"):
            await engine.generate(_request("slow", timeout_s=1.0))
        assert time.monotonic() - begin < 20
        if fault == "hang":  # its connection was closed, so the server stops too
            await server.until(lambda: server.left == 1)
            server.hangs = 0
        server.refusals = []
        assert len((await engine.generate(_request("next"))).token_ids) == 6


async def test_a_server_that_hangs_while_it_is_asked_what_it_is_holds_to_the_deadline() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    engine = OpenAIEngine(f"http://127.0.0.1:{port}", limits={"retry": {"tries": 1}})
    with pytest.raises(EngineTimeout):
        await engine.generate(_request(timeout_s=0.2))
    await engine.close()
    silent.close()
    await silent.wait_closed()


@pytest.mark.parametrize("told", [False, True], ids=["chunked", "length told"])
async def test_a_reply_over_the_limit_is_not_read_to_its_end(told: bool) -> None:
    async with (
        RolloutServer("sglang") as server,
        _engine(server, "sglang", limits={"max_reply_bytes": 1 << 18}) as engine,
    ):
        if told:
            server.raw_body = b" " * (1 << 20)
        else:
            server.oversized_bytes = 8 << 20
        with pytest.raises(ReplyTooLarge, match="max_reply_bytes"):
            await engine.generate(_request())
        assert len(server.bodies("/generate")) == 1
        server.oversized_bytes, server.raw_body = 0, None
        assert (await engine.generate(_request("r2"))).token_ids


async def test_a_reply_that_says_it_is_over_the_limit_is_not_waited_for() -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        server.claimed_bytes = 1 << 40
        with pytest.raises(ReplyTooLarge, match=str(1 << 40)):
            await engine.generate(_request())


async def test_what_json_does_not_have_is_no_number() -> None:
    async with (
        RolloutServer("sglang", raw_body=b'{"a": NaN}') as server,
        _engine(server, "sglang") as engine,
    ):
        with pytest.raises(EngineError, match="NaN is no number of JSON"):
            await engine.generate(_request())


@pytest.mark.parametrize(
    "raw",
    [b"", b"<html>", b"[1, 2]", b"[" * 100_000, b"\xff\xfe", b'"text"'],
    ids=lambda raw: raw[:6].decode(errors="replace"),
)
async def test_what_is_no_json_object_is_a_typed_error(raw: bytes) -> None:
    async with RolloutServer("sglang", raw_body=raw) as server, _engine(server, "sglang") as engine:
        with pytest.raises(EngineError):
            await engine.generate(_request())


def _vllm_choice(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(reply: dict[str, Any]) -> None:
        reply["choices"][0][name] = change(reply["choices"][0][name])

    return edit


def _floor(told: Any) -> Any:
    told["content"][2]["logprob"] = -9999.0
    return told


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (_vllm_choice("token_ids", lambda ids: ids[:-1]), "lengths"),
        (_vllm_choice("token_ids", lambda ids: [*ids, 1]), "lengths"),
        (_vllm_choice("logprobs", _floor), "logprobs"),
        (_vllm_choice("weight_versions", lambda spans: [{**spans[0], "end": 3}]), "versions"),
        (_vllm_choice("weight_versions", lambda spans: [{**spans[0], "start": 1}]), "versions"),
        (_vllm_choice("finish_reason", lambda reason: "error"), "finish_reason"),
    ],
)
async def test_a_reply_that_breaks_a_rule_is_an_error_and_not_a_sample(
    edit: Callable[[dict[str, Any]], None], rule: str
) -> None:
    async with RolloutServer("vllm", edit=edit) as server, _engine(server) as engine:
        with pytest.raises(RefusedReply) as refused:
            await engine.generate(_request())
        assert refused.value.rule == rule
        assert len([body for body in server.bodies("/inference/v1/generate") if body]) == 1


async def test_the_vocabulary_bounds_ids() -> None:
    async with RolloutServer("vllm") as server, _engine(server, vocab_size=4) as engine:
        with pytest.raises(RefusedReply, match="vocabulary of 4"):
            await engine.generate(_request())


async def test_a_cancelled_request_leaves_the_server_and_the_engine_clean() -> None:
    async with RolloutServer("sglang", hold_after=2) as server, _engine(server, "sglang") as engine:
        task = asyncio.ensure_future(engine.generate(_request()))
        await server.until(lambda: len(server.held) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: not server.running)
        server.hold_after = None
        assert (await engine.generate(_request())).token_ids


# -- the key -------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ROLLOUT_KEY", "s3cret-key")
    async with RolloutServer("vllm", key="s3cret-key") as server:
        async with _engine(server, api_key_env="ROLLOUT_KEY") as engine:
            assert (await engine.generate(_request())).token_ids
            assert set(server.keys) == {"Bearer s3cret-key"}
            assert "s3cret" not in repr(engine)
        # A server that repeats what it was sent.
        server.key = "another"
        async with _engine(server, "vllm", api_key_env="ROLLOUT_KEY", model="m") as engine:
            with pytest.raises(ServerError) as refused:
                await engine.generate(_request())
            assert "wrong key Bearer ***" in str(refused.value)
            assert "s3cret" not in str(refused.value)
    assert "s3cret" not in caplog.text
    monkeypatch.delenv("ROLLOUT_KEY")
    with pytest.raises(EngineError, match="ROLLOUT_KEY"):
        OpenAIEngine(server.url, api_key_env="ROLLOUT_KEY")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"base_url": "file:///etc"}, "http://"), ({"flavour": "tgi"}, "no flavour 'tgi'")],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        OpenAIEngine(**{"base_url": "http://127.0.0.1:1/v1", **arguments})


# -- ending early --------------------------------------------------------------------------------

HELD = 3
"""Tokens that are made before generation stands still."""


async def _under_way(server: RolloutServer, engine: Engine, count: int) -> list[asyncio.Task[Any]]:
    """Requests that have made their first tokens and wait."""
    server.hold_after = HELD
    tasks = [asyncio.ensure_future(engine.generate(_request(f"r{i}"))) for i in range(count)]
    await server.until(lambda: len(server.held) == count)
    return tasks


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("admin", [True, False])
async def test_pause_ends_requests_with_what_they_have(flavour: str, admin: bool) -> None:
    async with (
        RolloutServer(_software(flavour), admin=admin, version="4") as server,
        _engine(server, flavour) as engine,
    ):
        tasks = await _under_way(server, engine, 4)
        await engine.pause()
        assert all(task.done() for task in tasks)
        ended = [task.result() for task in tasks]
        assert {completion.finish_reason for completion in ended} == {"abort"}
        assert server.paused is admin
        assert server.bodies("/abort_requests") == [] or not server.scale_out
        has_abort = admin or flavour.startswith("vllm")
        for completion in ended:
            # A server that has no way to abort cannot say what it had.
            assert len(completion.token_ids) == (HELD if has_abort else 0)
            assert completion.versions == [4] * len(completion.token_ids)
        await engine.resume()
        assert server.paused is False
        server.hold_after = None
        assert len((await engine.generate(_request("next"))).token_ids) == 6


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_what_was_kept_goes_on_with_the_versions_of_both(flavour: str) -> None:
    """Partial rollout: aborted, new weights, continued by token ids."""
    async with (
        RolloutServer(_software(flavour), version="4") as server,
        _engine(server, flavour) as engine,
    ):
        whole = await engine.generate(_request())
        (task,) = await _under_way(server, engine, 1)
        await engine.pause()
        begun = await task
        assert await engine.set_version(5)
        assert server.version == "5"
        await engine.resume()
        server.hold_after = None
        rest = await engine.generate(
            _request(
                "r0",
                token_ids=[*PROMPT, *begun.token_ids],
                sampling=Sampling(max_tokens=6 - len(begun.token_ids), seed=5),
            )
        )
        assert [*begun.token_ids, *rest.token_ids] == whole.token_ids
        assert [*begun.logprobs, *rest.logprobs] == pytest.approx(whole.logprobs)
        assert [*begun.versions, *rest.versions] == [4, 4, 4, 5, 5, 5]


async def test_xtuner_1827_requests_after_an_abort_end_at_once_and_pause_returns_in_its_limit() -> (
    None
):
    """Pause while 3 of 8 sessions run and the server ignores it for one of them."""
    async with (
        RolloutServer("sglang") as server,
        _engine(server, "sglang", limits={"abort_grace_s": 2.0}) as engine,
    ):
        done = await asyncio.gather(*(engine.generate(_request(f"d{i}")) for i in range(5)))
        tasks = await _under_way(server, engine, 3)
        (name,) = [name for name in server.running if name.startswith("r1~")]
        stubborn = server.running.pop(name)
        server.running[name] = asyncio.Event()  # an abort of it reaches nobody
        asked = len(server.asked)
        begin = time.monotonic()
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0)
        late = await asyncio.gather(*(engine.generate(_request(f"l{i}")) for i in range(5)))
        assert not pausing.done()  # they did not wait for it
        await pausing
        assert time.monotonic() - begin < 20
        assert not stubborn.is_set()
        assert [task.result().finish_reason for task in tasks] == ["abort"] * 3
        assert [len(task.result().token_ids) for task in tasks] == [HELD, 0, HELD]
        assert {(c.finish_reason, len(c.token_ids)) for c in late} == {("abort", 0)}
        assert {completion.finish_reason for completion in done} == {"length"}
        # Nothing but the order to pause went out.
        assert [path for path, _ in server.asked[asked:]] == ["/pause_generation"]


async def test_pause_ends_what_has_not_reached_the_server() -> None:
    """Requests that wait for their next try, and those that wait to know what the server is."""
    patient = {"abort_grace_s": 60.0, "retry": SLOW}
    async with (
        RolloutServer("vllm") as server,
        _engine(server, limits=patient, draw=lambda: 1.0) as engine,
    ):
        await engine.generate(_request())
        server.refusals = [(503, {})]
        waiting = asyncio.ensure_future(engine.generate(_request("w")))

        async def waits() -> bool:
            """For its next try: it was refused, and the engine knows."""
            calls = engine._calls.named("w")
            return not server.refusals and not any(call.server_ids for call in calls)

        await eventually_async(waits, "the request waits for its next try")
        async with asyncio.timeout(20):
            await engine.pause()
        assert (await waiting).finish_reason == "abort"
        await engine.resume()
        assert (await engine.generate(_request("next"))).finish_reason != "abort"


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_an_order_overtakes_what_waits_for_a_connection(flavour: str) -> None:
    async with (
        RolloutServer(_software(flavour)) as server,
        _engine(server, flavour, limits={"connections": 2, "abort_grace_s": 60.0}) as engine,
    ):
        server.hold_after = HELD
        tasks = [asyncio.ensure_future(engine.generate(_request(f"r{i}"))) for i in range(6)]
        await server.until(lambda: len(server.held) == 2)
        asked = len(server.asked)
        async with asyncio.timeout(20):
            await engine.pause()
        lengths = sorted(len(task.result().token_ids) for task in tasks)
        assert lengths == [0, 0, 0, 0, HELD, HELD]
        assert len(server.asked) == asked + 1


async def test_a_server_that_was_restarted_with_older_weights_is_believed() -> None:
    async with RolloutServer("sglang", version="7") as server, _engine(server) as engine:
        await engine.generate(_request())
        assert engine.policy_version == 7
        # Asked before the engine was told of 8, answered after.
        (task,) = await _under_way(server, engine, 1)
        await engine.set_version(8)
        server.version = "7"
        server.gate.set()
        await task
        assert engine.policy_version == 8
        server.version = "3"
        assert set((await engine.generate(_request("b"))).versions) == {3}
        assert engine.policy_version == 3


async def test_a_server_that_refuses_because_it_pauses_ends_the_request() -> None:
    patient = {"abort_grace_s": 60.0, "retry": SLOW}
    async with (
        RolloutServer("vllm") as server,
        _engine(server, limits=patient, draw=lambda: 1.0) as engine,
    ):
        (task,) = await _under_way(server, engine, 1)

        def refuse(reply: dict[str, Any]) -> None:
            raise RuntimeError("the request was thrown out")  # becomes a 500

        server.edit = refuse
        logging.getLogger("aiohttp.server").disabled = True
        try:
            async with asyncio.timeout(20):
                await engine.pause()
        finally:
            logging.getLogger("aiohttp.server").disabled = False
        completion = await task
        assert (completion.finish_reason, completion.token_ids) == ("abort", [])


async def test_pause_can_leave_the_server_to_others() -> None:
    async with RolloutServer("vllm") as server, _engine(server, pause_server=False) as engine:
        (task,) = await _under_way(server, engine, 1)
        await engine.pause()
        assert len((await task).token_ids) == HELD
        assert server.paused is False
        await engine.resume()
        assert server.bodies("/resume") == []


async def test_pause_and_resume_may_be_said_twice() -> None:
    async with RolloutServer("vllm") as server, _engine(server) as engine:
        await engine.pause()  # before it was ever asked
        assert (await engine.generate(_request())).finish_reason == "abort"
        assert server.asked == []
        await engine.resume()
        await engine.generate(_request())
        await asyncio.gather(engine.pause(), engine.pause())
        await asyncio.gather(engine.resume(), engine.resume())
        assert server.paused is False
        assert (await engine.generate(_request("b"))).finish_reason != "abort"


async def test_a_server_that_does_not_resume_keeps_the_engine_paused() -> None:
    async with RolloutServer("vllm") as server, _engine(server) as engine:
        await engine.generate(_request())
        await engine.pause()
        address = server.url
        engine._admin_http.address = "http://127.0.0.1:1"
        with pytest.raises(ServerUnreachable):
            await engine.resume()
        assert (await engine.generate(_request())).finish_reason == "abort"
        engine._admin_http.address = address
        await engine.resume()
        assert (await engine.generate(_request("b"))).finish_reason != "abort"


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_abort_ends_one_request_and_no_other(flavour: str) -> None:
    async with RolloutServer(_software(flavour)) as server, _engine(server, flavour) as engine:
        tasks = await _under_way(server, engine, 3)
        await engine.abort("nobody")
        await engine.abort("r1")
        assert [task.done() for task in tasks] == [False, True, False]
        assert (tasks[1].result().finish_reason, len(tasks[1].result().token_ids)) == (
            "abort",
            HELD,
        )
        server.gate.set()
        ended = await asyncio.gather(tasks[0], tasks[2])
        assert {completion.finish_reason for completion in ended} == {"length"}


async def test_abort_where_the_server_cannot_ends_here_with_nothing() -> None:
    async with RolloutServer("transformers") as server, _engine(server) as engine:
        server.hold_after = HELD
        task = asyncio.ensure_future(engine.generate(_request()))
        await server.until(lambda: len(server.held) == 1)
        await engine.abort("r")
        assert (task.result().finish_reason, task.result().token_ids) == ("abort", [])
        await server.until(lambda: server.left == 1)


async def test_close_ends_what_is_under_way_and_takes_nothing_more() -> None:
    async with RolloutServer("sglang") as server, _engine(server, "sglang") as engine:
        tasks = await _under_way(server, engine, 2)
        await engine.close()
        assert {task.result().finish_reason for task in tasks} == {"abort"}
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(_request())


# -- weights -------------------------------------------------------------------------------------


async def test_sglang_takes_weights_through_a_folder(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    async with (
        RolloutServer("sglang", version="1") as server,
        _engine(server, "sglang", weights_dir=str(tmp_path)) as engine,
    ):
        before = await engine.generate(_request())
        for version in (2, 3, 4):
            await engine.update_weights(
                {"a": tied * version, "b": tied.T, "c": tied, "d": tied}, version
            )
        assert engine.policy_version == 4
        body = server.bodies("/update_weights_from_disk")[-1]
        assert body["weight_version"] == "4"
        read = load_file(Path(body["model_path"]) / "model.safetensors")
        assert torch.equal(read["a"], tied * 4)
        assert torch.equal(read["b"], tied.T)
        # The last but one stays: the server may still read it.
        assert sorted(os.listdir(tmp_path)) == ["weights-3", "weights-4"]
        after = await engine.generate(_request("r2"))
        assert (set(before.versions), set(after.versions)) == ({1}, {4})


async def test_weights_that_a_server_does_not_take_change_no_version(tmp_path: Path) -> None:
    async with (
        RolloutServer("sglang", rejects_weights=True) as server,
        _engine(server, "sglang", weights_dir=str(tmp_path), version=1) as engine,
    ):
        with pytest.raises(EngineError, match="no such architecture"):
            await engine.update_weights({"a": torch.zeros(1)}, 2)
        assert engine.policy_version == 1


@pytest.mark.parametrize("software", ["vllm", "sglang", "transformers"])
async def test_tensors_for_a_server_that_cannot_take_them_are_a_typed_error(software: str) -> None:
    async with RolloutServer(software) as server, _engine(server) as engine:
        with pytest.raises(Unsupported, match="set_version"):
            await engine.update_weights({"a": torch.zeros(1)}, 2)
        if software != "sglang":
            with pytest.raises(Unsupported):
                await engine.load_weights("folder", 2)


@pytest.mark.parametrize(
    ("software", "admin", "told"),
    [("vllm", True, True), ("vllm", False, False), ("transformers", False, False)],
)
async def test_a_version_is_told_to_servers_that_listen(
    software: str, admin: bool, told: bool
) -> None:
    async with RolloutServer(software, admin=admin) as server, _engine(server) as engine:
        assert await engine.set_version(9) is told
        assert engine.policy_version == 9
        assert server.version == ("9" if told else "0")


async def test_it_is_an_engine_from_plain_data() -> None:
    config = json.loads(
        json.dumps(
            {
                "base_url": "http://127.0.0.1:1/v1/",
                "flavour": "sglang",
                "limits": {"connections": 4, "retry": {"tries": 2, "base_s": 0.001}},
            }
        )
    )
    engine: Engine = OpenAIEngine(**config)
    assert engine.policy_version == 0
    await engine.close()
