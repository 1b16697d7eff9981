"""Which stage of training a request belongs to, where its client did not say. Pure.

A put is told by the fields that it brings: `dataplane/fields.py` says who writes which, and the
names of the TransferQueue face are added here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from dataplane.fields import KNOWN_FIELDS

SUBMIT, ROLLOUT, REWARD, BALANCE = "submit", "rollout", "reward", "balance"
OLD_LOG_PROB, REF_LOG_PROB, VALUES, ADVANTAGE = (
    "old_log_prob", "ref_log_prob", "values", "advantage",
)  # fmt: skip
CLEAR, SAMPLE = "clear", "sample"

READING: Final = frozenset({"update_actor", "update_critic", "metrics", "dump"})
"""Stages that write no field: what a client puts during one belongs to another, which its fields
name. A trainer's rank writes log-probs back while it trains already."""

_OF_WRITER: Final = {
    "agent loop": ROLLOUT,
    "reward": REWARD,
    "teacher": "teacher",
    "actor": OLD_LOG_PROB,
    "reference": REF_LOG_PROB,
    "critic": VALUES,
    "advantage": ADVANTAGE,
}
_OF_FIELD: Final[Mapping[str, str]] = {
    **{name: _OF_WRITER[field.written_by[0]] for name, field in KNOWN_FIELDS.items()},
    **dict.fromkeys(
        (
            "prompts", "responses", "response_mask", "loss_mask", "attention_mask",
            "rollout_log_probs", "raw_prompt", "num_turns", "metrics", "extra_fields",
        ),
        ROLLOUT,
    ),
    **dict.fromkeys(("log_probs", "old_log_probs"), OLD_LOG_PROB),
    "ref_log_prob": REF_LOG_PROB,
    "rollout_is_weights": ADVANTAGE,
}  # fmt: skip


def stage_of_field(
    said: str, name: str, together: Collection[str], *, padding: bool = False
) -> str:
    """The stage at which a field was written, with others in the same put."""
    if said and said not in READING:
        return said
    if any(_OF_FIELD.get(other) == ROLLOUT for other in together):
        # A trajectory comes whole, its score included; a filler is made when ranks are balanced.
        return BALANCE if padding else ROLLOUT
    return _OF_FIELD.get(name, said)


def stage_of_tags(said: str, tags: Mapping[str, Any], merged: Mapping[str, Any]) -> str:
    """The stage at which tags alone were written, by what they say and what the row is."""
    if said and said not in READING:
        return said
    if merged.get("is_padding") is True:
        return BALANCE
    if merged.get("is_prompt") is True:
        return SUBMIT if tags.get("status") == "pending" else ROLLOUT
    if "session_id" in tags or "group_generate_time_s" in tags:
        return ROLLOUT
    if "advantage" in tags:
        return ADVANTAGE
    return REWARD if "score" in tags else said


_OF_OP: Final = {"begin": ROLLOUT, "end": ROLLOUT, "claim": SAMPLE, "commit": CLEAR,
                 "clear": CLEAR, "drop": CLEAR}  # fmt: skip


def stage_of_op(said: str, op: str) -> str:
    """The stage of a request that brings neither fields nor tags."""
    return said or _OF_OP.get(op, "")
