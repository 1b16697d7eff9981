"""The error of the trainer: a plan that nobody can make."""

from __future__ import annotations


class PlanError(ValueError):
    """A constraint that cannot be met; the message names it, and nothing was dispatched."""
