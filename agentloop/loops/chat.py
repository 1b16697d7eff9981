"""Chat messages to tokens and back, with the tokens that a turn puts between two of the policy's.

Owns tokens. What the policy generated is never tokenized again: a prompt is encoded once, and each
later turn adds what its template puts after an assistant's turn.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from agentloop.loops.chat_template import ChatTemplate, ChatTemplateError, ToolSchema
from agentloop.trajectory.state import Message

__all__ = ["ChatTemplateError", "ChatTokenizer", "ToolSchema"]

_REMEMBERED: Final = 256
"""How many renderings are kept."""


class ChatTokenizer:
    """A tokenizer of transformers as agent loops use it. Holds no state of a conversation.

    `eos_ids` are the tokens that end a turn: the tokenizer's own, those given, and the one that the
    template puts behind an assistant's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        eos_ids: Sequence[int] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a tokenizer, and the template where it has none or another is wanted.

        `template_arguments` are given to every rendering (`enable_thinking`, for instance).
        """
        self.tokenizer = tokenizer
        # Half the time of going through transformers, which sets truncation and padding each time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._remembered: dict[str, array[int]] = {}
        self._tools: tuple[Sequence[ToolSchema], str] = ((), "[]")
        """Those of the last call, and how they are written as JSON."""
        self._template = ChatTemplate(tokenizer, chat_template, template_arguments or {})
        ends: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        ends += [*eos_ids, *self._template.turn_end()]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._template.end_ids = self.eos_ids

    @classmethod
    def from_pretrained(cls, path: str, **arguments: Any) -> ChatTokenizer:
        """The tokenizer of a folder or a model's name; the arguments are the constructor's."""
        from transformers import AutoTokenizer

        load = cast("Any", AutoTokenizer).from_pretrained
        return cls(load(path), **arguments)

    # -- text --------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        backend = self._backend
        if backend is not None and backend.truncation is None and backend.padding is None:
            return cast("list[int]", backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        if self._backend is not None:
            return cast("str", self._backend.decode(list(token_ids), skip_special_tokens=True))
        return cast(
            "str",
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

    def plain(self, text: str) -> str:
        """A text from outside in which nothing reads as a special token, nor is invalid Unicode.

        Without this a tool's answer could end its own turn and speak as somebody else.
        """
        valid = text.encode("utf-8", "replace").decode("utf-8")
        return self._template.special.sub(lambda found: found[0][0] + " " + found[0][1:], valid)

    # -- messages ----------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """The tokens of a conversation up to where the assistant begins to speak.

        Raises:
            ChatTemplateError: the template cannot render it.
        """
        return self._remember(
            [messages],
            tools,
            lambda: self.encode(self._template.render(messages, tools, answers=True)),
        )

    def observation(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        after: Sequence[int] = (),
    ) -> list[int]:
        """The tokens that lead from the policy's last turn to its next one.

        That is the rest of the turn's end, the new messages, and the beginning of the next answer.
        `messages_before` ends with the assistant's turn that is answered; `after` are the tokens
        that the policy generated in it, or the last of them: an end token that is there already is
        not put again, and one that is missing (a stop string ended the turn) is put.

        Example: the policy said `4<|im_end|>`, and a tool answers `ok`; in ChatML the tokens of
        `\\n<|im_start|>tool\\nok<|im_end|>\\n<|im_start|>assistant\\n`.

        Raises:
            ChatTemplateError: the template cannot render it, or writes earlier turns differently
                once these messages follow: strips their thoughts, or moves the tools.
        """
        system = [m for m in messages_before[:1] if m.get("role") == "system"]
        ended = after[-1] if after and after[-1] in self.eos_ids else None
        return self._remember(
            [system, new_messages, ended],
            tools,
            lambda: self._observation(system, new_messages, tools, ended),
        )

    def _observation(
        self,
        system: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        ended: int | None,
    ) -> list[int]:
        """The tokens that follow a turn which `ended` with this end token, or with none."""
        text, end = self._template.between(system, new_messages, tools)
        if ended is None:
            # A token before the text: some tokenizers put a space before what begins a text.
            anchor = cast("str | None", self.tokenizer.eos_token)
            return self.encode(text) if anchor is None else self.encode(anchor + text)[1:]
        if end is not None:  # the policy has said all up to the end token
            return self.encode(text[end:])[1:]
        ids = self.encode(text)
        return ids[1:] if ids[:1] == [ended] else ids  # the next turn's first token ended it

    def _remember(
        self, key: list[Any], tools: Sequence[ToolSchema], make: Callable[[], list[int]]
    ) -> list[int]:
        """What `make` returns. The sessions of a group ask for the same within a short time."""
        try:
            if self._tools[0] is not tools:
                self._tools = (tools, json.dumps(tools))
            name = json.dumps([*key, self._tools[1]])
        except (TypeError, ValueError):  # images, and other things that are no JSON
            return make()
        known = self._remembered.get(name)
        if known is None:
            while len(self._remembered) >= _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            known = self._remembered[name] = array("i", make())
        return known.tolist()
