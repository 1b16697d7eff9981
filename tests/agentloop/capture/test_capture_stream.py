"""Answers as streams: well-formed, whole, and of the same turn; and the official client on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.capture.answering import DONE, chunks_of
from tests.agentloop.capture.captured import OfRun, capturing, user

CALLS = [
    {
        "id": f"call-{number}",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps({"a": number})},
    }
    for number in range(2)
]


async def _events(run: OfRun, **fields: Any) -> list[Any]:
    """The JSON of a stream's events; it ends as it should."""
    body = {"messages": [user("hi")], "max_tokens": 6, "stream": True, **fields}
    async with run.agent.session.post(
        f"{run.base_url}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {run.key}"},
    ) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = (await response.text()).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        plain = await run.say([user("hi")])
        events = await _events(run, stream_options={"include_usage": True}, logprobs=True)
        (_, body) = setup.upstream.bodies("/v1/chat/completions")
        shown = await run.shown()
    assert body["stream"] is False
    assert "stream_options" not in body
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    first, text, last, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": plain["content"]}
    assert len(text["choices"][0]["logprobs"]["content"]) == 6
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert "token_ids" not in last["choices"][0]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert [event["usage"] for event in events[:-1]] == [None] * 3
    assert [turn["completion_tokens"] for turn in shown["turns"]] == [6, 6]


async def test_a_stream_without_usage_has_none() -> None:
    async with capturing() as setup:
        events = await _events(await setup.agent.start(), stream_options={"include_usage": False})
    assert all("usage" not in event for event in events)
    assert all(len(event["choices"]) == 1 for event in events)


async def test_a_stream_that_cannot_be_had_has_a_status() -> None:
    async with capturing() as setup:
        run = await setup.agent.start()
        setup.upstream.refusals = [(422, {})]
        status, told = await run.chat([user("hi")], stream=True)
        assert (status, told["error"]["code"]) == (422, "upstream_refused")


def test_tool_calls_come_in_order_with_their_names_first() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": CALLS}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = {"id": "x", "created": 5, "model": "m", "choices": [choice]}
    raw = list(chunks_of(answer, usage=False, created=9))
    assert raw[-1] == DONE
    events = [json.loads(part[6:]) for part in raw[:-1]]
    assert {(event["created"], event["model"]) for event in events} == {(5, "m")}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"reasoning": "so"}]
    calls = [delta["tool_calls"][0] for delta in deltas[2:-1]]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert [call.get("id") for call in calls] == ["call-0", None, "call-1", None]
    assert calls[0]["function"] == {"name": "add", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls[:2]) == '{"a": 0}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_official_client_reads_both_forms() -> None:
    openai = pytest.importorskip("openai")

    def calls(reply: dict[str, Any]) -> None:
        reply["choices"][0]["message"]["tool_calls"] = CALLS
        reply["choices"][0]["finish_reason"] = "tool_calls"

    async with capturing() as setup:
        setup.upstream.edit = calls
        run = await setup.agent.start()
        client = openai.AsyncOpenAI(base_url=run.base_url, api_key=run.key, max_retries=0)
        async with client:
            asked: dict[str, Any] = {
                "model": "gpt", "messages": [user("hi")], "max_tokens": 6,
            }  # fmt: skip
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            text, names, arguments, usage, finish = "", {}, {}, None, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    text += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        names[call.index] = names.get(call.index) or call.function.name
                        told = call.function.arguments or ""
                        arguments[call.index] = arguments.get(call.index, "") + told
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**asked, n=2)
        status, _ = await run.end()
        assert status == 200
        states = setup.publisher.states
    message = whole.choices[0].message
    assert (text, finish) == (message.content, "tool_calls")
    assert list(names.values()) == [call.function.name for call in message.tool_calls]
    assert list(arguments.values()) == [call.function.arguments for call in message.tool_calls]
    assert usage.completion_tokens == whole.usage.completion_tokens == 6
    assert refused.value.code == "invalid_request"
    assert len(states) == 2
    assert states[0].conversation is not None
    assert states[0].conversation[-1]["tool_calls"] == CALLS
