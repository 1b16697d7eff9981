"""The turns of a run as a tree of tokens, and the branches that become trajectories. Pure.

A turn goes on from the turn whose prompt and completion its own prompt begins with. The first turn
that goes on from another continues its branch; every further one, and every turn that goes on from
none, begins a branch of its own. Turns are ordered by their numbers, as their requests came, so the
order in which they were answered makes no difference.

    turn 0   [p p p] a a                       branch 0: turns 0, 1
    turn 1   [p p p a a t t] b b               branch 1: turns 0, 2, of which 0 is shared
    turn 2   [p p p a a u] c                   it departs from turn 1 at index 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentloop.capture.turn import Ids, Turn
from agentloop.trajectory.state import Message


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt goes on."""

    parent: int | None
    begin: int
    """How many of its tokens are the parent's."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns that are one sequence, from its first to its last."""

    path: tuple[Turn, ...]
    shared: int
    """So many of the first turns belong to an earlier branch."""
    differs_at: int | None
    """The first index at which its prompt departs from the tokens of an earlier turn; None if
    there is none."""
    differs_from: int | None
    """That turn: the one with which it shares most."""

    @property
    def start(self) -> Turn:
        """The turn that begins it."""
        return self.path[self.shared]


class Tree:
    """The turns of one run."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        self._children: dict[int | None, list[int]] = {None: []}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        """In the order of their numbers."""
        return iter([self._turns[number] for number in sorted(self._turns)])

    def place(self, prompt: Ids, number: int) -> Place:
        """The turn that the prompt of turn `number` goes on from: of those asked before it, the
        one with the longest sequence that the prompt begins with, and of equals the first."""
        best = Place(None, 0)
        reached: list[tuple[int | None, int]] = [(None, 0)]
        while reached:
            parent, offset = reached.pop()
            for child in self._children[parent]:
                tokens = self._turns[child].tokens
                end = offset + len(tokens)
                goes_on = child < number and end <= len(prompt)
                if not goes_on or not np.array_equal(prompt[offset:end], tokens):
                    continue
                reached.append((child, end))
                if (-end, child) < (-best.begin, _order(best.parent)):
                    best = Place(child, end)
        return best

    def add(self, turn: Turn) -> None:
        """Have one more turn. ValueError if its number is taken or its parent is not here."""
        if turn.number in self._turns:
            raise ValueError(f"there is a turn {turn.number} already")
        if turn.parent is not None and turn.parent not in self._turns:
            raise ValueError(f"turn {turn.number} goes on from {turn.parent}, which is not there")
        self._turns[turn.number] = turn
        self._children[turn.parent].append(turn.number)
        self._children[turn.number] = []

    def remove(self, number: int) -> bool:
        """Have this turn no more; not if it is not there, or another goes on from it."""
        turn = self._turns.get(number)
        if turn is None or self._children[number]:
            return False
        del self._turns[number], self._children[number]
        self._children[turn.parent].remove(number)
        return True

    def path(self, number: int | None) -> list[Turn]:
        """The turns up to this one, the first one first."""
        turns: list[Turn] = []
        while number is not None:
            turns.append(self._turns[number])
            number = turns[-1].parent
        return turns[::-1]

    def sequence(self, number: int | None) -> Ids:
        """All tokens up to the end of a turn."""
        parts = [turn.tokens for turn in self.path(number)]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def dialogue(self, number: int | None) -> list[Message]:
        """The messages of a turn's prompt, and its answer."""
        messages: list[Message] = []
        for turn in self.path(number):
            messages = [*messages[: turn.kept], *turn.messages]
        return messages

    def branches(self) -> list[Branch]:
        """All branches, in the order of the turns that begin them."""
        continued = {
            parent: min(children)
            for parent, children in self._children.items()
            if parent is not None and children
        }
        going_on = set(continued.values())
        found: list[Branch] = []
        for turn in self:
            if turn.number in going_on:
                continue
            before = self.path(turn.parent)
            path = [*before, turn]
            while (following := continued.get(path[-1].number)) is not None:
                path.append(self._turns[following])
            at, departed = self._departure(turn)
            found.append(Branch(tuple(path), len(before), at, departed))
        return found

    def _departure(self, turn: Turn) -> tuple[int | None, int | None]:
        """Where a turn's prompt departs from the earlier turn that it shares most with."""
        prompt = np.concatenate([self.sequence(turn.parent), turn.between])
        best: tuple[int, bool, int] | None = None  # (-tokens shared, whether it is whole, number)
        reached: list[tuple[int | None, int]] = [(None, 0)]
        while reached:
            parent, offset = reached.pop()
            for number in self._children[parent]:
                if number >= turn.number:
                    continue
                tokens = self._turns[number].tokens
                shared = common_prefix(prompt[offset:], tokens)
                found = (-offset - shared, shared == len(tokens), number)
                best = found if best is None else min(best, found)
                if shared == len(tokens):
                    reached.append((number, offset + shared))
        return (None, None) if best is None else (-best[0], best[2])


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many of the first entries are the same. Example: of [1, 2, 3] and [1, 2, 4] two."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size


def shared_messages(before: Sequence[Message], now: Sequence[Message]) -> int:
    """How many of the first messages are the same."""
    count = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        count += 1
    return count


def _order(number: int | None) -> int:
    return -1 if number is None else number
