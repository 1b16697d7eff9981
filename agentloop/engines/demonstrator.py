"""An engine that says what it knows: episodes to learn from, without a model.

Owns the seam to demonstrators. They are asked like a model, turn by turn, by the same loops, so
that their episodes are trajectories like any other.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentloop.engines.types import Completion, EngineError, Request, as_versions

if TYPE_CHECKING:
    import torch

    from agentloop.loops.chat import ChatTokenizer


class Demonstrator(ABC):
    """Subclasses write `answer`. What they say has no log-probs: nothing was drawn."""

    def __init__(self, tokenizer: ChatTokenizer, *, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._paused = False
        self.policy_version = 0
        """Of the tokens that it says: the one of the rollouts that they stand in for."""

    @abstractmethod
    def answer(self, request: Request) -> str:
        """The text of one turn. `request.messages` is the conversation so far.

        Raises:
            EngineError: it does not know; the session fails.
        """

    def chance(self, request: Request, what: str = "") -> float:
        """A number of [0, 1) for the session of a request, the same in all of its turns.

        It follows from the seed, the prompt's uid and the session: a run that is resumed has the
        same ones.
        """
        session = request.request_id.rpartition(":")[0] or request.request_id
        told = f"{self._seed}:{what}:{session}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") / 2**64

    # -- Engine ------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. A turn is whole: EngineError if it has too many tokens."""
        if self._paused:
            return Completion([], None, [], "", "abort")
        try:
            text = self.answer(request)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{type(self).__name__}: {type(error).__name__}: {error}") from error
        said = [*self._tokenizer.encode(text), *self._tokenizer.eos_ids[:1]]
        if len(said) > request.sampling.max_tokens:
            # Whoever learned from one that is cut would learn to stop half-way.
            raise EngineError(
                f"a demonstrated turn of {len(said)} tokens, and {request.sampling.max_tokens} are "
                f"left to it: raise the task's sampling.max_tokens"
            )
        return Completion(said, None, as_versions(self.policy_version, len(said)), text, "stop")

    async def abort(self, request_id: str) -> None:  # noqa: B027 (nothing to do by default)
        """See `Engine.abort`: answers are there at once."""

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._paused = True

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._paused = False

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """It has no weights; its tokens have this version from here on."""
        self.policy_version = version

    async def close(self) -> None:  # noqa: B027 (nothing to do by default)
        """See `Engine.close`."""
