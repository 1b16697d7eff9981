"""The tiny model: its tokenizer covers every string, its chat template every kind of message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentloop.tiny import CONTEXT, make_tiny_model, tiny_model, tiny_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    {"role": "assistant", "content": "2"},
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral"])
def test_a_saved_model_loads_with_its_tokenizer_and_computes(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_tiny_model(tmp_path / "deep" / family, family=family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__.lower().startswith(family)
    assert model.config.vocab_size == len(tokenizer) <= 320
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 250_000
    ids = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], return_dict=False)
    logits = model(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), len(tokenizer))
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.05
    assert len(ids) < CONTEXT


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator_alone() -> None:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, same, other = (tiny_model(tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    state = first.state_dict()
    assert all(torch.equal(state[k], v) for k, v in same.state_dict().items())
    assert not all(torch.equal(state[k], v) for k, v in other.state_dict().items())


@pytest.mark.parametrize(
    "text", ["", " two  spaces ", "<tool_call>\n{}", "Größe 数 🙂\x00\t", "don 't ."]
)
def test_every_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_tokenizer_is_always_the_same() -> None:
    assert tiny_tokenizer().get_vocab() == tiny_tokenizer().get_vocab()


def test_special_tokens_are_one_token_each_and_skipped_when_asked() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<|im_start|>x<|im_end|>")
    assert len(ids) == 3
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x"


def test_the_template_writes_tools_calls_and_responses_in_hermes_form() -> None:
    text = tiny_tokenizer().apply_chat_template(
        CONVERSATION, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe brief.\n\nFunctions")
    assert '"description": "a sum"' in text
    assert text.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_tools_the_template_is_plain_chat() -> None:
    template = tiny_tokenizer().apply_chat_template
    user = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert template([user], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert template(CONVERSATION[:1], tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )


def test_what_follows_changes_nothing_before_it() -> None:
    template = tiny_tokenizer().apply_chat_template
    whole: Any = template(CONVERSATION, tools=[TOOL], tokenize=False)
    for end in (1, 2, 3, 5):  # 4 would cut between two tool answers, which share a turn
        part: Any = template(CONVERSATION[:end], tools=[TOOL], tokenize=False)
        assert whole.startswith(part)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no family 'bert'; one of llama"):
        make_tiny_model(tmp_path, family="bert")
