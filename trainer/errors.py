"""The errors of the trainer: a plan that nobody can make, a batch that cannot come."""

from __future__ import annotations


class PlanError(ValueError):
    """A constraint that cannot be met; the message names it, and nothing was dispatched."""


class UnusableBatch(RuntimeError):
    """What was sampled cannot be trained; it was given back. The message says why."""


class RolloutsNotOpened(RuntimeError):
    """The producers of a run could not be started; the message says what they said."""


class Starved(RuntimeError):
    """A batch is not full, and nothing is under way that could fill it: waiting would be in vain.

    Nothing is claimed. The message says what is there.
    """
