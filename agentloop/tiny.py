"""A causal language model of a few thousand weights with its tokenizer, made on the spot.

Owns the smallest model that everything here runs with: tests and examples need neither a hub nor
a download. It knows nothing; what it writes is noise in valid tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Family: TypeAlias = Literal["llama", "qwen3", "gpt2", "mixtral"]

CONTEXT: Final = 4096
"""Tokens that a tiny model can be asked with, its answer included."""

END_OF_TEXT: Final = "<|endoftext|>"
TURN_BEGIN: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

_VOCAB: Final = 320

_CORPUS: Final = (
    "system user assistant tool You can call functions to help with the question.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    '<tool_response>\n{"result": 3}\n</tool_response>',
    '{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}',
    "What is the sum of the numbers in the list? The answer is 42.",
    "<answer>17</answer> Think step by step and give the final answer.",
)
"""What the byte pairs are learned from: enough for words of the template to be few tokens."""

CHAT_TEMPLATE: Final = """\
{%- macro open(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
  {{- open('system') -}}
  {{- messages[0].content + '\\n\\n' if has_system else '' -}}
  {{- 'Functions that you may call:\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools>\\nA call is one JSON object with name and arguments between <tool_call> and ' -}}
  {{- '</tool_call>.<|im_end|>\\n' -}}
{%- elif has_system -%}
  {{- open('system') + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- open('user') -}}{%- endif -%}
    {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {{- '\\n' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\\n' -}}
  {%- else -%}
    {{- open(message.role) -}}
    {%- if message.content is string -%}
      {{- message.content -}}
    {%- else -%}
      {%- for part in message.content or [] -%}{{- part.text or '' -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
      {%- if function.arguments is string -%}
        {{- function.arguments -}}
      {%- else -%}
        {{- function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- open('assistant') -}}{%- endif -%}
"""
"""ChatML with tools in the Hermes form; every turn reads the same whatever follows it."""


def make_tiny_model(path: str | Path, *, family: str = "llama", seed: int = 0) -> Path:
    """A folder with configuration, random weights and tokenizer, as `from_pretrained` takes it.

    `family` is llama, qwen3 (tied embeddings), gpt2 (tied, learned positions) or mixtral
    (4 experts, 2 of them per token). The same seed gives the same weights, and the global random
    state is left alone. The tokenizer covers every string (byte-level BPE) and is the same for
    all.

    Raises:
        ValueError: there is no such family.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny_model(tokenizer, family=family, seed=seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens with a chat template; always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=_VOCAB,
            min_frequency=2,
            show_progress=False,
            special_tokens=[END_OF_TEXT, TURN_BEGIN, TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[TURN_BEGIN],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, *, family: str = "llama", seed: int = 0
) -> PreTrainedModel:
    """A model in evaluation mode, 2 layers of width 32, for this tokenizer's vocabulary."""
    return random_model(_config(tokenizer, family), tokenizer, seed=seed)


def random_model(config: Any, tokenizer: Any, *, seed: int) -> PreTrainedModel:
    """A model of this configuration in evaluation mode, with random weights in float32: the same
    for the same seed. It ends where the tokenizer says; the global random state is left alone."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    random: Any = torch.random
    automatic: Any = AutoModelForCausalLM
    with random.fork_rng(devices=[]):
        random.manual_seed(seed)
        model = automatic.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.eval()


def _config(tokenizer: PreTrainedTokenizerFast, family: str) -> Any:
    from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

    if family not in get_args(Family):
        raise ValueError(f"no family {family!r}; one of {', '.join(get_args(Family))}")
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.1,  # a wider spread than usual: tokens differ in probability
    }
    if family == "gpt2":
        return GPT2Config(
            n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, n_inner=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
    shared |= {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    if family == "qwen3":
        return Qwen3Config(head_dim=8, tie_word_embeddings=True, **shared)
    if family == "mixtral":
        return MixtralConfig(
            num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **shared
        )
    return LlamaConfig(tie_word_embeddings=False, **shared)
