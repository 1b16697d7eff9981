"""A chat template: what it writes of messages, and between two turns of an assistant.

Owns the text. A template writes whole conversations; what it puts between two turns is found by
rendering the new messages behind a short conversation that is the same every time. Templates that
would write earlier turns differently then are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, TypeAlias, cast

from agentloop.trajectory.state import Message

ToolSchema: TypeAlias = Mapping[str, Any]
"""One tool in the form of OpenAI: {"type": "function", "function": {name, description, …}}."""

# What stands for the turns before an observation. Letters and digits only: no template escapes
# them, and none of them is part of a special token.
_QUESTION: Final = "q7Question7q"
_THOUGHT: Final = "q7Thought7q"
_ANSWER: Final = "q7Answer7q"
_TOLD: Final = "q7Told7q"


class ChatTemplateError(ValueError):
    """A template cannot render these messages, or not so that a conversation can go on."""


@dataclass(frozen=True, slots=True)
class _Between:
    """How a template goes on after an assistant's turn with messages of some roles."""

    called: bool
    """Whether the turn before must have called tools."""
    end: str
    """What it puts at the end of an assistant's turn, whatever follows."""
    names_tools: bool = True
    """Whether it must be told of the tools again: most templates say them in the prompt only."""


class ChatTemplate:
    """The template of a tokenizer, or another one for it."""

    def __init__(self, tokenizer: Any, template: str | None, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._arguments = dict(arguments)
        self._between: dict[tuple[object, ...], _Between] = {}
        added: list[Any] = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special}
        special.update(cast("list[str]", tokenizer.all_special_tokens))
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])) or "$^")
        """Matches every special token in a text."""
        self.end_ids: tuple[int, ...] = ()
        """Tokens that end a turn."""

    def between(
        self, system: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, int | None]:
        """What follows the text of an assistant's turn up to where the next begins.

        And where in it the token stands that ends the turn, if it has one.

        Raises:
            ChatTemplateError: the template cannot render it, or not behind turns as they are.
        """
        roles = tuple(str(message.get("role")) for message in new)
        key = (roles if len(set(roles)) > 1 else roles[:1], bool(system), bool(tools))
        known = self._between.get(key)
        if known is None:
            known = self._between[key] = self._examine(system, new, tools)
        return self._continuation(known, system, new, tools), self._first_end(known.end)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, answers: bool
    ) -> str:
        """The text of messages; with `answers` up to where the assistant begins to speak.

        Raises:
            ChatTemplateError: it cannot.
        """
        try:
            return cast(
                "str",
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self._template,
                    add_generation_prompt=answers,
                    tokenize=False,
                    **self._arguments,
                ),
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatTemplateError(
                f"the chat template cannot render messages of roles {roles}: {error}; "
                "pass a `chat_template` that can"
            ) from error

    def turn_end(self) -> list[int]:
        """The token with which the template ends an assistant's turn, if it is a special one."""
        try:
            text = self.render(_base([], None), (), answers=False)
        except ChatTemplateError:
            return []  # said when it is used
        found = self.special.search(text.rpartition(_ANSWER)[2])
        return [] if found is None else [int(self._tokenizer.convert_tokens_to_ids(found[0]))]

    def _first_end(self, text: str) -> int | None:
        """Where the first end token of a turn's end begins."""
        for found in self.special.finditer(text):
            if self._tokenizer.convert_tokens_to_ids(found[0]) in self.end_ids:
                return found.start()
        return None

    def _continuation(
        self,
        between: _Between,
        system: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> str:
        """What follows the text of an assistant's turn."""
        tools = tools if between.names_tools else ()
        if not between.called:
            text = self.render([*_base(system, None), *new_messages], tools, answers=True)
            return text.partition(_ANSWER)[2]
        base = _base(system, new_messages)
        before = self.render(base, tools, answers=False)
        text = self.render([*base, *new_messages], tools, answers=True)
        if not text.startswith(before) or (_ANSWER in before and _THOUGHT not in before):
            raise _rewrites(new_messages)
        return between.end + text[len(before) :]

    def _examine(
        self, system: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> _Between:
        """Find out how these messages are rendered behind a turn, once for messages of a kind.

        Raises:
            ChatTemplateError: not at all, or earlier turns change with them.
        """
        base = _base(system, None)
        before = self.render(base, tools, answers=False)
        if _ANSWER not in before:
            raise ChatTemplateError("the chat template leaves out what an assistant says")
        same, _, end = before.rpartition(_ANSWER)
        told = [{**message, "content": _TOLD} for message in new]
        found: _Between | None = None
        rest: str | None = None
        error = _left_out(new)
        try:
            text = self.render([*base, *told], tools, answers=True)
        except ChatTemplateError as refused:
            error = refused
        else:
            now, said, rest = text.partition(_ANSWER)
            # Some templates put one more token behind the last turn.
            kept = end[: sum(1 for _ in takewhile(_alike, zip(end, rest, strict=False)))]
            lost = self._first_end(kept) is None and self._first_end(end) is not None
            if not said or now != same or _THOUGHT not in now or lost:
                raise _rewrites(new)
            if _TOLD in rest:
                found = _Between(False, kept)
        if any(message.get("role") == "tool" for message in new):
            called = _Between(True, end if found is None else found.end)
            try:
                text = self._continuation(called, system, told, tools)
                if _TOLD in text and (found is None or text != rest):
                    found = called
            except ChatTemplateError as refused:
                error = refused
        if found is None:
            raise error
        if not tools:
            return found
        bare = replace(found, names_tools=False)
        try:
            is_same = self._continuation(bare, system, told, tools) == self._continuation(
                found, system, told, tools
            )
        except ChatTemplateError:
            is_same = False
        return bare if is_same else found


def _base(system: Sequence[Message], answered: Sequence[Message] | None) -> list[Message]:
    """A conversation up to an assistant's turn; with calls, those that `answered` answers."""
    question: Message = {"role": "user", "content": _QUESTION}
    answer: Message = {
        "role": "assistant",
        "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}",
    }
    if answered is not None:
        answer["tool_calls"] = [
            {
                "id": message.get("tool_call_id") or f"call{i:05d}",
                "type": "function",
                "function": {"name": message.get("name") or "tool", "arguments": {}},
            }
            for i, message in enumerate(answered)
            if message.get("role") == "tool"
        ]
    return [*system, question, answer]


def _alike(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _left_out(new: Sequence[Message]) -> ChatTemplateError:
    roles = ", ".join(str(message.get("role")) for message in new)
    return ChatTemplateError(
        f"the chat template leaves out what messages of roles {roles} say; "
        "pass a `chat_template` that does not"
    )


def _rewrites(new: Sequence[Message]) -> ChatTemplateError:
    roles = ", ".join(str(message.get("role")) for message in new)
    return ChatTemplateError(
        f"the chat template writes earlier turns differently once messages of roles {roles} follow "
        "(it strips thoughts, or moves the tools): the policy would not see again what it "
        "generated; pass a `chat_template` that keeps earlier turns as they are"
    )
