"""How long each known field of a trajectory is to be, by its tags. Pure.

Canonical fields follow dataplane/fields.py; the names of the TransferQueue face have the lengths
that their trainers give them. Where both use one name, either length will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataplane.fields import DERIVED_FIELDS, KNOWN_FIELDS

ADVANTAGES: Final = ("advantages", "returns")

_RESPONSE: Final = frozenset((
    "responses", "response_mask", "loss_mask", "rollout_log_probs", "old_log_probs",
    "ref_log_prob", "rollout_is_weights",
))  # fmt: skip
_EITHER: Final = frozenset(("rm_scores", "values", "entropy", "token_level_rewards", *ADVANTAGES))
"""Names that both use: as long as the row, or as the response."""


def expected_lengths(name: str, tags: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that a field may have, by what they come from; none where that is not known."""
    prompt, response = _number(tags, "prompt_len"), _number(tags, "response_len")
    total = _number(tags, "seq_len")
    if total is None and prompt is not None and response is not None:
        total = prompt + response
    if name == "prompts":
        return _known(prompt_len=prompt)
    if name in _RESPONSE:
        return _known(response_len=response)
    if name in _EITHER:
        return _known(seq_len=total, response_len=response) if total is not None else {}
    if name == "position_ids":
        return _known(seq_len=total)
    if name == "routed_experts":  # the last token was never an input; others fill a row for it
        return {} if total is None else {"seq_len less 1": max(total - 1, 0), "seq_len": total}
    field = KNOWN_FIELDS.get(name) or DERIVED_FIELDS.get(name)
    if field is None or field.align is None or total is None:
        return {}
    if field.align == "full":
        return _known(seq_len=total)
    if field.align == "shifted":
        return {"seq_len less 1": max(total - 1, 0)}
    return _known(response_len=response) if field.align == "response" else {}


def _number(tags: Mapping[str, Any], name: str) -> int | None:
    value = tags.get(name)
    return value if type(value) is int else None


def _known(**lengths: int | None) -> dict[str, int]:
    return {name: length for name, length in lengths.items() if length is not None}
