"""The loop of a policy that calls tools: turns and observations in one sequence of tokens.

Owns when a session goes on and when it ends. What the policy generated stays as it is; what tools
answer enters between its turns as the template puts it, and is never supervised.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from agentloop.dotted import load
from agentloop.engines.types import Completion
from agentloop.loops.loop import AgentLoop, Session, SessionAborted
from agentloop.tools.parse import CallForm, Parsed, ToolCall, from_message, parse_calls
from agentloop.tools.types import Tool, observe, schema_of
from agentloop.trajectory.state import Message, RolloutState


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What one session works with."""

    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    schemas: Sequence[Mapping[str, Any]] = ()
    opening: str | None = None
    """A first observation, put behind the prompt's last message."""
    is_over: Callable[[], bool] | None = None
    """Asked after each turn's calls: whether there is nothing left to do."""
    score: Callable[[], Awaitable[float | None]] | None = None
    """Asked once, when a session has ended: the session's score, if the world knows it."""
    continues: bool = True
    """Whether an interrupted session can go on: false where what tools did is gone."""


class ToolAgentLoop(AgentLoop):
    """Lets the policy call tools until it answers.

    A turn without a call is the answer, and so is one that `is_answer` (a function, or the dotted
    name of one) takes for it. The session ends as `length` after `max_turns` turns that called
    tools, or when the next observation leaves no token: that observation is cut to what fits. The
    calls of one turn run at the same time, each for `tool_timeout_s` at most; whatever becomes of a
    call is told to the policy.

    A session that is asked to stop while tools run ends with the turn that called them; they are
    called again if it goes on.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        max_turns: int = 8,
        max_calls: int = 16,
        tool_timeout_s: float = 30.0,
        max_observation_chars: int = 4096,
        call_form: CallForm = "any",
        is_answer: Callable[[str], bool] | str | None = None,
        keeps_prompt_ids: bool = False,
    ) -> None:
        """With `keeps_prompt_ids` the dataset's prompt tokens are asked with as they are: a
        processor made them, images and tools included. Else they are made of the messages and the
        tools, and a prompt with images is refused."""
        if max_turns < 1 or max_calls < 1 or max_observation_chars < 1 or tool_timeout_s <= 0:
            raise ValueError("max_turns, max_calls, tool_timeout_s … are positive")
        self._toolbox = _toolbox(tools)
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._tool_timeout_s = tool_timeout_s
        self._max_observation_chars = max_observation_chars
        self._call_form: CallForm = call_form
        self._is_answer = _predicate(is_answer)
        self._keeps_prompt_ids = keeps_prompt_ids

    @asynccontextmanager
    async def toolbox(self, state: RolloutState) -> AsyncGenerator[Toolbox]:
        """What this session works with, for as long as it runs. Subclasses open theirs here."""
        yield self._toolbox

    async def run(self, state: RolloutState, session: Session) -> RolloutState:
        if session.abort_requested.is_set():
            state.finish_reason = "abort"
            return state
        async with self.toolbox(state) as box:
            conversation = self._begin(state, session, box)
            try:
                await self._turns(state, session, box, conversation)
            except SessionAborted:
                state.finish_reason = "abort"
            if box.score is not None and state.finish_reason != "abort":
                score = await box.score()
                if score is not None:
                    state.reward = {**(state.reward or {}), "score": float(score)}
        return state

    def _begin(self, state: RolloutState, session: Session, box: Toolbox) -> list[Message]:
        """The conversation so far, with its tokens in the state."""
        unknown = state.conversation is None and state.generated is not None
        if state.response_ids and (unknown or not box.continues):
            state.reset()  # what was said in it, or what was done, is not known any more
        if state.conversation is None or not state.response_ids:
            state.conversation = _opened(state.messages, box.opening)
        if self._keeps_prompt_ids and state.prompt_ids:
            if box.opening is not None and not state.response_ids:
                raise ValueError("keeps_prompt_ids: an environment's first words would be left out")
        elif _has_images(state):
            raise ValueError(
                "a multimodal prompt: its tokens cannot be made of messages; let the dataset make "
                "them with the tools, and set keeps_prompt_ids"
            )
        elif not state.prompt_ids or not state.response_ids:
            state.prompt_ids = session.tokenizer.prompt(state.conversation, box.schemas)
        return state.conversation

    async def _turns(
        self, state: RolloutState, session: Session, box: Toolbox, conversation: list[Message]
    ) -> None:
        """Turn after turn. A turn enters the conversation together with what answers it."""
        while not session.abort_requested.is_set():
            completion = await session.generate(state, messages=conversation, tools=box.schemas)
            text = self._text(state, session, completion)
            state.response = text
            if completion.finish_reason == "abort":
                return
            parsed = self._parsed(text, completion)
            turn = _turn(text, parsed, state.num_turns)
            over = not parsed.calls or (self._is_answer is not None and self._is_answer(text))
            if over or completion.finish_reason == "length":
                if state.turn_ids:  # an interrupted session may have had no token left for a turn
                    conversation.append(turn)
                if completion.finish_reason == "tool_calls":
                    state.finish_reason = "stop"
                return
            if state.num_turns >= self._max_turns:
                conversation.append(turn)
                state.finish_reason = "length"
                return
            answers = await session.unless_aborted(self._answers(parsed, turn, session, box))
            if box.is_over is not None and box.is_over():
                conversation += [turn, *answers]
                state.finish_reason = "stop"
                return
            tokens = session.tokenizer.observation(
                [*conversation, turn], answers, box.schemas, after=state.turn_ids[-1:]
            )
            left = session.tokens_left(state)
            fits = len(tokens) < left
            if fits or state.routed_experts is None:  # what was never an input has no experts
                state.append_inserted(tokens[:left], _last_version(state, session))
            conversation += [turn, *answers]
            if not fits:
                state.finish_reason = "length"
                return
        state.finish_reason = "abort"

    def _text(self, state: RolloutState, session: Session, completion: Completion) -> str:
        """What the policy said in its turn so far."""
        if completion.ids_source != "engine" and len(completion.token_ids) == len(state.turn_ids):
            return completion.text  # the server's own words, before tokens were made of them
        return session.tokenizer.decode(state.turn_ids)

    def _parsed(self, text: str, completion: Completion) -> Parsed:
        """The calls of a turn: as the server read them, or else as its text has them."""
        if completion.finish_reason not in ("stop", "tool_calls"):
            return Parsed(text, ())
        if completion.extra.get("tool_calls"):
            calls = from_message(completion.extra["tool_calls"], max_calls=self._max_calls)
            return Parsed(text, calls)
        return parse_calls(text, form=self._call_form, max_calls=self._max_calls)

    async def _answers(
        self, parsed: Parsed, turn: Message, session: Session, box: Toolbox
    ) -> list[Message]:
        """What the tools say, in the order of the calls."""
        observations = [
            observe(
                call,
                box.tools,
                timeout_s=self._tool_timeout_s,
                max_chars=self._max_observation_chars,
            )
            for call in parsed.calls
        ]
        texts = (
            [await observations[0]]
            if len(observations) == 1
            else await asyncio.gather(*observations)
        )
        return [
            {
                "role": "tool",
                "tool_call_id": written["id"],
                "name": written["function"]["name"],
                "content": session.tokenizer.plain(text),
            }
            for written, text in zip(turn["tool_calls"], texts, strict=True)
        ]


def _toolbox(tools: Sequence[Tool]) -> Toolbox:
    named = {tool.name: tool for tool in tools}
    if len(named) < len(tools):
        raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in tools)}")
    return Toolbox(named, [schema_of(tool) for tool in tools])


def _predicate(named: Callable[[str], bool] | str | None) -> Callable[[str], bool] | None:
    found = load(named) if isinstance(named, str) else named
    if found is not None and not callable(found):
        raise ValueError(f"is_answer: {named!r} cannot be called")
    return cast("Callable[[str], bool] | None", found)


def _opened(messages: Sequence[Message], opening: str | None) -> list[Message]:
    """The prompt, with what an environment says first at the end of its last message."""
    conversation = [dict(message) for message in messages]
    if opening is None:
        return conversation
    if not conversation:
        return [{"role": "user", "content": opening}]
    content = conversation[-1].get("content")
    if isinstance(content, list):
        conversation[-1]["content"] = [*content, {"type": "text", "text": opening}]
    else:
        conversation[-1]["content"] = (content or "") + opening
    return conversation


def _turn(text: str, parsed: Parsed, number: int) -> Message:
    """The policy's turn as a message, in the form of OpenAI: arguments are JSON in a string."""
    if not parsed.calls:
        return {"role": "assistant", "content": text}
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(parsed.calls):
        arguments = call.arguments if isinstance(call, ToolCall) else {}
        calls.append(
            {
                "id": call.id or f"t{number:04d}c{i:03d}",  # 9 letters and digits: Mistral's rule
                "type": "function",
                "function": {
                    "name": call.name or "unknown",
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                },
            }
        )
    # All of the text where a call could not be read: nobody could tell otherwise what it was.
    malformed = any(not isinstance(call, ToolCall) for call in parsed.calls)
    return {
        "role": "assistant",
        "content": text if malformed else parsed.content,
        "tool_calls": calls,
    }


def _has_images(state: RolloutState) -> bool:
    return bool(
        state.multi_modal_inputs
        or state.train_prompt_ids is not None
        or (state.position_ids is not None and state.position_ids.ndim > 1)
    )


def _last_version(state: RolloutState, session: Session) -> int:
    steps = state.response_model_steps
    return steps[-1] if steps else session.engine.policy_version
