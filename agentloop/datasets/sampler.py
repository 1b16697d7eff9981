"""In which order prompts are drawn, and what each draw is called. Resumes from a few numbers."""

from __future__ import annotations

import hashlib
import uuid
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from agentloop.datasets.prompt import Dataset, PromptRow

_STATE: Final = 1
"""Version of `state()`."""


class Sampler:
    """Draws the prompts of a dataset, epoch after epoch, without end.

    Draw c has group id c and the rollout ids c*K … c*K + K-1. Its `uid` comes from the run's id,
    the sampler's name and c: no two draws of a run share one, in whatever epoch, and a run that is
    resumed names the draws that it repeats as before.

    Example: for K = 2 the third draw has group_id 2 and rollout_ids (4, 5).
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int = 0,
        shuffle: bool = True,
        repeat: int = 1,
        run_id: str | None = None,
        name: str = "",
    ) -> None:
        """
        Args:
            dataset: What is drawn from.
            seed: Of the order; each epoch has its own.
            shuffle: False: the dataset's order, in every epoch.
            repeat: Sessions for each prompt, K.
            run_id: Names the run; None: a random one. `restore` takes the saved run's.
            name: Tells samplers of one run apart, such as the task's name.
        """
        if len(dataset) < 1 or repeat < 1:
            raise ValueError(f"{len(dataset)} prompts, {repeat} times each: at least 1 of both")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._repeat = repeat
        self._name = name
        self.run_id = uuid.uuid4().hex if run_id is None else run_id
        self.drawn = 0
        """Prompts drawn so far."""
        self._again: deque[int] = deque()
        """Draws before that which come once more, first of all."""
        self._first = _print(dataset[0])
        self._order: npt.NDArray[np.int64] | None = None
        self._order_epoch = -1

    def next(self) -> PromptRow:
        """The next prompt, with its ids."""
        draw = self._again[0] if self._again else self.drawn
        epoch, position = divmod(draw, len(self._dataset))
        prompt = self._dataset[self._at(epoch, position)]
        # Only now: a row that cannot be read is met again, and none is skipped in silence.
        if self._again:
            self._again.popleft()
        else:
            self.drawn += 1
        first = draw * self._repeat
        return replace(
            prompt,
            uid=self.uid(draw),
            group_id=draw,
            epoch=epoch,
            rollout_ids=tuple(range(first, first + self._repeat)),
        )

    def uid(self, draw: int) -> str:
        """The uid of a draw: 32 hexadecimal digits."""
        told = f"{len(self.run_id)}:{self.run_id}{len(self._name)}:{self._name}{draw}"
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    # -- resuming ----------------------------------------------------------------------------

    def state(self, unfinished: Collection[int] = ()) -> dict[str, Any]:
        """Plain data that `restore` continues from.

        `unfinished`: draws (their group ids) that nothing has come of yet: they come again, in
        their order, before new ones.
        """
        state = {"version": _STATE, "drawn": self.drawn, "run_id": self.run_id, **self._fixed()}
        again = sorted({*unfinished, *self._again})
        return state | {"again": again} if again else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, as the same run.

        Raises:
            ValueError: it is of another dataset or order; nothing is changed.
        """
        if state.get("version") != _STATE:
            raise ValueError(
                f"a sampler's state of version {state.get('version')!r}; this reads {_STATE}"
            )
        for name, here in self._fixed().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the saved sampler had {name} {state.get(name)!r}, this one has {here!r}: "
                    f"its order cannot be continued"
                )
        drawn, run_id = state.get("drawn"), state.get("run_id")
        if not isinstance(drawn, int) or drawn < 0 or not isinstance(run_id, str):
            raise ValueError(f"a sampler's state with drawn {drawn!r} and run_id {run_id!r}")
        again = cast("object", state.get("again", []))
        if not _are_draws(again, drawn):
            raise ValueError(f"a sampler's state with drawn {drawn} and again {again!r:.80}")
        self.drawn = drawn
        self.run_id = run_id
        self._again = deque(cast("list[int]", again))

    def _fixed(self) -> dict[str, Any]:
        """What must not change while an order is continued."""
        return {
            "name": self._name,
            "prompts": len(self._dataset),
            "first": self._first,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _at(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._order is None or self._order_epoch != epoch:
            # RandomState, and not a Generator: numpy promises that its streams never change.
            entropy = hashlib.blake2b(f"{self._seed}:{epoch}".encode(), digest_size=32).digest()
            random = np.random.RandomState(np.frombuffer(entropy, dtype="<u4").astype(np.uint32))
            self._order = random.permutation(len(self._dataset)).astype(np.int64)
            self._order_epoch = epoch
        return int(self._order[position])


def _are_draws(value: object, drawn: int) -> bool:
    """Whether it is a list of draws that were made."""
    return isinstance(value, list) and all(
        isinstance(draw, int) and 0 <= draw < drawn for draw in cast("list[object]", value)
    )


def _print(prompt: PromptRow) -> str:
    """A fingerprint of a prompt: another dataset of the same length would be drawn silently."""
    return hashlib.blake2b(repr(prompt.messages).encode(), digest_size=8).hexdigest()
