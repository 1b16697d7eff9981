"""Rows of any origin as a dataset of prompts: which column is what, and which prompts are too long.

Every row is looked at once when the dataset is made: a row that is no prompt is refused then and
not hours later, the over-long ones are known, and so the length and the order are fixed. That
takes time in proportion to the rows; make large datasets in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from agentloop.datasets.data_source import source_name
from agentloop.datasets.messages import messages_of, tools_of
from agentloop.datasets.plain import plain
from agentloop.datasets.prompt import DatasetError, PromptRow, Tokenizer
from agentloop.trajectory.state import Message

PROMPT_COLUMNS: Final = ("prompt", "messages")
MEDIA_COLUMNS: Final = ("images", "videos", "audios")

_log = logging.getLogger(__name__)


class Rows(Protocol):
    """Where raw rows come from."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]:
        """One row, with all its columns."""
        ...

    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]:
        """All rows in order, without these columns."""
        ...

    def where(self, index: int) -> str:
        """Where a person finds the row."""
        ...


class PromptDataset:
    """Prompts of rows, in their order."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        *,
        prompt_column: str | None = None,
        tools_column: str | None = "tools",
        media_columns: Sequence[str] = MEDIA_COLUMNS,
        system_prompt: str | None = None,
        data_source: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """
        Args:
            rows: Where the rows come from.
            tokenizer: What prompts are counted with.
            prompt_column: Text, or a list of messages; None: `prompt` or `messages`, whichever
                the row has.
            tools_column: Schemas of tools, as a list or its JSON text; None: no column is.
            media_columns: Images and the like. They go to `multi_modal_inputs` as they are, and
                their tokens are not counted.
            system_prompt: Goes before conversations that have none.
            data_source: Of rows that name none.
            max_prompt_tokens: Rows with longer prompts are left out.

        Raises:
            DatasetError: a row is no prompt, or none is left.
        """
        self._rows = rows
        self._tokenizer = tokenizer
        self._prompt_columns = PROMPT_COLUMNS if prompt_column is None else (prompt_column,)
        self._tools_column = tools_column
        self._media_columns = tuple(media_columns)
        self._system_prompt = system_prompt
        self._data_source = data_source
        kept: list[int] = []
        for index, row in enumerate(rows.scan(self._media_columns)):
            messages, tools = self._conversation(index, row)
            self._source(index, row)
            if max_prompt_tokens is None or len(self._tokens(index, messages, tools)) <= (
                max_prompt_tokens
            ):
                kept.append(index)
        self._kept = np.asarray(kept, dtype=np.int64)
        self.overlong = len(rows) - len(kept)
        """Rows left out because their prompts have too many tokens."""
        if self.overlong:
            _log.warning(
                "%d of %d rows have more than %s prompt tokens and are left out",
                self.overlong, len(rows), max_prompt_tokens,
            )  # fmt: skip
        if not kept:
            raise DatasetError(
                f"no row is left of {len(rows)}"
                + (f": all have more than {max_prompt_tokens} prompt tokens" if len(rows) else "")
            )

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> PromptRow:
        if not 0 <= position < len(self._kept):
            raise IndexError(f"a dataset of {len(self._kept)} prompts has none at {position}")
        index = int(self._kept[position])
        row = self._rows.row(index)
        messages, tools = self._conversation(index, row)
        media = {name: row[name] for name in self._media_columns if _is_there(row.get(name))}
        taken = {self._prompt_column(index, row), self._tools_column, *self._media_columns}
        try:
            others = {name: plain(value) for name, value in row.items() if name not in taken}
            inputs = plain(media)
        except TypeError as error:
            raise DatasetError(f"{self._rows.where(index)}: {error}") from error
        return PromptRow(
            index=index,
            messages=messages,
            row=others,
            data_source=self._source(index, row),
            prompt_ids=self._tokens(index, messages, tools),
            multi_modal_inputs=inputs or None,
            tools=tools,
        )

    # -- one row -----------------------------------------------------------------------------

    def _conversation(
        self, index: int, row: Mapping[str, Any]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        value = row[self._prompt_column(index, row)]
        tools = row.get(self._tools_column) if self._tools_column else None
        try:
            return messages_of(value, self._system_prompt), tools_of(tools)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{self._rows.where(index)}: {error}") from error

    def _prompt_column(self, index: int, row: Mapping[str, Any]) -> str:
        for name in self._prompt_columns:
            if row.get(name) is not None:
                return name
        raise DatasetError(
            f"{self._rows.where(index)} has no {' or '.join(self._prompt_columns)}; it has "
            f"{', '.join(row) or 'no columns'}"
        )

    def _source(self, index: int, row: Mapping[str, Any]) -> str | None:
        try:
            named = source_name(row.get("data_source"))
        except ValueError as error:
            raise DatasetError(f"{self._rows.where(index)}: {error}") from error
        return self._data_source if named is None else named

    def _tokens(
        self, index: int, messages: list[Message], tools: list[dict[str, Any]]
    ) -> list[int]:
        try:
            return self._tokenizer.prompt(messages, tools)
        except ValueError as error:
            raise DatasetError(f"{self._rows.where(index)}: {error}") from error


def _is_there(media: Any) -> bool:
    return media is not None and (not hasattr(media, "__len__") or len(media) > 0)
