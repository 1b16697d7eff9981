"""The lines of a dump: statistics first, then one line a trajectory. No I/O.

Owns their form, which is XTuner's, and that every line is strict JSON: what is no finite number is
null, and a tensor is a list.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from trainer.dump.reading import DumpRow
from trainer.dump.request import Kind

TRUTH_COLUMNS: Final = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
"""Where a dataset's row says what is right; the first that it has."""

AGENT: Final = (
    "name", "selected", "status", "judgers", "finish_info", "tool_turns", "artifacts", "messages",
    "tools",
)  # fmt: skip
"""Entries of `agent`; a producer's `extra` has them as `agent_…`."""


class Tokenizer(Protocol):
    """What texts are made and counted with, where a row has only tokens or only text."""

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def encode(self, text: str) -> list[int]: ...


def dump_lines(
    rows: Sequence[DumpRow], kind: Kind, tokenizer: Callable[[], Tokenizer | None]
) -> list[dict[str, Any]]:
    """What the file of these trajectories holds, line by line.

    A training row without a reward has `null` and is in no statistic of rewards; in an evaluation
    it has 0. Deviations of training are those of a sample, of an evaluation those of a
    population; of one value 0.

    Args:
        tokenizer: asked only if a row needs it; None if there is none.
    """
    made = [_line(row, kind, tokenizer) for row in rows]
    rewards = [line["reward"] for line in made if line["reward"] is not None]
    lengths = [line["response_len"] for line in made]
    summary = _spread("reward", rewards, kind) | _spread("response_len", lengths, kind)
    return [{**summary, "total_len": len(made)}, *made]


def to_json(line: Mapping[str, Any]) -> bytes:
    """A line as UTF-8, compact and with an end of line."""
    text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate has no UTF-8, but an escape, which is JSON's too.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """The value in JSON's types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {str(name): plain(part) for name, part in mapping.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in cast("Iterable[Any]", value)]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    listed = getattr(value, "tolist", None)  # tensors and numpy's arrays and numbers
    return plain(listed()) if callable(listed) else str(value)


def _line(row: DumpRow, kind: Kind, tokenizer: Callable[[], Tokenizer | None]) -> dict[str, Any]:
    tags = row.tags
    reward = tags.get("score")
    if reward is None and kind == "eval":
        reward = 0.0
    response = _response(row, tokenizer)
    extra: Mapping[str, Any] = row.fields.get("extra") or {}
    return {
        "rollout_id": row.key,
        "group_id": tags.get("uid"),
        "task_name": tags.get("task_name"),
        "data_source": tags.get("data_source"),
        "status": tags.get("status"),
        "finish_reason": tags.get("finish_reason"),
        "error_msg": tags.get("error_msg"),
        "prompt": _prompt(row),
        "label": _truth(row),
        "response": response,
        "reward": reward,
        "prompt_len": tags.get("prompt_len", 0),
        "response_len": _response_len(tags, response, tokenizer),
        "supervised_len": tags.get("policy_len", 0),
        "reward_payload": row.fields.get("reward"),
        "agent": {
            **{name: extra.get(f"agent_{name}") for name in AGENT},
            "tool_turns": extra.get("agent_tool_turns", tags.get("num_turns")),
            "messages": extra.get("agent_messages", row.fields.get("messages")),
        },
    }


def _response(row: DumpRow, tokenizer: Callable[[], Tokenizer | None]) -> str | None:
    if row.answer is not None or "input_ids" not in row.fields:
        return row.answer
    decoder = tokenizer()
    if decoder is None:
        return None
    return decoder.decode(row.fields["input_ids"].tolist()[row.tags.get("prompt_len", 0) :])


def _response_len(
    tags: Mapping[str, Any], response: str | None, tokenizer: Callable[[], Tokenizer | None]
) -> int:
    for name in ("response_len", "policy_len"):
        if tags.get(name) is not None:
            return tags[name]
    counter = tokenizer() if response else None
    return 0 if counter is None or response is None else len(counter.encode(response))


def _prompt(row: DumpRow) -> Any:
    """The prompt's messages: its own row's, else the conversation up to the first answer."""
    if "messages" in row.prompt:
        return row.prompt["messages"]
    messages = cast("list[Mapping[str, Any]]", row.fields.get("messages") or [])
    first = next(
        (i for i, message in enumerate(messages) if message.get("role") == "assistant"),
        len(messages),
    )
    return messages[:first] or None


def _truth(row: DumpRow) -> Any:
    """What the dataset says is right; None if the prompt's row was not kept, or has nothing."""
    extra: Mapping[str, Any] = row.prompt.get("extra") or {}
    source = extra.get("row")
    for path in TRUTH_COLUMNS:
        found: Any = source
        for name in path.split("."):
            here: Any = cast("Any", found) if isinstance(found, Mapping) else {}
            found = here.get(name)
        if found is not None:
            return found
    return None


def _spread(name: str, values: Sequence[float], kind: Kind) -> dict[str, float]:
    values = values or [0.0]
    deviation = statistics.stdev if kind == "train" else statistics.pstdev
    return {
        f"{name}_mean": sum(values) / len(values),
        f"{name}_std": deviation(values) if len(values) > 1 else 0.0,
        f"{name}_max": max(values),
        f"{name}_min": min(values),
    }
