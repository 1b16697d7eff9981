"""What a sampler remembers, as JSON: no class is named in it that a reader would have to make.

Owns how Python's containers are written. Lists, and dicts whose keys are str, are themselves;
others are an object with one name that begins with `$`.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final, cast

from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    from ..sampler import BaseSampler

log = logging.getLogger("dataplane.compat")

TUPLE: Final = "$tuple"
SET: Final = "$set"
MAP: Final = "$map"
FLOAT: Final = "$float"


def saved(sampler: BaseSampler) -> str:
    """What the sampler's `save_checkpoint` returns, as JSON.

    Raises InvalidRequest if it is more than numbers, strings, None, lists, tuples, sets and dicts.
    """
    name = type(sampler).__name__
    state: Any = sampler.save_checkpoint()
    return json.dumps({"sampler": name, "state": _plain(state, f"what {name} remembers")})


def checked(text: str) -> str:
    """The same text. InvalidRequest if it is not what `saved` returns."""
    _parsed(text)
    return text


def restore(sampler: BaseSampler, text: str) -> None:
    """Have a sampler remember what was saved; that of another class is left as it is."""
    name, state = _parsed(text)
    if name != type(sampler).__name__:
        log.warning(
            "the checkpoint was saved with the sampler %s and this instance has %s, which begins "
            "anew: rows that were consumed stay so",
            name, type(sampler).__name__,
        )  # fmt: skip
        return
    sampler.load_checkpoint(state)


def _parsed(text: str) -> tuple[str, Any]:
    try:
        found = json.loads(text)
        return str(found["sampler"]), _python(found["state"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the saved state of the sampler is damaged: {error!r:.200}") from None


def _plain(value: Any, where: str) -> Any:
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        # JSON has no infinities; hexadecimal is exact.
        return value if value - value == 0.0 else {FLOAT: value.hex()}
    if kind is list:
        return [_plain(item, where) for item in value]
    if kind is tuple:
        return {TUPLE: [_plain(item, where) for item in value]}
    if kind in (set, frozenset):
        return {SET: [_plain(item, where) for item in value]}
    if kind is dict:
        items = cast("dict[Any, Any]", value)
        if all(type(key) is str and not key.startswith("$") for key in items):
            return {key: _plain(item, f"{where} under {key!r:.40}") for key, item in items.items()}
        return {MAP: [[_plain(key, where), _plain(item, where)] for key, item in items.items()]}
    raise InvalidRequest(
        f"{where} has a {kind.__module__}.{kind.__qualname__}, which no checkpoint takes: have its "
        "save_checkpoint() return numbers, strings, None, lists, tuples, sets and dicts"
    )


def _python(value: Any) -> Any:
    if type(value) is list:
        return [_python(item) for item in cast("list[Any]", value)]
    if type(value) is not dict:
        return value
    items = cast("dict[str, Any]", value)
    name = next(iter(items), "")
    if len(items) != 1 or not name.startswith("$"):
        return {key: _python(item) for key, item in items.items()}
    content = items[name]
    if name == FLOAT:
        return float.fromhex(content)
    if name == TUPLE:
        return tuple(_python(content))
    if name == SET:
        return set(_python(content))
    if name == MAP:
        return {_python(key): _python(item) for key, item in content}
    raise ValueError(f"unknown container {name!r}")
