"""What is sent to each server, and what is read of its replies: the shapes and their traps."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.engines.retry import Budget, retry_after_s
from agentloop.engines.shapes import SHAPES, sglang
from agentloop.engines.shapes.checks import RefusedReply, first_difference
from agentloop.engines.shapes.experts import from_int32, from_npy
from agentloop.engines.shapes.reply import Reading, Reply, completion_of, nothing
from agentloop.engines.shapes.versions import Span, per_token, version_of
from agentloop.engines.types import Completion, EngineError, Request, Sampling
from tests.agentloop.rollout_server import EOS, LETTERS, as_npy

REQUEST = Request("r1", [151644, 872], Sampling(max_tokens=64))

VLLM_CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "model": "m",
    "prompt_token_ids": [151644, 872],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "4", "reasoning": None, "tool_calls": []},
            "token_ids": [19, 151645],
            "logprobs": {
                "content": [
                    {"token": "4", "logprob": -0.02, "bytes": [52], "top_logprobs": []},
                    {"token": "<|im_end|>", "logprob": -0.1, "bytes": [60], "top_logprobs": []},
                ]
            },
            "weight_versions": [{"version": "120", "start": 0, "end": 2}],
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
}

VLLM_COMPLETIONS: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "4",
            "prompt_token_ids": [151644, 872],
            "token_ids": [19, 151645],
            "logprobs": {
                "tokens": ["token_id:19", "token_id:151645"],
                "token_logprobs": [-0.02, -0.1],
                "top_logprobs": [None, None],
                "text_offset": [0, 1],
            },
            "weight_versions": [{"version": "120", "start": 0, "end": 2}],
            "finish_reason": "stop",
        }
    ],
    "usage": {"completion_tokens": 2},
}

VLLM_GENERATE: dict[str, Any] = {
    "request_id": "generate-tokens-r1",
    "prompt_token_ids": [151644, 872],
    "choices": [
        {
            "index": 0,
            "token_ids": [19, 151645],
            "logprobs": {
                "content": [
                    {"token_id": 19, "logprob": -0.02, "rank": 1, "top_logprobs": []},
                    {"token_id": 151645, "logprob": -0.1, "rank": 1, "top_logprobs": []},
                ]
            },
            "weight_versions": [{"version": "120", "start": 0, "end": 2}],
            "finish_reason": "stop",
            "stop_reason": 151645,
        }
    ],
}

SGLANG_CHAT: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "4", "reasoning_content": None},
            "prompt_token_ids": [151644, 872],
            "response_token_ids": [19, 151645],
            "logprobs": {
                "content": [{"token": "4", "logprob": -0.02, "bytes": [52], "top_logprobs": []}]
            },
            "meta_info": {"output_token_logprobs": [[-0.02, 19, None], [-0.1, 151645, None]]},
            "finish_reason": "stop",
            "matched_stop": 151645,
        }
    ],
    "metadata": {
        "weight_version": "120",
        "weight_versions": [{"version": "120", "start": 0, "end": 2}],
    },
}

SGLANG_GENERATE: dict[str, Any] = {
    "text": "4",
    "output_ids": [19, 151645],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "120",
        "weight_versions": [{"version": "120", "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.02, 19, None], [-0.1, 151645, None]],
    },
}

REPLIES: dict[str, dict[str, Any]] = {
    "vllm": VLLM_GENERATE,
    "vllm-completions": VLLM_COMPLETIONS,
    "vllm-chat": VLLM_CHAT,
    "sglang": SGLANG_GENERATE,
    "sglang-chat": SGLANG_CHAT,
}

EXACT = sorted(REPLIES)


def _changed(reply: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    copy = json.loads(json.dumps(reply))
    change(copy)
    return copy


def _read(
    flavour: str, reply: dict[str, Any], request: Request = REQUEST, **reading: Any
) -> Completion:
    shape = SHAPES[flavour]  # type: ignore[index]
    return completion_of(shape.read(reply), request, shape, Reading(**{"version": 7, **reading}))


def _choice(reply: dict[str, Any]) -> dict[str, Any]:
    """Where a completion's own facts are."""
    return reply["choices"][0] if "choices" in reply else reply["meta_info"]


def _drop_versions(reply: dict[str, Any]) -> None:
    for place in (_choice(reply), reply.get("metadata", {})):
        place.pop("weight_versions", None)
        place.pop("weight_version", None)


def _set_spans(reply: dict[str, Any], spans: object) -> None:
    place = reply["metadata"] if "metadata" in reply else _choice(reply)
    place["weight_versions"] = spans


# -- replies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", EXACT)
def test_every_exact_shape_reads_as_the_same_completion(flavour: str) -> None:
    read = _read(flavour, REPLIES[flavour], logprob_kind="processed")
    assert read.token_ids == [19, 151645]
    assert read.logprobs == [-0.02, -0.1]
    assert read.versions == [120, 120]
    assert read.finish_reason == "stop"
    assert (read.ids_source, read.logprob_kind) == ("engine", "processed")
    assert read.extra["versions_from"] == "spans"
    assert "missing" not in read.extra or flavour == "vllm"
    assert read.extra["sampling"]["temperature"] == 1.0
    # SGLang's native endpoint does not repeat the prompt: what was sent is what it had.
    assert read.prompt_ids == (None if flavour == "sglang" else [151644, 872])


def test_text_is_what_the_ids_say_where_there_is_a_tokenizer() -> None:
    """A server's parser took the call out of the content; the ids still have it."""
    ids = LETTERS.encode("hi<call>")
    reply = Reply("tool_calls", "hi", ids, [-0.1] * len(ids), completion_tokens=len(ids))
    read = completion_of(reply, REQUEST, SHAPES["vllm-chat"], Reading(version=0, tokens=LETTERS))
    assert read.text == "hi<call>"


@pytest.mark.parametrize("flavour", EXACT)
def test_versions_that_a_server_does_not_say_are_those_the_engine_was_told(flavour: str) -> None:
    read = _read(flavour, _changed(REPLIES[flavour], _drop_versions))
    assert read.versions == [7, 7]
    assert read.extra["versions_from"] == "engine"
    assert "versions" in read.extra["missing"]


def test_sglang_says_one_version_where_it_says_no_spans() -> None:
    read = _read("sglang", _changed(SGLANG_GENERATE, lambda r: _set_spans(r, None)))
    assert (read.versions, read.extra["versions_from"]) == ([120, 120], "reply")


@pytest.mark.parametrize("flavour", EXACT)
def test_a_completion_may_cross_a_weight_update(flavour: str) -> None:
    spans = [{"version": "119", "start": 0, "end": 1}, {"version": "v120", "start": 1, "end": 2}]
    read = _read(flavour, _changed(REPLIES[flavour], lambda r: _set_spans(r, spans)))
    assert read.versions == [119, 120]


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([{"version": "1", "start": 0, "end": 1}], "ends at token 1, and there are 2"),
        ([{"version": "1", "start": 1, "end": 2}], "where 0 follows"),
        (
            [{"version": "1", "start": 0, "end": 1}, {"version": "1", "start": 0, "end": 2}],
            "where 1 follows",
        ),
        ([{"version": "1", "start": 0, "end": 1 << 60}], "there are 2"),
        (
            [{"version": "2", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}],
            "goes down from 2 to 1",
        ),
        ([{"version": "1", "start": 0, "end": "2"}], "is '2' and not a count"),
        ([{"version": "1"}], "no start"),
        ([], "ends at token 0, and there are 2"),
    ],
)
@pytest.mark.parametrize("flavour", EXACT)
def test_spans_that_do_not_tile_a_completion_are_refused(
    flavour: str, spans: object, says: str
) -> None:
    reply = _changed(REPLIES[flavour], lambda r: _set_spans(r, spans))
    with pytest.raises(RefusedReply, match=says):
        _read(flavour, reply)


def _set_logprob(value: object) -> Callable[[dict[str, Any]], None]:
    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        meta = told.get("meta_info", told)
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"][1][0] = value
        elif "content" in told["logprobs"]:
            told["logprobs"]["content"][1]["logprob"] = value
        else:
            told["logprobs"]["token_logprobs"][1] = value

    return change


@pytest.mark.parametrize(
    "value",
    [-9999.0, -1e9, -(10**400), 0.01, 10**400, float("nan"), float("-inf"), None, "-1"],
    ids=lambda value: str(value)[:8],
)
@pytest.mark.parametrize("flavour", EXACT)
def test_what_is_no_log_probability_is_refused(flavour: str, value: object) -> None:
    with pytest.raises(RefusedReply) as refused:
        _read(flavour, _changed(REPLIES[flavour], _set_logprob(value)))
    assert (refused.value.rule, refused.value.index) == ("logprobs", 1)


@pytest.mark.parametrize("flavour", EXACT)
def test_rounding_above_zero_is_cut(flavour: str) -> None:
    read = _read(flavour, _changed(REPLIES[flavour], _set_logprob(5e-5)))
    assert read.logprobs == [-0.02, 0.0]


@pytest.mark.parametrize("flavour", EXACT)
def test_each_token_has_its_log_prob(flavour: str) -> None:
    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        meta = told.get("meta_info", told)
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"].pop()
        elif "content" in told["logprobs"]:
            told["logprobs"]["content"].pop()
        else:
            for name in ("tokens", "token_logprobs"):
                told["logprobs"][name].pop()

    with pytest.raises(RefusedReply, match="logprobs has 1 entries for 2 of token ids"):
        _read(flavour, _changed(REPLIES[flavour], change))


def _drop_token(reply: dict[str, Any]) -> None:
    place = reply if "output_ids" in reply else _choice(reply)
    for name in ("token_ids", "output_ids", "response_token_ids"):
        if name in place:
            place[name].pop()


@pytest.mark.parametrize("flavour", EXACT)
def test_ids_and_log_probs_must_be_equally_many(flavour: str) -> None:
    with pytest.raises(RefusedReply) as refused:
        _read(flavour, _changed(REPLIES[flavour], _drop_token))
    assert refused.value.rule == "lengths"


def test_the_count_of_usage_must_be_the_number_of_ids() -> None:
    def change(reply: dict[str, Any]) -> None:
        reply["usage"]["completion_tokens"] = 3

    with pytest.raises(RefusedReply, match="has 2 entries for 3 of usage"):
        _read("vllm-chat", _changed(VLLM_CHAT, change))


def test_more_tokens_than_asked_for_are_refused() -> None:
    request = replace(REQUEST, sampling=Sampling(max_tokens=1))
    with pytest.raises(RefusedReply, match="over max_tokens 1"):
        _read("vllm", VLLM_GENERATE, request)


@pytest.mark.parametrize("flavour", ["vllm", "vllm-completions", "sglang", "sglang-chat"])
def test_log_probs_of_other_tokens_are_refused(flavour: str) -> None:
    def change(reply: dict[str, Any]) -> None:
        place = reply if "output_ids" in reply else _choice(reply)
        for name in ("token_ids", "output_ids", "response_token_ids"):
            if name in place:
                place[name][1] = 5

    with pytest.raises(RefusedReply) as refused:
        _read(flavour, _changed(REPLIES[flavour], change))
    assert (refused.value.rule, refused.value.index) == ("ids", 1)


@pytest.mark.parametrize("bad", [-1, 1.0, True, "19", None, 151646])
@pytest.mark.parametrize("flavour", EXACT)
def test_what_is_no_token_is_refused(flavour: str, bad: object) -> None:
    def change(reply: dict[str, Any]) -> None:
        place = reply if "output_ids" in reply else _choice(reply)
        for name in ("token_ids", "output_ids", "response_token_ids"):
            if name in place:
                place[name][0] = bad

    with pytest.raises(RefusedReply) as refused:
        _read(flavour, _changed(REPLIES[flavour], change), vocab_size=151646)
    assert (refused.value.rule, refused.value.index) == ("ids", 0)


@pytest.mark.parametrize("reason", [None, "error", "content_filter", 3])
@pytest.mark.parametrize("flavour", EXACT)
def test_an_unknown_finish_reason_is_refused(flavour: str, reason: object) -> None:
    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        told["finish_reason"] = {"type": reason} if "output_ids" in reply else reason

    with pytest.raises(RefusedReply) as refused:
        _read(flavour, _changed(REPLIES[flavour], change))
    assert refused.value.rule == "finish_reason"


@pytest.mark.parametrize("flavour", EXACT)
def test_an_aborted_reply_without_tokens_is_empty_and_not_refused(flavour: str) -> None:
    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        told["finish_reason"] = {"type": "abort"} if "output_ids" in reply else "abort"
        told["logprobs"] = None
        for place in (reply, told, told.get("meta_info", {})):
            place.pop("output_token_logprobs", None)
            place.pop("completion_tokens", None)
            place.pop("usage", None)
            for name in ("token_ids", "output_ids", "response_token_ids"):
                if name in place:
                    place[name] = []
        if "message" in told:
            told["message"]["content"] = None
        _set_spans(reply, [])

    read = _read(flavour, _changed(REPLIES[flavour], change))
    assert (read.token_ids, read.logprobs, read.versions) == ([], [], [])
    assert (read.finish_reason, read.ids_source) == ("abort", "engine")


@pytest.mark.parametrize("flavour", ["vllm", "vllm-completions", "vllm-chat", "sglang-chat"])
def test_another_prompt_than_was_asked_with_is_refused_or_noted(flavour: str) -> None:
    request = replace(REQUEST, token_ids=[151644, 5, 6])
    with pytest.raises(RefusedReply, match="on_drift") as refused:
        _read(flavour, REPLIES[flavour], request)
    assert (refused.value.rule, refused.value.index) == ("prompt", 1)
    read = _read(flavour, REPLIES[flavour], request, on_drift="note")
    assert (read.extra["prompt_drift"], read.prompt_ids) == (1, [151644, 872])


@pytest.mark.parametrize("flavour", ["vllm-completions", "vllm-chat"])
def test_old_vllm_names_its_tokens_in_the_log_probs(flavour: str) -> None:
    def change(reply: dict[str, Any]) -> None:
        choice = _choice(reply)
        for place in (choice, reply):
            place.pop("token_ids", None)
            place.pop("prompt_token_ids", None)
        if "content" in choice["logprobs"]:
            for entry, token in zip(choice["logprobs"]["content"], (19, 151645), strict=True):
                entry["token"] = f"token_id:{token}"

    read = _read(flavour, _changed(REPLIES[flavour], change))
    assert (read.token_ids, read.ids_source) == ([19, 151645], "engine")
    assert read.prompt_ids is None


def test_a_token_name_that_is_no_number_is_refused() -> None:
    def change(reply: dict[str, Any]) -> None:
        _choice(reply)["logprobs"]["tokens"][0] = "token_id:²"

    with pytest.raises(RefusedReply, match="names the token"):
        _read("vllm-completions", _changed(VLLM_COMPLETIONS, change))


@pytest.mark.parametrize("flavour", EXACT)
def test_log_probs_that_were_asked_for_and_did_not_come_are_missing(flavour: str) -> None:
    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        told["logprobs"] = None
        told.get("meta_info", told).pop("output_token_logprobs", None)

    read = _read(flavour, _changed(REPLIES[flavour], change), logprob_kind="raw")
    assert (read.logprobs, read.logprob_kind) == (None, None)
    assert "logprobs" in read.extra["missing"]
    unasked = replace(REQUEST, sampling=Sampling(logprobs=False))
    assert "logprobs" not in _read(flavour, REPLIES[flavour], unasked).extra.get("missing", [])


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {"choices": [{}, {}]},
        {"choices": [3]},
        {"choices": [{"message": 3, "finish_reason": "stop"}]},
        {"choices": [{"finish_reason": "stop", "logprobs": [1], "token_ids": [1]}]},
        {"choices": [{"finish_reason": "stop", "token_ids": {"a": 1}}]},
        {"meta_info": {"finish_reason": "stop"}, "output_ids": [1]},
        {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[1]]}},
    ],
)
@pytest.mark.parametrize("flavour", [*EXACT, "transformers"])
def test_a_reply_of_another_shape_is_refused_by_name(flavour: str, reply: dict[str, Any]) -> None:
    with pytest.raises(RefusedReply):
        _read(flavour, reply)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.sampled_from([-(10**400), 10**400])
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(data=st.data(), flavour=st.sampled_from(EXACT), value=_JSON)
def test_no_value_in_any_place_of_a_reply_breaks_the_reading(
    data: st.DataObject, flavour: str, value: object
) -> None:
    """Whatever a server puts somewhere: a checked completion comes out, or a typed refusal."""
    reply = json.loads(json.dumps(REPLIES[flavour]))
    place: Any = reply
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = value
            break
        place = place[key]
    try:
        read = _read(flavour, reply, on_drift="note")
    except RefusedReply:
        return
    assert len(read.versions) == len(read.token_ids)
    assert read.logprobs is None or len(read.logprobs) == len(read.token_ids)
    assert all(type(token) is int and token >= 0 for token in read.token_ids)
    assert all(p <= 0 for p in read.logprobs or ())


# -- servers of text -----------------------------------------------------------------------------


def _text_reply(text: str, finish: str, tokens: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "tool_calls": None}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def test_text_is_tokenized_again_and_says_so() -> None:
    read = _read("transformers", _text_reply("abc", "length", 3), tokens=LETTERS)
    assert read.token_ids == LETTERS.encode("abc")
    assert (read.ids_source, read.logprobs, read.logprob_kind) == ("retokenized", None, None)
    assert read.versions == [7, 7, 7]
    assert set(read.extra["missing"]) == {"token_ids", "logprobs", "prompt_ids", "versions"}
    assert "token_drift" not in read.extra


def test_an_end_token_that_the_text_does_not_show_is_put_where_it_was_counted() -> None:
    ended = _read("transformers", _text_reply("abc", "stop", 4), tokens=LETTERS)
    assert ended.token_ids == [*LETTERS.encode("abc"), EOS]
    assert "token_drift" not in ended.extra
    by_text = _read("transformers", _text_reply("abc", "stop", 3), tokens=LETTERS)
    assert by_text.token_ids == LETTERS.encode("abc")


def test_no_end_token_is_put_where_the_server_stopped_for_length() -> None:
    cut = _read("transformers", _text_reply("abc", "length", 4), tokens=LETTERS)
    assert (cut.token_ids, cut.extra["token_drift"]) == (LETTERS.encode("abc"), 1)


def test_an_empty_text_has_no_log_probs_either() -> None:
    """None and not []: a later turn of the same server has none."""
    read = _read("transformers", _text_reply("", "stop", 0), tokens=LETTERS)
    assert (read.token_ids, read.logprobs) == ([], None)


def test_tokens_that_the_text_lost_are_counted() -> None:
    read = _read("transformers", _text_reply("abc", "length", 5), tokens=LETTERS)
    assert read.extra["token_drift"] == 2


def test_the_template_that_departs_from_the_prompt_is_noted() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = LETTERS.prompt(messages)
    request = Request("r", [*prompt, 9], Sampling(), messages=messages)
    read = _read("transformers", _text_reply("a", "stop", 1), request, tokens=LETTERS)
    assert read.extra["prompt_drift"] == len(prompt)
    same = replace(request, token_ids=prompt)
    read = _read("transformers", _text_reply("a", "stop", 1), same, tokens=LETTERS)
    assert "prompt_drift" not in read.extra


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RefusedReply, match="no tokenizer"):
        _read("transformers", _text_reply("abc", "stop", 3))


def test_tool_calls_that_a_parser_took_out_of_the_text_are_text_again() -> None:
    reply = _text_reply("so", "tool_calls", 9)
    function = {"name": "add", "arguments": '{"a": 1}'}
    reply["choices"][0]["message"]["tool_calls"] = [{"type": "function", "function": function}]
    read = _read("transformers", reply, tokens=LETTERS)
    assert read.text == 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert read.finish_reason == "tool_calls"


# -- bodies --------------------------------------------------------------------------------------

SAMPLING = Sampling(
    max_tokens=5,
    temperature=0.7,
    top_p=0.9,
    top_k=11,
    min_tokens=2,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    stop=("X",),
    stop_token_ids=(4,),
    seed=3,
)

ASKED = Request("r1", [1, 2, 3], SAMPLING, messages=[{"role": "user", "content": "hi"}])


def _params(flavour: str, body: dict[str, Any]) -> dict[str, Any]:
    return body["sampling_params"] if flavour in ("vllm", "sglang") else body


@pytest.mark.parametrize("flavour", EXACT)
def test_every_field_of_sampling_is_sent(flavour: str) -> None:
    """A server's own defaults come from the model's folder."""
    params = _params(flavour, SHAPES[flavour].body(ASKED, "m"))  # type: ignore[index]
    expected = {
        "n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.0,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "stop": ["X"], "stop_token_ids": [4],
    }  # fmt: skip
    assert expected.items() <= params.items()
    limit = {"vllm": "max_tokens", "vllm-completions": "max_tokens", "sglang": "max_new_tokens"}
    assert params[limit.get(flavour, "max_completion_tokens")] == 5
    assert params["min_new_tokens" if flavour == "sglang" else "min_tokens"] == 2
    assert params["sampling_seed" if flavour == "sglang" else "seed"] == 3
    defaults = _params(flavour, SHAPES[flavour].body(REQUEST, "m"))  # type: ignore[index]
    assert (defaults["temperature"], defaults["top_p"], defaults["top_k"]) == (1.0, 1.0, -1)
    assert (defaults["stop"], defaults["presence_penalty"]) == ([], 0.0)
    assert not {"seed", "sampling_seed"} & set(defaults)


def test_log_probs_are_asked_for_in_each_servers_words() -> None:
    def body(flavour: str, logprobs: bool) -> dict[str, Any]:
        request = replace(ASKED, sampling=replace(SAMPLING, logprobs=logprobs))
        return SHAPES[flavour].body(request, "m")  # type: ignore[index]

    assert body("vllm", True)["sampling_params"]["logprobs"] == 0
    assert body("vllm-completions", True)["logprobs"] == 0
    assert body("vllm-completions", False)["logprobs"] is None
    chat = body("vllm-chat", True)
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 0)
    assert chat["return_token_ids"] is chat["return_weight_versions"] is True
    assert chat["return_tokens_as_token_ids"] is True
    assert body("vllm-chat", False)["logprobs"] is False
    native = body("sglang", True)
    assert (native["return_logprob"], native["logprob_start_len"]) == (True, -1)
    assert body("sglang", False)["return_logprob"] is False
    assert body("sglang-chat", True)["return_meta_info"] is True


def test_ids_go_in_where_a_server_takes_them() -> None:
    assert SHAPES["vllm"].body(ASKED, "m")["token_ids"] == [1, 2, 3]
    assert SHAPES["vllm-completions"].body(ASKED, "m")["prompt"] == [1, 2, 3]
    assert SHAPES["sglang"].body(ASKED, "m")["input_ids"] == [1, 2, 3]
    assert SHAPES["sglang-chat"].body(ASKED, "m")["input_ids"] == [1, 2, 3]
    assert "token_ids" not in SHAPES["vllm-chat"].body(ASKED, "m")
    no_ids = replace(ASKED, token_ids=[], tools=[{"type": "function"}])
    assert "input_ids" not in SHAPES["sglang-chat"].body(no_ids, "m")
    assert SHAPES["sglang-chat"].body(no_ids, "m")["tools"] == [{"type": "function"}]
    assert SHAPES["sglang-chat"].body(replace(ASKED, messages=[]), "m")["messages"]


def test_stop_strings_stay_in_ids_and_text_alike() -> None:
    assert SHAPES["vllm"].body(ASKED, "m")["sampling_params"]["include_stop_str_in_output"] is True
    assert SHAPES["sglang"].body(ASKED, "m")["sampling_params"]["no_stop_trim"] is True


def test_transformers_gets_only_what_it_acts_on() -> None:
    plain = replace(SAMPLING, presence_penalty=0.0, frequency_penalty=0.0, stop_token_ids=())
    body = SHAPES["transformers"].body(replace(ASKED, sampling=plain), "m")
    assert set(body) == {
        "model", "messages", "max_completion_tokens", "generation_config", "stream", "stop", "seed",
    }  # fmt: skip
    assert json.loads(body["generation_config"]) == {
        "do_sample": True, "max_new_tokens": 5, "min_new_tokens": 2, "repetition_penalty": 1.1,
        "temperature": 0.7, "top_p": 0.9, "top_k": 11,
    }  # fmt: skip
    greedy = SHAPES["transformers"].body(replace(ASKED, sampling=Sampling(temperature=0.0)), "m")
    assert json.loads(greedy["generation_config"])["do_sample"] is False
    assert "stop" not in greedy


@pytest.mark.parametrize(
    "field", ["presence_penalty", "frequency_penalty", "stop_token_ids", "messages"]
)
def test_what_transformers_cannot_do_is_an_error(field: str) -> None:
    request = replace(ASKED, sampling=Sampling())
    if field == "messages":
        request = replace(request, messages=[])
    else:
        asked: Any = (4,) if field == "stop_token_ids" else 0.5
        request = replace(request, sampling=replace(Sampling(), **{field: asked}))
    with pytest.raises(EngineError, match=field):
        SHAPES["transformers"].body(request, "m")


@pytest.mark.parametrize(
    ("server", "sampling", "kind"),
    [
        ("processed", Sampling(), "processed"),
        ("processed", Sampling(temperature=0.5), "processed"),
        ("processed", Sampling(temperature=0.0), "raw"),
        ("processed", Sampling(top_p=0.9), None),
        ("processed", Sampling(top_k=5), None),
        ("raw", Sampling(top_k=5), "raw"),
        (None, Sampling(), None),
    ],
)
def test_sglangs_log_probs_are_named_only_where_the_name_is_true(
    server: Any, sampling: Sampling, kind: str | None
) -> None:
    assert sglang.logprob_kind(server, sampling) == kind


# -- routed experts ------------------------------------------------------------------------------

EXPERTS = np.arange(3 * 4 * 2, dtype=np.uint8).reshape(3, 4, 2)


@pytest.mark.parametrize("flavour", EXACT)
def test_routed_experts_are_one_row_fewer_than_tokens(flavour: str) -> None:
    request = replace(REQUEST, sampling=Sampling(routed_experts=True))

    def change(reply: dict[str, Any]) -> None:
        told = _choice(reply)
        if flavour.startswith("sglang"):
            raw = base64.b64encode(EXPERTS.astype("<i4").tobytes()).decode()
            told.get("meta_info", told)["routed_experts"] = raw
        else:
            told["routed_experts"] = as_npy(EXPERTS)

    read = _read(flavour, _changed(REPLIES[flavour], change), request)
    assert read.routed_experts is not None
    assert read.routed_experts.tolist() == EXPERTS.reshape(3, 8).tolist()
    without = _read(flavour, REPLIES[flavour], request)
    assert without.routed_experts is None
    assert "routed_experts" in without.extra["missing"]
    unasked = _read(flavour, _changed(REPLIES[flavour], change))
    assert unasked.routed_experts is None


class _Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


def _header(shape: str, descr: str = "|u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"no file", "no .npy file"),
        (b"\x93NUMPY\x09\x00", "no .npy file"),
        (_header("(1000000000, 1000000000, 8)"), "in 0 bytes"),
        (_header("(3, 2)") + b"\0" * 5, "in 5 bytes"),
        (_header("(6,)") + b"\0" * 6, "shape"),
        (_header("(2, 3)") + b"\0" * 6, "2 rows, and 3 tokens"),
        (_header("(3, 0)"), "3 tokens were inputs"),
        (_header("(3, 1)", "<f4") + b"\0" * 12, "holds float32"),
        (_header("(3, 1)", "|O") + b"\0" * 24, "holds object"),
        (_header("(3, 1)", "|i1") + b"\xff" * 3, "names expert -1"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535, "no .npy file"),
    ],
)
def test_what_is_no_array_of_experts_is_refused_before_memory_is_taken(
    raw: bytes, says: str
) -> None:
    with pytest.raises(RefusedReply, match=says):
        from_npy(base64.b64encode(raw).decode(), rows=3, max_bytes=1 << 20)


def test_an_array_of_objects_is_not_unpickled() -> None:
    import io

    file = io.BytesIO()
    np.save(file, np.array([[_Evil()]] * 3, dtype=object), allow_pickle=True)
    with pytest.raises(RefusedReply, match="holds object"):
        from_npy(base64.b64encode(file.getvalue()).decode(), rows=3, max_bytes=1 << 20)


@pytest.mark.parametrize("value", [None, 3, "?", "abc", "A" * 2000])
def test_experts_that_are_no_base64_or_too_large_are_refused(value: object) -> None:
    for decode in (from_npy, from_int32):
        with pytest.raises(RefusedReply):
            decode(value, rows=3, max_bytes=1000)


def test_plain_numbers_must_fill_whole_rows() -> None:
    flat = base64.b64encode(np.arange(7, dtype="<i4").tobytes()).decode()
    with pytest.raises(RefusedReply, match="has 7, and 3 tokens"):
        from_int32(flat, rows=3, max_bytes=1000)


# -- small rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("120", 120), (" 120 ", 120), ("v120", 120), ("V7", 7), ("step120", 120),
        ("weights@17", 17), ("global_step_3", 3), (120, 120), (0, 0),
        ("default", None), ("", None), (None, None), (True, None), (-1, None), (1.5, None),
        ("deadbeef42", None), ("1.5", None), ("9" * 30, None), ("２", None),
    ],
)  # fmt: skip
def test_a_label_names_a_version_if_it_is_a_number_behind_a_word(
    label: object, version: int | None
) -> None:
    assert version_of(label) == version


def test_a_label_that_names_none_stands_for_what_the_engine_was_told() -> None:
    spans = [Span("default", 0, 2), Span("8", 2, 3)]
    assert per_token(spans, 3, "weight_versions", fallback=5) == [5, 5, 8]
    with pytest.raises(RefusedReply, match="goes down from 9 to 8"):
        per_token(spans, 3, "weight_versions", fallback=9)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6))
def test_spans_that_tile_give_each_token_its_version(runs: list[tuple[int, int]]) -> None:
    runs = sorted(runs)
    spans, expected = [], []
    for version, size in runs:
        spans.append(Span(str(version), len(expected), len(expected) + size))
        expected += [version] * size
    assert per_token(spans, len(expected), "weight_versions", fallback=0) == expected


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_the_first_difference_is_where_the_common_beginning_ends(
    one: list[int], other: list[int]
) -> None:
    index = first_difference(one, other)
    if index is None:
        assert one == other
    else:
        assert one[:index] == other[:index]
        assert one[index : index + 1] != other[index : index + 1]


def test_what_is_given_up_has_no_tokens_and_nothing_of_log_probs_missing() -> None:
    empty = nothing(REQUEST)
    assert (empty.token_ids, empty.logprobs, empty.versions) == ([], [], [])
    assert empty.finish_reason == "abort"
    assert nothing(replace(REQUEST, sampling=Sampling(logprobs=False))).logprobs is None


def test_delays_are_drawn_from_a_doubling_capped_range() -> None:
    budget = Budget(base_s=1.0, cap_s=5.0)
    assert [budget.delay_s(n, 1.0) for n in range(5)] == [1, 2, 4, 5, 5]
    assert budget.delay_s(3, 0.0) == 0
    assert budget.delay_s(10_000, 0.5) == 2.5
    assert budget.delay_s(0, 0.5, retry_after_s=10) == 10.5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), (" 10 ", 10.0), (None, None), ("", None), ("-1", None), ("soon", None)],
)
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds
