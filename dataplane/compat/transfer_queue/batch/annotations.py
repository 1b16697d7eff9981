"""What is said about a `BatchMeta` beside its fields: entries about the whole batch, and a tag for
each row."""

from __future__ import annotations

import copy
from typing import Any

from .columns import as_many


class Annotated:
    """`extra_info`, one dictionary, and `custom_meta`, one per row, and how they are changed."""

    __slots__ = ()

    extra_info: dict[str, Any]
    custom_meta: list[dict[str, Any]]  # [N], the rows' tags

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """The entry of this name, or the default."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set one entry."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of all entries."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Set several entries."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Take one entry out: its value, or None if there is none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Take all entries out."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether there is an entry of this name."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of the rows' tags."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]] | None) -> None:
        """Merge one dictionary into each row's tag. Raises ValueError unless there are as many."""
        if custom_meta is None:
            return
        as_many("custom_meta", custom_meta, len(self.custom_meta))
        for tag, more in zip(self.custom_meta, custom_meta, strict=True):
            tag.update(more)

    def clear_custom_meta(self) -> None:
        """Take everything out of the rows' tags."""
        self.custom_meta = [{} for _ in self.custom_meta]
