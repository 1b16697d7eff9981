"""From keys to what is written of their rows: the plane's part of a dump, and all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dataplane import Client, KeyNotFound
from trainer.dump.request import DumpRequest

TEXTS: Final = ("messages", "reward", "extra")
"""Fields that are read of every row that has them. Tokens are read only where they alone say what
the response was."""


@dataclass(slots=True)
class DumpRow:
    """A trajectory with what is known of it and of its prompt."""

    key: str
    tags: Mapping[str, Any]
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the prompt's row; none if prompts are not persisted."""

    @property
    def answer(self) -> str | None:
        """The text of the last answer, if the conversation ends with one."""
        messages: list[Any] = self.fields.get("messages") or []
        last: Mapping[str, Any] = messages[-1] if messages else {}
        text = last.get("content") if last.get("role") == "assistant" else None
        return text if isinstance(text, str) else None


def read_rows(client: Client, request: DumpRequest) -> list[DumpRow]:
    """The trajectories of a request, with their values.

    Raises:
        KeyNotFound: rows are gone, so no whole dump can be made; names all of them.
        DataplaneError: the plane could not be read.
    """
    if not request.prompts:
        return []
    uids = [prompt.uid for prompt in request.prompts]
    listing = client.kv_list(request.partition_id, where={"uid": {"in": uids}})
    tags = dict(zip(listing.keys, listing.tags, strict=True))
    has = dict(zip(listing.keys, listing.fields, strict=True))
    keys = [key for prompt in request.prompts for key in prompt.keys]
    gone = [key for key in keys if key not in tags]
    if gone:
        raise KeyNotFound(
            f"{len(gone)} trajectories are gone before they were dumped: {', '.join(gone[:5])}",
            partition_id=request.partition_id,
            keys=gone,
        )
    prompts = [key for p in request.prompts if (key := p.prompt_key) is not None and key in has]
    values = _values(
        client,
        request.partition_id,
        {key: [name for name in has[key] if name in TEXTS] for key in [*keys, *prompts]},
    )
    rows = [
        DumpRow(key, tags[key], values.get(key, {}), values.get(prompt.prompt_key or "", {}))
        for prompt in request.prompts
        for key in prompt.keys
    ]
    silent = {r.key: ["input_ids"] for r in rows if r.answer is None and "input_ids" in has[r.key]}
    tokens = _values(client, request.partition_id, silent)
    for row in rows:
        row.fields.update(tokens.get(row.key, {}))
    return rows


def _values(
    client: Client, partition_id: str, wanted: Mapping[str, Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """Fields of rows by key: one get for all rows that have the same ones."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, names in wanted.items():
        alike.setdefault(tuple(sorted(names)), []).append(key)
    values: dict[str, dict[str, Any]] = {}
    for names, keys in alike.items():
        if names:
            rows = client.kv_batch_get(keys, partition_id, names, layout="list")
            for i, key in enumerate(rows.keys):
                values[key] = {name: rows.fields[name][i] for name in names}
    return values
