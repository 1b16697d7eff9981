"""The transformers engine: what it samples, which log-probs it says, and what ends a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.engines.hf import HFEngine
from agentloop.engines.hf_row import Row
from agentloop.engines.hf_sampling import Context, draw, process, uniform_at
from agentloop.engines.types import (
    Completion,
    EngineError,
    Request,
    Sampling,
    WeightsError,
)
from agentloop.tiny import CONTEXT, make_tiny_model, tiny_model, tiny_tokenizer
from agentloop.trajectory.experts import joined_experts
from tests.deadline import until

FAMILIES = ("llama", "qwen3", "gpt2", "mixtral")
TOKENIZER: Any = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
ENDLESS = Sampling(max_tokens=3000, min_tokens=3000, temperature=0.9, seed=1)
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@asynccontextmanager
async def engine_of(model: Any = "llama", **options: Any) -> AsyncIterator[HFEngine]:
    made = tiny_model(TOKENIZER, family=model) if model in FAMILIES else model
    engine = HFEngine(made, TOKENIZER, threads=1, **options)
    try:
        yield engine
    finally:
        await engine.close()


def asked(text: str, sampling: Sampling, request_id: str = "r", **more: Any) -> Request:
    return Request(request_id, TOKENIZER.encode(text), sampling, **more)


async def begun(engine: HFEngine, count: int = 5) -> None:
    """Some more tokens have been generated."""
    goal = engine.tokens_generated + count
    await until(lambda: engine.tokens_generated >= goal)


def processors(sampling: Sampling, prompt_len: int) -> Any:
    """transformers' own, in the order of its `generate`."""
    from transformers.generation import logits_process as t

    found = t.LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        found.append(t.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens:
        found.append(t.MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_tokens, [EOS]))
    if sampling.temperature not in (0.0, 1.0):
        found.append(t.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        found.append(t.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(t.TopPLogitsWarper(sampling.top_p))
    return found


@torch.no_grad()
def recomputed(
    model: Any, request: Request, tokens: Sequence[int], sampling: Sampling
) -> list[float]:
    """Log-probs of the tokens by one forward pass over the whole row."""
    row = [*request.token_ids, *tokens]
    logits = model(torch.tensor([row])).logits[0].float()
    prompt_len = len(request.token_ids)
    warp = processors(sampling, prompt_len)
    return [
        warp(torch.tensor([row[:at]]), logits[at - 1][None]).log_softmax(-1)[0, row[at]].item()
        for at in range(prompt_len, len(row))
    ]


# -- the distribution ------------------------------------------------------------------------

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.3, min_tokens=6),
    Sampling(repetition_penalty=0.8, top_p=0.3),
)


@given(
    seed=st.integers(0, 1 << 16),
    rows=st.lists(
        st.builds(
            Sampling,
            temperature=st.floats(0.05, 3.0),
            top_k=st.sampled_from([-1, 0, 1, 2, 7, 40, 1000]),
            top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
            repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
            min_tokens=st.integers(0, 3),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_scores_are_those_of_transformers_processors(seed: int, rows: list[Sampling]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 300, generator=generator) * 4
    made = torch.randint(0, 300, (2,), generator=generator).tolist()
    contexts = [Context(sampling, [5, 6, 7, 7], made, {EOS}, 0) for sampling in rows]
    before = logits.clone()
    scores = process(logits, contexts)
    assert torch.equal(logits, before)
    for row, context in enumerate(contexts):
        ids = torch.tensor([[*context.asked, *made]])
        expected = processors(context.sampling, 4)(ids, logits[row : row + 1])[0]
        assert torch.equal(scores[row], expected)


def test_presence_and_frequency_count_what_was_generated_only() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    context = Context(sampling, [1, 1, 1], [2, 2, 3], (), 0)
    scores = process(torch.zeros(1, 5), [context])
    assert scores.tolist() == [[0.0, 0.0, -1.0, -0.75, 0.0]]


def test_draws_follow_the_scores() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 20_000
    contexts = [Context(Sampling(), [1], [], (), seed) for seed in range(count)]
    drawn = draw(weights.log().expand(count, -1), contexts)
    shares = torch.bincount(drawn, minlength=5) / count
    assert shares[1] == 0
    sigma = (weights * (1 - weights) / count).sqrt()
    assert ((shares - weights).abs() <= 4 * sigma).all()


def test_a_number_beyond_the_rounded_sum_draws_the_last_possible_token() -> None:
    scores = torch.tensor([[0.0, 0.0, float("-inf")]])
    contexts = [Context(Sampling(), [], [], (), seed) for seed in range(200)]
    assert set(draw(scores.expand(200, -1), contexts).tolist()) == {0, 1}
    assert all(0 <= uniform_at(seed, 3) < 1 for seed in (-1, 0, 1 << 63, 1 << 70))
    assert len({uniform_at(seed, at) for seed in range(20) for at in range(20)}) == 400


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(family: str) -> None:
    model = tiny_model(TOKENIZER, family=family)
    async with engine_of(model) as engine:
        requests = [
            asked("word " * (1 + 3 * i), replace(sampling, max_tokens=20, seed=i))
            for i, sampling in enumerate(SAMPLINGS)
        ]
        answers = await asyncio.gather(*map(engine.generate, requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.logprob_kind == "processed"
        assert answer.ids_source == "engine"
        assert answer.prompt_ids == request.token_ids
        expected = recomputed(model, request, answer.token_ids, request.sampling)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(answer.token_ids) >= request.sampling.min_tokens
        assert answer.versions == [0] * len(answer.token_ids)
        assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)


async def test_raw_logprobs_are_the_models_own() -> None:
    model = tiny_model(TOKENIZER)
    async with engine_of(model, logprob_kind="raw") as engine:
        request = asked("a b", Sampling(max_tokens=12, temperature=0.5, top_p=0.7, seed=3))
        answer = await engine.generate(request)
    assert answer.logprob_kind == "raw"
    expected = recomputed(model, request, answer.token_ids, Sampling())
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_temperature_zero_is_the_greedy_answer_of_generate(family: str) -> None:
    model: Any = tiny_model(TOKENIZER, family=family)
    request = asked("once upon", Sampling(max_tokens=16, temperature=0.0, repetition_penalty=1.4))
    ids = torch.tensor([request.token_ids])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16,
        repetition_penalty=1.4,
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    async with engine_of(model) as engine:
        answer = await engine.generate(request)
    assert answer.token_ids == expected
    assert answer.logprob_kind == "raw"
    assert answer.logprobs == pytest.approx(
        recomputed(model, request, expected, Sampling()), abs=1e-4
    )


async def test_without_logprobs_none_are_said() -> None:
    async with engine_of() as engine:
        answer = await engine.generate(asked("x", Sampling(max_tokens=2, logprobs=False)))
    assert answer.logprobs is None
    assert answer.logprob_kind is None


async def test_requests_without_a_seed_differ() -> None:
    async with engine_of() as engine:
        request = asked("x", Sampling(max_tokens=12, min_tokens=12))
        first, second = await asyncio.gather(engine.generate(request), engine.generate(request))
    assert first.token_ids != second.token_ids


# -- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    family: str,
) -> None:
    requests = [
        asked("q" * (1 + 5 * i), Sampling(max_tokens=10 + 3 * i, seed=i, top_p=0.9))
        for i in range(6)
    ]
    async with engine_of(family) as engine:
        together = await asyncio.gather(*map(engine.generate, requests))
        alone = [await engine.generate(request) for request in requests]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_request_joins_the_batch_under_way_and_leaves_it(family: str) -> None:
    model = tiny_model(TOKENIZER, family=family)
    async with engine_of(model) as engine:
        long = asked("a rather long beginning", replace(ENDLESS, max_tokens=150, min_tokens=150))
        short = [
            asked("hi " * (1 + 20 * i), Sampling(max_tokens=8 + i, min_tokens=8, seed=i))
            for i in range(3)
        ]
        running = asyncio.create_task(engine.generate(long))
        answers: list[Completion] = []
        for request in short:
            await begun(engine)
            answers.append(await engine.generate(request))
        assert not running.done()
        answer = await running
        assert engine._worker._batch is None
    for request, got in [(long, answer), *zip(short, answers, strict=True)]:
        expected = recomputed(model, request, got.token_ids, request.sampling)
        assert got.logprobs == pytest.approx(expected, abs=1e-4)


async def test_columns_that_no_row_uses_any_more_are_dropped() -> None:
    async with engine_of() as engine:
        widths: list[int] = []
        engine._model.register_forward_pre_hook(
            lambda module, args, inputs: widths.append(inputs["attention_mask"].shape[1]),
            with_kwargs=True,
        )
        wide = asked("w " * 300, replace(ENDLESS, max_tokens=10, min_tokens=10))
        running = asyncio.create_task(engine.generate(asked("n", ENDLESS)))
        await begun(engine)
        await engine.generate(wide)
        await begun(engine)
        await engine.pause()
        narrow = await running
    assert max(widths) > 600
    assert widths[-1] == len(narrow.token_ids)  # the last token was not fed, the prompt is one


async def test_no_more_rows_than_max_batch_run_at_a_time() -> None:
    async with engine_of(max_batch=2) as engine:
        sizes: list[int] = []
        engine._model.register_forward_hook(
            lambda module, args, output: sizes.append(len(output.logits))
        )
        request = asked("x", Sampling(max_tokens=6, min_tokens=6))
        answers = await asyncio.gather(*(engine.generate(request) for _ in range(5)))
    assert [len(answer.token_ids) for answer in answers] == [6] * 5
    assert max(sizes) == 2


async def test_requests_that_arrive_together_share_their_steps() -> None:
    async with engine_of(batch_window_s=1.0, max_batch=4) as engine:
        passes: list[int] = []
        engine._model.register_forward_hook(
            lambda module, args, output: passes.append(len(output.logits))
        )
        request = asked("x", Sampling(max_tokens=6, min_tokens=6))
        await asyncio.gather(*(engine.generate(request) for _ in range(4)))
    assert passes == [4] * 6


async def test_the_model_computes_in_a_thread_of_its_own() -> None:
    async with engine_of() as engine:
        threads: set[threading.Thread] = set()
        engine._model.register_forward_hook(lambda *_: threads.add(threading.current_thread()))
        await engine.generate(asked("x", Sampling(max_tokens=3)))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


# -- what ends a request ---------------------------------------------------------------------


async def test_max_tokens_ends_as_length_and_eos_as_stop() -> None:
    request = asked("x", Sampling(max_tokens=5, seed=0))
    async with engine_of(eos_token_ids=[]) as engine:
        answer = await engine.generate(request)
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
        none = await engine.generate(replace(request, sampling=Sampling(max_tokens=0)))
        assert (none.finish_reason, none.token_ids, none.logprobs) == ("length", [], [])
    async with engine_of(eos_token_ids=[answer.token_ids[2]]) as engine:
        ended = await engine.generate(request)
    assert ended.finish_reason == "stop"
    assert ended.token_ids == answer.token_ids[: answer.token_ids.index(answer.token_ids[2]) + 1]
    assert "stop_reason" not in ended.extra


async def test_a_stop_token_ends_it_but_not_before_min_tokens() -> None:
    plain = Sampling(max_tokens=30, seed=4, top_k=3, temperature=2.0)
    async with engine_of(eos_token_ids=[]) as engine:
        free = (await engine.generate(asked("x", plain))).token_ids
        token = free[4]
        first = free.index(token)
        stopped = await engine.generate(asked("x", replace(plain, stop_token_ids=(token,))))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free[: first + 1]
        assert stopped.extra == {"stop_reason": token}
        later = await engine.generate(
            asked("x", replace(plain, stop_token_ids=(token,), min_tokens=25))
        )
    assert len(later.token_ids) >= 25
    assert token not in later.token_ids[:25]


async def test_a_stop_string_is_found_across_tokens_and_tokens_are_kept_whole() -> None:
    plain = Sampling(max_tokens=60, seed=8)
    async with engine_of(eos_token_ids=[]) as engine:
        free = await engine.generate(asked("x", plain))
        stop, end = next(
            (text, place + 3)
            for place in range(20, 40)
            for text in [TOKENIZER.decode(free.token_ids[place : place + 3])]
            if "\ufffd" not in text and free.text.count(text) == 1
        )
        sampling = replace(plain, stop=("never seen", stop))
        answer = await engine.generate(asked("x", sampling))
        assert answer.finish_reason == "stop"
        assert answer.extra == {"stop_reason": stop}
        assert answer.token_ids == free.token_ids[:end]
        assert answer.text.endswith(stop)
        # It ends inside a token: the token stays whole.
        longer = await engine.generate(asked("x", replace(plain, stop=(stop[:-1],))))
        assert longer.token_ids in (free.token_ids[:end], free.token_ids[: end - 1])
        # What ended before min_tokens does not count, however near it is.
        late = await engine.generate(asked("x", replace(sampling, min_tokens=end + 1)))
    assert (late.token_ids, late.finish_reason) == (free.token_ids, "length")


async def test_a_stop_string_may_end_with_a_character_of_several_tokens() -> None:
    ids = TOKENIZER.encode("ab 数")
    assert len(ids) == 6
    async with engine_of(eos_token_ids=[]) as engine:
        request = asked("x", Sampling(stop=("b 数",)))
        row = Row(request, 99, frozenset(), 0, engine._decode, lambda outcome: None)
    for place, token in enumerate(ids):
        assert row.finish_reason is None, place
        row.take(token, 0.0, 0)
    assert (row.finish_reason, row.stop_reason) == ("stop", "b 数")


async def test_a_special_token_can_be_a_stop_string() -> None:
    end = TOKENIZER.convert_ids_to_tokens(EOS)
    size = len(TOKENIZER)
    seed = next(s for s in range(100_000) if int(uniform_at(s, 3) * size) == EOS)
    async with engine_of(eos_token_ids=[]) as engine:
        engine._model.lm_head.weight.data.zero_()  # every token is as likely as any other
        answer = await engine.generate(asked("x", Sampling(max_tokens=9, seed=seed, stop=(end,))))
    assert answer.token_ids[-1] == EOS
    assert len(answer.token_ids) == 3
    assert answer.extra == {"stop_reason": end}


async def test_the_context_of_the_model_ends_a_response() -> None:
    async with engine_of() as engine:
        row = [5] * (CONTEXT - 3)
        answer = await engine.generate(Request("r", row, Sampling(max_tokens=50, min_tokens=50)))
        assert (len(answer.token_ids), answer.finish_reason) == (3, "length")
        with pytest.raises(EngineError, match=f"{CONTEXT} tokens, and the model's context"):
            await engine.generate(Request("r", [5] * CONTEXT, Sampling()))


@pytest.mark.parametrize(
    ("token_ids", "sampling", "what"),
    [
        ([], Sampling(), "has no tokens"),
        ([1, 9999], Sampling(), "ids from 1 to 9999; the model knows 0 to"),
        ([-1], Sampling(), "ids from -1"),
        ([1], Sampling(temperature=-1.0), "temperature -1.0"),
        ([1], Sampling(temperature=float("nan")), "temperature nan"),
        ([1], Sampling(top_p=0.0), "top_p 0.0"),
        ([1], Sampling(top_k=-5), "top_k -5"),
        ([1], Sampling(repetition_penalty=0.0), "repetition_penalty"),
        ([1], Sampling(routed_experts=True), "no routers"),
    ],
)
async def test_what_cannot_be_answered_is_refused(
    token_ids: list[int], sampling: Sampling, what: str
) -> None:
    async with engine_of() as engine:
        with pytest.raises(EngineError, match=what):
            await engine.generate(Request("r", token_ids, sampling))


async def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    engine = HFEngine(tiny_model(TOKENIZER), threads=1)
    try:
        answer = await engine.generate(Request("r", [5], Sampling(max_tokens=3, min_tokens=3)))
        assert (len(answer.token_ids), answer.text) == (3, "")
        with pytest.raises(EngineError, match="need a tokenizer"):
            await engine.generate(Request("r", [5], Sampling(stop=("x",))))
    finally:
        await engine.close()


async def test_a_request_over_its_time_fails_and_leaves_the_batch() -> None:
    async with engine_of() as engine:
        with pytest.raises(EngineError, match=r"request 'slow' had \d+ of 3000 tokens"):
            await engine.generate(asked("x", ENDLESS, "slow", timeout_s=0.05))
        await until(lambda: engine._worker._batch is None)


async def test_a_cancelled_request_leaves_the_batch() -> None:
    async with engine_of() as engine:
        task = asyncio.create_task(engine.generate(asked("x", ENDLESS)))
        await begun(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine._worker._batch is None)


# -- pause, abort, partial rollout -----------------------------------------------------------


async def test_pause_ends_what_is_under_way_with_what_it_has_and_new_requests_at_once() -> None:
    async with engine_of(max_batch=2) as engine:
        tasks = [asyncio.create_task(engine.generate(asked("x", ENDLESS))) for _ in range(3)]
        await begun(engine)
        await engine.pause()
        async with asyncio.timeout(1):
            first, second, waiting = await asyncio.gather(*tasks)
        for answer in (first, second):
            assert answer.finish_reason == "abort"
            assert 0 < len(answer.token_ids) < 3000
            assert len(answer.token_ids) == len(answer.logprobs or ()) == len(answer.versions)
        assert (waiting.finish_reason, waiting.token_ids) == ("abort", [])
        refused = await engine.generate(asked("x", Sampling(max_tokens=4)))
        assert (refused.finish_reason, refused.token_ids, refused.logprobs) == ("abort", [], [])
        assert refused.logprob_kind == "processed"
        await engine.resume()
        again = await engine.generate(asked("x", Sampling(max_tokens=4, min_tokens=4)))
        assert again.finish_reason == "length"


async def test_abort_ends_one_request_wherever_it_is() -> None:
    async with engine_of(max_batch=1) as engine:
        running = asyncio.create_task(engine.generate(asked("x", ENDLESS, "running")))
        await begun(engine)
        waiting = asyncio.create_task(engine.generate(asked("x", ENDLESS, "waiting")))
        await asyncio.sleep(0)
        await engine.abort("waiting")
        answer = await waiting
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        await engine.abort("nobody")
        assert not running.done()
        await engine.abort("running")
        answer = await running
        assert answer.finish_reason == "abort"
        assert answer.token_ids
        await engine.abort("running")


async def test_an_interrupted_response_goes_on_as_if_it_had_not_been() -> None:
    whole = replace(ENDLESS, max_tokens=120, min_tokens=120)
    request = asked("partial", whole)
    async with engine_of() as engine:
        expected = await engine.generate(request)
        task = asyncio.create_task(engine.generate(request))
        await begun(engine, 20)
        await engine.pause()
        part = await task
        await engine.resume()
        assert 0 < len(part.token_ids) < 120
        left = 120 - len(part.token_ids)
        rest = await engine.generate(
            replace(
                request,
                token_ids=[*request.token_ids, *part.token_ids],
                sampling=replace(whole, max_tokens=left, min_tokens=left),
            )
        )
    assert part.token_ids + rest.token_ids == expected.token_ids
    joined = [*(part.logprobs or ()), *(rest.logprobs or ())]
    assert joined == pytest.approx(expected.logprobs, abs=1e-4)


async def test_closing_fails_what_is_under_way() -> None:
    async with engine_of() as engine:
        task = asyncio.create_task(engine.generate(asked("x", ENDLESS)))
        await begun(engine)
        await engine.close()
        with pytest.raises(EngineError, match="closed while the request was under way"):
            await task
        with pytest.raises(EngineError, match="the engine was closed"):
            await engine.generate(asked("x", Sampling()))
        await engine.close()


# -- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_carry_the_version_that_made_them_when_weights_change_under_way(
    family: str,
) -> None:
    models = [tiny_model(TOKENIZER, family=family, seed=seed) for seed in range(3)]
    request = asked("in flight", replace(ENDLESS, max_tokens=200, min_tokens=200))
    async with engine_of(tiny_model(TOKENIZER, family=family, seed=0), version=7) as engine:
        task = asyncio.create_task(engine.generate(request))
        for version in (8, 9):
            await begun(engine, 20)
            await engine.update_weights(models[version - 7].state_dict(), version)
            assert engine.policy_version == version
        await begun(engine, 20)
        answer = await task
        after = await engine.generate(replace(request, sampling=Sampling(max_tokens=2)))
    assert set(after.versions) == {9}
    assert answer.versions == sorted(answer.versions)
    assert set(answer.versions) == {7, 8, 9}
    of_version = [recomputed(m, request, answer.token_ids, request.sampling) for m in models]
    expected = [of_version[v - 7][i] for i, v in enumerate(answer.versions)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def changed(weights: dict[str, Any], **values: Any) -> dict[str, Any]:
    found = dict(weights)
    for name, value in values.items():
        full = next(n for n in weights if n.endswith(name.replace("__", ".")))
        if value is None:
            del found[full]
        else:
            found[full] = value
    return found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"norm__weight": None}, "missing: model.layers.0.self_attn"),
        ({"lm_head__weight": torch.zeros(3, 32)}, r"other shapes: lm_head.weight \(3, 32\) for"),
        ({"norm__weight": torch.zeros(8, dtype=torch.bfloat16)}, "torch.bfloat16 for"),
        ({"norm__weight": [1.0]}, "no tensors: "),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_nothing_is_copied(
    change: dict[str, Any], what: str
) -> None:
    new = tiny_model(TOKENIZER, family="qwen3", seed=1)
    untied = {k: v.clone() for k, v in new.state_dict().items()}
    request = asked("x", Sampling(max_tokens=8, seed=1))
    async with engine_of("qwen3") as engine:
        before = await engine.generate(request)
        with pytest.raises(WeightsError, match=what):
            await engine.update_weights(changed(untied, **change), 1)
        with pytest.raises(WeightsError, match="unknown: extra, more"):
            await engine.update_weights(
                {**untied, "extra": torch.zeros(1), "more": torch.zeros(1)}, 1
            )
        assert engine.policy_version == 0
        after = await engine.generate(request)
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs
        await engine.update_weights(untied, 1)
        assert (await engine.generate(request)).logprobs != before.logprobs


async def test_a_tied_parameter_may_come_under_one_name_or_both_but_not_with_two_values() -> None:
    new = tiny_model(TOKENIZER, family="qwen3", seed=1)
    whole = {k: v.clone() for k, v in new.state_dict().items()}
    request = asked("x", Sampling(max_tokens=5, seed=1))
    async with engine_of("qwen3") as engine:
        for version, left_out in enumerate(("lm_head__weight", "embed_tokens__weight"), 1):
            await engine.update_weights(changed(whole, **{left_out: None}), version)
        await engine.update_weights(dict(new.named_parameters()), 3)
        answer = await engine.generate(request)
        assert set(answer.versions) == {3}
        wrong = changed(whole, lm_head__weight=torch.zeros_like(whole["lm_head.weight"]))
        with pytest.raises(WeightsError, match=r"different here: .*embed_tokens.* and lm_head"):
            await engine.update_weights(wrong, 4)
        both = changed(whole, lm_head__weight=None, embed_tokens__weight=None)
        with pytest.raises(WeightsError, match=r"missing: model\.embed_tokens\.weight"):
            await engine.update_weights(both, 4)
    expected = recomputed(new, request, answer.token_ids, request.sampling)
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_weights_that_give_no_numbers_fail_requests_and_not_the_engine() -> None:
    model = tiny_model(TOKENIZER)
    good = {k: v.clone() for k, v in model.state_dict().items()}
    bad = {k: torch.full_like(v, float("nan")) for k, v in good.items()}
    async with engine_of(model) as engine:
        await engine.update_weights(bad, 1)
        with pytest.raises(EngineError, match="weights of version 1 give logits of NaN"):
            await engine.generate(asked("x", Sampling(max_tokens=2)))
        await engine.update_weights(good, 2)
        answer = await engine.generate(asked("x", Sampling(max_tokens=2, min_tokens=2)))
    assert answer.versions == [2, 2]


async def test_an_error_in_a_step_fails_its_requests_and_not_the_engine() -> None:
    async with engine_of() as engine:

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        handle = engine._model.register_forward_pre_hook(fail)
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            await engine.generate(asked("x", Sampling(max_tokens=2)))
        handle.remove()
        answer = await engine.generate(asked("x", Sampling(max_tokens=2, min_tokens=2)))
    assert len(answer.token_ids) == 2


async def test_an_error_of_those_that_join_leaves_the_others_alone() -> None:
    async with engine_of() as engine:
        running = asyncio.create_task(
            engine.generate(asked("x", replace(ENDLESS, max_tokens=200, min_tokens=200)))
        )
        await begun(engine)

        def fail_prefill(module: Any, args: Any, inputs: Any) -> None:
            if inputs["input_ids"].shape[1] > 1:
                raise RuntimeError("out of memory")

        engine._model.register_forward_pre_hook(fail_prefill, with_kwargs=True)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.generate(asked("several tokens", Sampling(max_tokens=2)))
        answer = await running
    assert len(answer.token_ids) == 200


async def test_an_update_whose_caller_is_gone_does_not_end_the_thread() -> None:
    model = tiny_model(TOKENIZER)
    async with engine_of(model) as engine:
        running = asyncio.create_task(engine.generate(asked("x", ENDLESS)))
        await begun(engine)
        update = asyncio.create_task(engine.update_weights(model.state_dict(), 1))
        await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        await begun(engine)
        await engine.pause()
        assert (await running).finish_reason == "abort"


# -- routed experts --------------------------------------------------------------------------


@torch.no_grad()
def experts_of(model: Any, row: Sequence[int]) -> np.ndarray:
    """By the router logits of one forward pass over all but the last token."""
    logits = model(torch.tensor([row[:-1]]), output_router_logits=True).router_logits
    return torch.cat([layer.topk(2, dim=-1).indices for layer in logits], dim=-1).numpy()


def moe(kind: str, seed: int = 0) -> Any:
    if kind == "mixtral":
        return tiny_model(TOKENIZER, family="mixtral", seed=seed)
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64,
            num_hidden_layers=3, mlp_only_layers=[1], decoder_sparse_step=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.1,
            eos_token_id=EOS,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
async def test_routed_experts_are_those_of_a_forward_pass_one_row_fewer_than_tokens(
    kind: str,
) -> None:
    model = moe(kind)
    requests = [
        asked("e" * (1 + 4 * i), Sampling(max_tokens=5 + i, seed=i, routed_experts=i != 1))
        for i in range(4)
    ]
    async with engine_of(model) as engine:
        answers = await asyncio.gather(*map(engine.generate, requests))
    assert answers[1].routed_experts is None
    for i in (0, 2, 3):
        row = [*requests[i].token_ids, *answers[i].token_ids]
        experts = answers[i].routed_experts
        assert experts is not None
        assert (experts.dtype, experts.shape) == (np.uint16, (len(row) - 1, 4))
        assert np.array_equal(experts, experts_of(model, row))
        if kind == "mixtral":
            assert len(np.unique(experts)) > 1


async def test_experts_of_tokens_made_before_an_update_stay_as_they_were() -> None:
    old, new = moe("mixtral"), moe("mixtral", seed=1)
    request = asked("x", replace(ENDLESS, max_tokens=80, min_tokens=80, routed_experts=True))
    async with engine_of(moe("mixtral")) as engine:
        task = asyncio.create_task(engine.generate(request))
        await begun(engine, 20)
        await engine.update_weights(new.state_dict(), 1)
        answer = await task
    row = [*request.token_ids, *answer.token_ids]
    assert answer.routed_experts is not None
    assert len(answer.routed_experts) == len(row) - 1
    # The row of a token is made when the next one is: with the version of the next.
    turn = len(request.token_ids) + answer.versions.index(1) - 1
    assert np.array_equal(answer.routed_experts[:turn], experts_of(old, row)[:turn])
    assert np.array_equal(answer.routed_experts[turn:], experts_of(new, row)[turn:])


async def test_experts_of_a_continued_response_join() -> None:
    request = asked("x", Sampling(max_tokens=6, min_tokens=6, seed=2, routed_experts=True))
    model = moe("mixtral")
    async with engine_of(model) as engine:
        part = await engine.generate(request)
        rest = await engine.generate(
            replace(request, token_ids=[*request.token_ids, *part.token_ids])
        )
    row = [*request.token_ids, *part.token_ids, *rest.token_ids]
    assert rest.routed_experts is not None
    joined = joined_experts(part.routed_experts, rest.routed_experts)
    assert np.array_equal(joined, experts_of(model, row))


# -- loading ---------------------------------------------------------------------------------


async def test_a_model_loads_from_its_folder_and_nothing_there_is_unpickled(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "m", family="gpt2", seed=3)
    engine = HFEngine(str(folder), threads=1, version=4)
    try:
        request = asked("x", Sampling(max_tokens=5, seed=0))
        answer = await engine.generate(request)
        assert set(answer.versions) == {4}
        expected = recomputed(
            tiny_model(TOKENIZER, family="gpt2", seed=3), request, answer.token_ids, Sampling()
        )
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)
    finally:
        await engine.close()
    weights = folder / "model.safetensors"
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        HFEngine(folder)
    with pytest.raises(EngineError, match="no folder"):
        HFEngine(tmp_path / "nowhere")


async def test_a_model_is_made_of_a_configuration_by_seed() -> None:
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 2,
    }  # fmt: skip
    request = Request("r", [5, 6], Sampling(max_tokens=4, min_tokens=4, seed=0))
    logprobs: list[Any] = []
    for seed in (0, 0, 1):
        engine = HFEngine(config, seed=seed, threads=1)
        logprobs.append((await engine.generate(request)).logprobs)
        await engine.close()
    assert logprobs[0] == logprobs[1] != logprobs[2]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch"):
        HFEngine(tiny_model(TOKENIZER), max_batch=0)
    with pytest.raises(ValueError, match="logprob_kind"):
        HFEngine(tiny_model(TOKENIZER), logprob_kind="recomputed")
    with pytest.raises(ValueError, match="dtype 'bfloat17'"):
        HFEngine(tiny_model(TOKENIZER), dtype="bfloat17")
