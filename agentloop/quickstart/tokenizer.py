"""A tokenizer of digits and of a few whole phrases, with the chat template that goes with it.

Owns what an episode looks like in tokens. Everything that a policy of this task has no choice
about is one token: the question's words, the opening and the end of a call, the tags of an answer.
An episode with a call is about 30 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD: Final = "<|pad|>"
UNKNOWN: Final = "<|unknown|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
TOOL: Final = "<|tool|>"
END: Final = "<|end|>"

QUESTION: Final = "State the final answer to the following arithmetic problem: "
"""What reasoning-gym puts before each sum of `chain_sum`."""

CALL: Final = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END: Final = '"}}</tool_call>'
ANSWER: Final = "<answer>"
ANSWER_END: Final = "</answer>"

CONTEXT: Final = 512

_PHRASES: Final = (QUESTION, CALL, CALL_END, ANSWER, ANSWER_END, " + ", " - ", " =")
_CHARACTERS: Final = "0123456789+-*/%().: "
"""Anything else is unknown: a run of such characters is one token."""

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
  {{- '<|' + ('user' if message.role == 'system' else message.role) + '|>' -}}
  {{- message.content or '' -}}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function or call -%}
    {{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
    {%- if function.arguments is string -%}
      {{- function.arguments -}}
    {%- else -%}
      {{- function.arguments | tojson -}}
    {%- endif -%}
    {{- '}</tool_call>' -}}
  {%- endfor -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""A turn is its role, its text and an end. Tools are not described: the policy learns its one."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the task, of 34 tokens; always the same."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNKNOWN, USER, ASSISTANT, TOOL, END]
    vocabulary = {token: place for place, token in enumerate([*special, *_CHARACTERS])}
    letters: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=True)
    )
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    letters.add_tokens([AddedToken(phrase, normalized=False) for phrase in _PHRASES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[USER, ASSISTANT, TOOL],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
