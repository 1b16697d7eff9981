"""The loop of one question and one answer."""

from __future__ import annotations

from agentloop.loops.loop import AgentLoop, Session
from agentloop.trajectory.state import RolloutState


class SingleTurnLoop(AgentLoop):
    """Asks once. A response that was interrupted is gone on with where it stopped."""

    async def run(self, state: RolloutState, session: Session) -> RolloutState:
        if session.abort_requested.is_set():
            state.finish_reason = "abort"
            return state
        completion = await session.generate(state)
        state.response = session.tokenizer.decode(state.response_ids or ())
        whole = len(completion.token_ids) == len(state.response_ids or ())
        if whole and completion.ids_source != "engine":
            state.response = completion.text  # what the server said, before tokens were made of it
        return state
