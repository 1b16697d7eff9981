"""Turns through a capture: what the server is asked, what the agent gets, what is kept."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest

from agentloop.trajectory.state import RolloutState, Status
from dataplane.fields import IGNORED
from tests.agentloop.capture.captured import (
    ADMIN,
    OfRun,
    Setup,
    assistant,
    capturing,
    prompt_ids,
    user,
)
from tests.agentloop.rollout_server import LETTERS, RolloutServer
from tests.deadline import until

CHAT = "/v1/chat/completions"


async def _ended(setup: Setup, run: OfRun) -> list[RolloutState]:
    status, told = await run.end()
    assert status == 200, told
    return setup.publisher.states


@pytest.mark.parametrize("software", ["vllm", "sglang"])
async def test_two_turns_are_one_trajectory_with_the_servers_own_tokens(software: str) -> None:
    made: list[dict[str, Any]] = []
    async with capturing(software, upstream={"flavour": "auto", "model": None}) as setup:
        setup.upstream.edit = made.append
        run = await setup.agent.start(uid="u", session_id=2)
        first = await run.say([user("hi")])
        dialogue = [user("hi"), assistant(first["content"]), user("more")]
        second = await run.say(dialogue)
        (state,) = await _ended(setup, run)
    choices = [reply["choices"][0] for reply in made]
    name = "token_ids" if software == "vllm" else "response_token_ids"
    a, b = (choice[name] for choice in choices)
    before, after = prompt_ids(user("hi")), prompt_ids(*dialogue)
    canonical = state.canonical
    assert canonical is not None
    assert canonical.input_ids == after + b
    gap = len(after) - len(before) - len(a)
    holes = [IGNORED] * len(before)
    assert canonical.labels == [*holes, *a, *[IGNORED] * gap, *b]
    logprobs = [[e["logprob"] for e in choice["logprobs"]["content"]] for choice in choices]
    expected = [*[0.0] * len(before), *logprobs[0], *[0.0] * gap, *logprobs[1]]
    assert np.array(canonical.logprobs, np.float32).tolist() == (
        np.array(expected, np.float32).tolist()
    )
    assert state.conversation == [*dialogue, assistant(second["content"])]
    assert (state.uid, state.session_id, state.index, state.num_turns) == ("u", 2, 0, 2)
    assert state.reward == {"score": 1.0}


async def test_the_server_is_asked_for_tokens_and_every_sampling_parameter() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        await run.say([user("hi")], temperature=0.5, tools=None, stream_options=None, n=1)
        (body,) = setup.upstream.bodies(CHAT)
        (state,) = await _ended(setup, run)
    assert body["model"] == "m"  # whatever the agent calls it
    assert body["messages"] == [user("hi")]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 1.0, -1)
    assert body["max_tokens"] == 6
    assert "max_completion_tokens" not in body
    for name in ("logprobs", "return_token_ids", "return_weight_versions"):
        assert body[name] is True
    assert (body["stream"], body["n"], body["top_logprobs"]) == (False, 1, 0)
    assert body["request_id"].startswith(f"{run.run_id}-0~")
    (turn,) = state.extra["capture"]["turns"]
    assert (turn["sampling"]["temperature"], turn["sampling"]["max_tokens"]) == (0.5, 6)


async def test_a_forced_temperature_wins() -> None:
    async with capturing("vllm", upstream={"forced": {"temperature": 1.0}}) as setup:
        run = await setup.agent.start()
        await run.say([user("hi")], temperature=0.1)
        assert setup.upstream.bodies(CHAT)[0]["temperature"] == 1.0


async def test_the_agent_gets_the_servers_answer_less_what_it_did_not_ask_for() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        _, plain = await run.chat([user("hi")])
        _, full = await run.chat([user("hi")], logprobs=True, return_token_ids=True)
    (choice,) = plain["choices"]
    assert "prompt_token_ids" not in plain
    assert not {"token_ids", "weight_versions"} & set(choice)
    assert choice["logprobs"] is None
    assert plain["usage"]["completion_tokens"] == 6
    (choice,) = full["choices"]
    assert full["prompt_token_ids"] == prompt_ids(user("hi"))
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 6
    assert not choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert "weight_versions" not in choice


async def test_parallel_turns_are_right_whatever_order_they_end_in() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        first = await run.say([user("hi")])
        begun = [user("hi"), assistant(first["content"])]
        setup.upstream.hold_after = 2
        slow = asyncio.create_task(run.say([*begun, user("a")]))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        setup.upstream.hold_after = None
        fast = await run.say([*begun, user("b")])
        later = await run.say([*begun, user("b"), assistant(fast["content"]), user("c")])
        setup.upstream.gate.set()
        late = await slow
        shown = await run.shown()
        one, other = await _ended(setup, run)
    assert [branch["turns"] for branch in shown["branches"]] == [[0, 1], [0, 2, 3]]
    assert one.conversation == [*begun, user("a"), assistant(late["content"])]
    assert other.conversation == [
        *begun, user("b"), assistant(fast["content"]), user("c"), assistant(later["content"]),
    ]  # fmt: skip
    for state, count in ((one, 12), (other, 12)):  # the shared turn is trained in the first
        assert state.canonical is not None
        assert sum(label != IGNORED for label in state.canonical.labels) == count
        assert state.canonical.input_ids[: len(prompt_ids(user("hi")))] == prompt_ids(user("hi"))


async def test_a_turn_whose_text_is_tokenized_otherwise_begins_a_branch() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        first = await run.say([user("hi")])
        changed = "?" + first["content"][1:]  # as a template that strips thoughts does
        await run.say([user("hi"), assistant(changed), user("more")])
        one, other = await _ended(setup, run)
    size = len(prompt_ids(user("hi")))
    assert other.extra["capture"]["differs_at"] == size
    assert other.extra["capture"]["differs_from"] == 0
    assert (one.index, other.index) == (0, 1)


async def test_policy_versions_are_those_of_the_server() -> None:
    async with capturing("vllm") as setup:
        setup.upstream.spans = [("7", 2), ("8", 9)]
        run = await setup.agent.start()
        await run.say([user("hi")])
        assert setup.capture.steps.served == 8
        (state,) = await _ended(setup, run)
    assert state.response_model_steps == [7, 7, 8, 8, 8, 8]
    assert state.meta is not None
    assert state.meta.policy_spans == ((7, 2), (8, 4))


async def test_a_version_that_the_server_does_not_say_is_the_one_that_was_told() -> None:
    async with capturing("vllm") as setup:
        setup.upstream.says_versions = False
        run = await setup.agent.start()
        await run.say([user("hi")])
        status, _ = await setup.agent.ask("POST", "/v1/steps", {"policy_version": 5})
        assert status == 200
        other = await setup.agent.start()
        await other.say([user("hi")])
        await run.end()
        await other.end()
        unknown, told = (p.ended.states[0] for p in setup.publisher.publications)
    assert unknown.response_model_steps == []
    assert told.response_model_steps == [5] * 6


async def test_what_log_probs_are_of_is_found_out_once() -> None:
    async with capturing("vllm", upstream={"logprob_kind": "probe"}) as setup:
        setup.upstream.raw_logprobs = False
        run = await setup.agent.start()
        await run.say([user("hi")])
        asked = len(setup.upstream.bodies(CHAT))
        await run.say([user("again")])
        assert len(setup.upstream.bodies(CHAT)) == asked + 1
        one, _ = await _ended(setup, run)
    assert one.logprob_kind == "processed"


# -- replies that may not be trained on ------------------------------------------------------------


def _logprob(value: Any) -> Any:
    def edit(reply: dict[str, Any]) -> None:
        reply["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    return edit


def _drop(name: str) -> Any:
    def edit(reply: dict[str, Any]) -> None:
        reply.pop(name, None)
        for choice in reply["choices"]:
            choice.pop(name, None)

    return edit


def _set(name: str, value: Any) -> Any:
    def edit(reply: dict[str, Any]) -> None:
        reply["choices"][0][name] = value

    return edit


REFUSED = {
    "too few tokens": (lambda reply: reply["choices"][0]["token_ids"].pop(), "lengths"),
    "a wrong count": (
        lambda reply: reply["usage"].update(completion_tokens=5), "lengths",
    ),
    "minus infinity": (_logprob(-9999.0), "minus infinity"),
    "above 0": (_logprob(0.01), "log-probability"),
    "no number": (_logprob("x"), "no number"),
    "an id out of range": (_set("token_ids", [1, 2, 3, 4, 5, 90]), "vocabulary"),
    "a gap between spans": (
        _set("weight_versions", [{"version": "1", "start": 1, "end": 6}]), "weight_versions",
    ),
    "a version that goes down": (
        _set("weight_versions", [
            {"version": "2", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 6},
        ]), "goes down",
    ),
    "an unknown end": (_set("finish_reason", "bored"), "finish_reason"),
    "no prompt": (_drop("prompt_token_ids"), "prompt_ids is missing"),
    "no log-probs": (_drop("logprobs"), "logprobs is missing"),
    "half a character": (
        lambda reply: reply["choices"][0]["message"].update(content="\ud83d"), "surrogate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
async def test_a_reply_that_breaks_a_rule_is_answered_and_never_trained(what: str) -> None:
    edit, reason = REFUSED[what]
    async with capturing("vllm", upstream={"vocab_size": 90}) as setup:
        run = await setup.agent.start(uid="u")
        setup.upstream.edit = edit
        status, answer = await run.chat([user("hi")])
        assert status == 200
        assert answer["choices"][0]["message"]["content"]
        setup.upstream.edit = None
        (state,) = await _ended(setup, run)
        publication = setup.publisher.publications[0]
        counts = setup.capture.runs.counts
    assert (state.status, state.failure) == (Status.FAILED, "ingest")
    assert state.error_msg is not None
    assert reason in state.error_msg
    (rejected,) = publication.ended.rejected
    assert rejected.reason == state.error_msg
    assert json.loads(rejected.evidence["reply"])["choices"]
    assert (counts.refused_turns, counts.failed_trajectories, counts.rejected) == (1, 1, 1)


async def test_a_rounding_error_above_0_is_none() -> None:
    async with capturing("vllm") as setup:
        setup.upstream.edit = _logprob(0.00005)
        run = await setup.agent.start()
        await run.say([user("hi")])
        (state,) = await _ended(setup, run)
    assert state.canonical is not None
    assert state.canonical.logprobs is not None
    assert max(state.canonical.logprobs) == 0.0
    assert all(map(math.isfinite, state.canonical.logprobs))


async def test_a_prompt_with_an_image_is_answered_and_not_trained() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    def as_text(messages: Any, tools: Any = ()) -> list[int]:
        return [5, 6]

    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        original, LETTERS.prompt = LETTERS.prompt, as_text  # type: ignore[method-assign]
        try:
            status, _ = await run.chat([image])
        finally:
            LETTERS.prompt = original  # type: ignore[method-assign]
        assert status == 200
        (state,) = await _ended(setup, run)
    assert state.error_msg is not None
    assert "image_url" in state.error_msg


async def test_a_refused_turn_costs_a_run_its_other_turns_not() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        await run.say([user("hi")])
        setup.upstream.edit = _logprob(-9999.0)
        await run.say([user("bad")])
        shown = await run.shown()
        (state,) = await _ended(setup, run)
        (rejected,) = setup.publisher.publications[0].ended.rejected
    assert [turn["number"] for turn in shown["refused"]] == [1]
    assert (state.status, state.index) == (Status.COMPLETED, 0)
    assert rejected.name == "turn-1"


# -- agents that ask again -------------------------------------------------------------------------


async def test_a_retry_with_its_key_is_answered_the_same_and_recorded_once() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        first = await run.chat([user("hi")], h_Idempotency_Key="k1")
        again = await run.chat([user("hi")], h_Idempotency_Key="k1")
        other = await run.chat([user("hi")], h_Idempotency_Key="k2")
        assert first == again
        assert other[0] == 200
        assert len(setup.upstream.bodies(CHAT)) == 2
        assert [turn["number"] for turn in (await run.shown())["turns"]] == [0, 1]
        status, refused = await run.chat([user("ho")], h_Idempotency_Key="k1")
        assert (status, refused["error"]["code"]) == (409, "idempotency_key_reused")


async def test_a_retry_of_a_turn_that_was_refused_is_answered_the_same() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        setup.upstream.edit = _logprob(-9999.0)
        first = await run.chat([user("hi")], h_Idempotency_Key="k")
        assert await run.chat([user("hi")], h_Idempotency_Key="k") == first
        assert len((await run.shown())["refused"]) == 1
        assert len(setup.upstream.bodies(CHAT)) == 1


async def test_a_retry_waits_for_the_answer_of_the_request_that_was_given_up() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        setup.upstream.hold_after = 1
        ask = {"h_Idempotency_Key": "k"}
        first = asyncio.create_task(run.chat([user("hi")], **ask))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        first.cancel()
        again = asyncio.create_task(run.chat([user("hi")], **ask))
        await until(lambda: setup.capture.runs.counts.repeated_turns == 1)
        setup.upstream.gate.set()
        status, _ = await again
        assert status == 200
        assert len(setup.upstream.bodies(CHAT)) == 1
        assert len((await run.shown())["turns"]) == 1


async def test_a_retry_after_a_failure_is_a_new_try() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        setup.upstream.refusals = [(500, {}), (500, {})]
        ask = {"h_Idempotency_Key": "k"}
        status, _ = await run.chat([user("hi")], **ask)
        assert status == 502
        status, _ = await run.chat([user("hi")], **ask)
        assert status == 200
        assert len((await run.shown())["turns"]) == 1


async def test_who_goes_away_without_a_key_ends_the_turn_at_the_server() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        setup.upstream.hold_after = 1
        asking = asyncio.create_task(run.chat([user("hi")]))
        await setup.upstream.until(lambda: bool(setup.upstream.held))
        asking.cancel()
        await setup.upstream.until(lambda: setup.upstream.left == 1)
        setup.upstream.hold_after = None
        await run.say([user("ho")])
        shown = await run.shown()
        assert [turn["number"] for turn in shown["turns"]] == [1]
        assert shown["under_way"] == []


async def test_an_answer_that_reached_nobody_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentloop.capture import server

    async def broken(*_: Any) -> Any:
        raise ConnectionResetError("gone")

    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        with monkeypatch.context() as patch:
            patch.setattr(server, "_send", broken)
            with pytest.raises(Exception, match=r"disconnected|500|reset"):
                status, _ = await run.chat([user("hi")])
                raise AssertionError(str(status))
        await until(lambda: setup.capture.runs.counts.undone_turns == 1)
        assert (await run.shown())["turns"] == []
        await run.say([user("hi")])
        assert len((await run.shown())["turns"]) == 1


# -- how a run is named ----------------------------------------------------------------------------


async def test_a_run_is_named_by_path_header_or_key() -> None:
    async with capturing("vllm") as setup:
        run = await setup.agent.start()
        body = {"messages": [user("hi")], "max_tokens": 2}
        for path, key, headers in (
            (f"/runs/{run.run_id}{CHAT}", run.key, {}),
            (CHAT, run.key, {}),
            (CHAT, run.key, {"x_run_id": run.run_id}),
            (CHAT, ADMIN, {"x_run_id": run.run_id}),
        ):
            status, answer, said = await setup.agent.whole("POST", path, body, key=key, **headers)
            assert status == 200, answer
            assert said["x-run-id"] == run.run_id
        assert len((await run.shown())["turns"]) == 4
        assert run.base_url == f"{setup.agent.url}/runs/{run.run_id}/v1"
        status, models = await setup.agent.ask("GET", f"/runs/{run.run_id}/v1/models", key=run.key)
        assert (status, models["data"][0]["id"]) == (200, "m")


async def test_without_a_servers_key_nobody_is_asked_for_one() -> None:
    async with capturing("vllm", admin_key=None) as setup:
        run = await setup.agent.start()
        run.key = "EMPTY"
        await run.say([user("hi")])
        assert (await run.end())[0] == 200


async def test_an_old_server_names_its_tokens_in_the_log_probs() -> None:
    async with RolloutServer("vllm") as server, capturing(server=server) as setup:

        def old(reply: dict[str, Any]) -> None:
            del reply["choices"][0]["token_ids"]

        server.edit = old
        run = await setup.agent.start()
        await run.say([user("hi")])
        (state,) = await _ended(setup, run)
        assert state.status is Status.COMPLETED
