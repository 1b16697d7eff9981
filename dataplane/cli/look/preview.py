"""The values of one key for a person: the first few of each field, and tokens as text.

Loads torch, and transformers where a tokenizer is given; nothing is fetched from anywhere, and no
code of a tokenizer's folder is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from dataplane.cli.output import plain_of
from dataplane.cli.shown import count_text, value_text
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from dataplane.client.sync import Client

TOKENS: Final = ("input_ids", "labels", "prompts", "responses")
"""Fields that hold tokens."""
NOT_SUPERVISED: Final = -100
MAX_TEXT: Final = 200
"""Letters of a value that is no tensor."""


@dataclass(slots=True)
class Preview:
    """What was read of a key."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """The first values of each field."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """How many values a field has, if it is a tensor."""
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Fields of tokens as text."""

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"values": self.values, "counts": self.counts, "texts": self.texts}

    def lines(self) -> dict[str, tuple[str, str]]:
        """Each field's values on one line, and what is to be said beside its name."""
        out: dict[str, tuple[str, str]] = {}
        for name, value in self.values.items():
            count = self.counts.get(name)
            if count is None:
                out[name] = (value_text(value), "")
                continue
            listed = cast("list[Any]", value if isinstance(value, list) else [value])
            text = " ".join(value_text(each) for each in listed)
            cut = " …" if count > len(listed) else ""
            out[name] = (text + cut, f"{count_text(count)} values")
        return out


def preview_of(client: Client, partition_id: str, key: str, count: int, tokenizer: Any) -> Preview:
    """The first `count` values of each field of a key; its tokens as text if there is a tokenizer.

    A tokenizer alone reads the fields of tokens only.
    """
    import torch

    names = None if count else _tokens_of(client, partition_id, key)
    found = Preview()
    rows = client.kv_batch_get([key], partition_id, names, layout="list")
    for name in sorted(rows.fields):
        value = rows.fields[name][0]
        is_tensor = isinstance(value, torch.Tensor)
        if count:
            found.values[name] = _first(value, count) if is_tensor else _short(value)
            if is_tensor:
                found.counts[name] = value.numel()
        if is_tensor and tokenizer is not None and name in TOKENS and value.dim() == 1:
            found.texts[name] = _spoken(cast("Any", value).tolist(), tokenizer)
    return found


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a folder on this machine. InvalidRequest if there is none."""
    if not folder.is_dir():
        raise InvalidRequest(f"--tokenizer {folder}: there is no such folder")
    from transformers import AutoTokenizer

    try:
        return cast("Any", AutoTokenizer).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidRequest(f"--tokenizer {folder} holds no tokenizer: {reason:.200}") from None


def _tokens_of(client: Client, partition_id: str, key: str) -> list[str]:
    report = client.inspect([key], partition_id)[0]
    there = [] if report is None else [each.name for each in report.fields]
    return [name for name in TOKENS if name in there]


def _first(value: Any, count: int) -> Any:
    return plain_of(
        value.reshape(-1)[:count].float() if _is_odd(value) else value.reshape(-1)[:count]
    )


def _is_odd(value: Any) -> bool:
    """Whether a dtype has no numbers of Python's: bfloat16 and the 8-bit floats."""
    return value.is_floating_point() and value.element_size() < 4


def _short(value: Any) -> Any:
    """A value that is no tensor, cut where it is long."""
    plain = plain_of(value)
    text = plain if isinstance(plain, str) else value_text(plain)
    return plain if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} letters)"


def _spoken(ids: list[int], tokenizer: Any) -> str:
    """Tokens as text; those that are not supervised are left out of labels."""
    return tokenizer.decode([each for each in ids if each != NOT_SUPERVISED and each >= 0])
