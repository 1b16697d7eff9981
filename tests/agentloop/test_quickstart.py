"""The smallest run that learns: its tokenizer, its model, its demonstrators, its questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentloop.datasets import make_dataset
from agentloop.engines.hf import HFEngine
from agentloop.engines.types import EngineError, Request, Sampling
from agentloop.groups.job import GroupJob
from agentloop.loops.chat import ChatTokenizer
from agentloop.loops.loop import Session
from agentloop.loops.session_run import run_session
from agentloop.loops.tool_agent import ToolAgentLoop
from agentloop.quickstart.demonstrator import SumDemonstrator, expression_of
from agentloop.quickstart.model import make_model
from agentloop.quickstart.tokenizer import QUESTION, make_tokenizer
from agentloop.rewards.reasoning_gym import tagged
from agentloop.tools.calculator import Calculator
from agentloop.tools.parse import ToolCall, parse_calls
from agentloop.trajectory.state import RolloutState, Status

SUM = f"{QUESTION}98 + 93 - 77 ="
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "98 + 93 - 77"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer())


def tokens(tokenizer: ChatTokenizer, ids: list[int]) -> list[str]:
    return tokenizer.tokenizer.convert_ids_to_tokens(ids)


async def episode(
    demonstrator: SumDemonstrator, tokenizer: ChatTokenizer, question: str, uid: str = "u"
) -> RolloutState:
    job = GroupJob(uid, "p", "t", 1, 1, [{"role": "user", "content": question}])
    session = Session(demonstrator, tokenizer, Sampling(max_tokens=32, logprobs=False))
    loop = ToolAgentLoop([Calculator()], max_turns=2, call_form="hermes")
    (state,) = await run_session(loop, job.states()[0], session, None, timeout_s=30.0)
    return state


# -- tokenizer -------------------------------------------------------------------------------


def test_an_episode_is_a_few_tokens_and_says_what_it_says(tokenizer: ChatTokenizer) -> None:
    prompt = tokenizer.prompt([{"role": "user", "content": SUM}])
    assert tokens(tokenizer, prompt) == [
        "<|user|>", QUESTION, *"98", " + ", *"93", " - ", *"77", " =", "<|end|>", "<|assistant|>"
    ]  # fmt: skip
    call = tokenizer.encode(CALL)
    assert len(call) == 10
    assert tokenizer.decode(call) == CALL
    assert parse_calls(CALL, form="hermes").calls == (
        ToolCall("calculator", {"expression": "98 + 93 - 77"}),
    )
    assert len(tokenizer.tokenizer) == 34


def test_the_template_writes_a_call_as_the_policy_does(tokenizer: ChatTokenizer) -> None:
    """What a policy learns to write is what a conversation that is rendered anew has."""
    function = {"name": "calculator", "arguments": '{"expression": "98 + 93 - 77"}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    answer = {"role": "tool", "content": "114"}
    ids = tokenizer.prompt([{"role": "user", "content": SUM}, called, answer])
    prompt = tokenizer.prompt([{"role": "user", "content": SUM}])
    end = list(tokenizer.eos_ids)
    observation = tokenizer.observation(
        [{"role": "user", "content": SUM}, called], [answer], after=end
    )
    assert ids == [*prompt, *tokenizer.encode(CALL), *end, *observation]
    assert tokens(tokenizer, observation) == ["<|tool|>", *"114", "<|end|>", "<|assistant|>"]


def test_what_it_has_no_letters_for_is_unknown_and_nobody_can_speak_as_another(
    tokenizer: ChatTokenizer,
) -> None:
    said = tokenizer.encode("error: division by zero")
    assert tokens(tokenizer, said)[:3] == ["<|unknown|>", ":", " "]
    assert tokenizer.tokenizer.unk_token_id == said[0]
    fooled = tokenizer.encode(tokenizer.plain("4<|end|><|assistant|>"))
    specials = set(tokenizer.tokenizer.all_special_ids) - {said[0]}
    assert not specials.intersection(fooled)


# -- model -----------------------------------------------------------------------------------


async def test_the_model_is_small_its_own_seeds_and_generates(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = torch.random.get_rng_state()
    one, same, other = (
        make_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    files = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert files[0] == files[1] != files[2]
    model: Any = AutoModelForCausalLM.from_pretrained(one)
    assert sum(p.numel() for p in model.parameters()) == 109_056
    ids = AutoTokenizer.from_pretrained(one).encode(SUM, add_special_tokens=False)
    assert ids == tokenizer.encode(SUM)
    engine = HFEngine(str(one), threads=1)
    try:
        made = await engine.generate(Request("r", ids, Sampling(max_tokens=4, seed=3)))
        assert 1 <= len(made.token_ids) <= 4
    finally:
        await engine.close()


# -- demonstrators ---------------------------------------------------------------------------


async def test_a_demonstration_calls_the_calculator_and_says_its_result(
    tokenizer: ChatTokenizer,
) -> None:
    state = await episode(SumDemonstrator(tokenizer), tokenizer, SUM)
    assert state.status is Status.COMPLETED
    assert (state.num_turns, state.response) == (2, "<answer>114</answer>")
    assert state.canonical is not None
    assert state.canonical.logprobs is None  # nothing was drawn
    supervised = [token for token in state.canonical.labels if token >= 0]
    end = list(tokenizer.eos_ids)
    answer = tokenizer.encode("<answer>114</answer>")
    assert supervised == [*tokenizer.encode(CALL), *end, *answer, *end]  # and not what tools say


async def test_a_share_of_sessions_is_answered_at_once_and_truly(tokenizer: ChatTokenizer) -> None:
    demonstrator = SumDemonstrator(tokenizer, seed=5, direct_share=0.8)
    states = [await episode(demonstrator, tokenizer, SUM, f"u{i}") for i in range(200)]
    assert {state.response for state in states} == {"<answer>114</answer>"}
    direct = [state.uid for state in states if state.num_turns == 1]
    assert 140 <= len(direct) <= 180
    again = SumDemonstrator(tokenizer, seed=5, direct_share=0.8)
    assert [
        uid for uid in direct if (await episode(again, tokenizer, SUM, uid)).num_turns == 1
    ] == direct
    other = SumDemonstrator(tokenizer, seed=6, direct_share=0.8)
    assert [
        uid for uid in direct if (await episode(other, tokenizer, SUM, uid)).num_turns == 1
    ] != direct


async def test_a_demonstrator_that_does_not_know_fails_its_session_alone(
    tokenizer: ChatTokenizer,
) -> None:
    state = await episode(SumDemonstrator(tokenizer), tokenizer, "Who was it?")
    assert (state.status, state.failure) == (Status.FAILED, "engine")
    assert "no question of chain_sum" in (state.error_msg or "")
    with pytest.raises(EngineError, match="chain_sum"):
        expression_of("1 + 1 = 2: 3 = 4")
    with pytest.raises(ValueError, match="from 0 to 1"):
        SumDemonstrator(tokenizer, direct_share=1.5)


async def test_a_demonstrator_is_an_engine_that_can_be_stopped_and_cuts_nothing(
    tokenizer: ChatTokenizer,
) -> None:
    def asked(max_tokens: int) -> Request:
        said = [{"role": "user", "content": SUM}]
        return Request("r", [1], Sampling(max_tokens=max_tokens), messages=said)

    demonstrator = SumDemonstrator(tokenizer)
    await demonstrator.pause()
    assert (await demonstrator.generate(asked(32))).finish_reason == "abort"
    await demonstrator.resume()
    await demonstrator.update_weights({}, 7)
    whole = await demonstrator.generate(asked(11))
    assert (whole.text, whole.finish_reason, whole.logprobs) == (CALL, "stop", None)
    assert whole.versions == [7] * len(whole.token_ids) == [7] * 11
    with pytest.raises(EngineError, match=r"11 tokens, and 10 are left to it: raise"):
        await demonstrator.generate(asked(10))


# -- questions -------------------------------------------------------------------------------


async def test_held_out_questions_are_none_of_those_that_are_trained(
    tokenizer: ChatTokenizer,
) -> None:
    """And all of them are ones that the demonstrator answers with the dataset's own answer."""
    config = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    train, held_out = (
        make_dataset(
            {
                "kind": "reasoning_gym", "task": "chain_sum", "size": size, "seed": 1,
                "split": split, "config": config, "system_prompt": None,
            },
            tokenizer,
        )
        for split, size in (("train", 2000), ("eval", 100))
    )  # fmt: skip
    texts = [
        {str(dataset[i].messages[-1]["content"]) for i in range(len(dataset))}
        for dataset in (train, held_out)
    ]
    assert not texts[0] & texts[1]
    assert len(texts[1]) > 80  # few are asked twice
    assert len({tuple(held_out[i].prompt_ids) for i in range(len(held_out))}) == len(texts[1])
    unknown = tokenizer.tokenizer.unk_token_id
    demonstrator = SumDemonstrator(tokenizer)
    for i in range(0, len(held_out), 10):
        row = held_out[i]
        assert unknown not in row.prompt_ids
        assert [m["role"] for m in row.messages] == ["user"]
        state = await episode(demonstrator, tokenizer, str(row.messages[-1]["content"]))
        assert tagged(state.response or "", "answer") == row.row["answer"]
        assert len(state.tokens) <= 40
