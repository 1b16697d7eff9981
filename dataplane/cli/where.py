"""`--where` on the command line: which rows a command is about, as `dataplane.tags.where` has it.

    --where '{"status": "finished", "global_steps": {">=": 5}}'      a JSON object, or
    --where 'status=finished, global_steps>=5'                       terms, all of which hold

    term     = tag operator value | tag in [value, ...] | tag (it is there) | !tag (it is not)
    operator = = != < <= > >=
    value    = a JSON number, true, false, null, "text", or text up to the next comma

Given several times, all hold. Text is never evaluated. What looks like a number is one: quote it,
`session="7"`, where the tag holds text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast

import typer

from dataplane.errors import InvalidRequest

WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        help="Which rows: status=finished,global_steps>=5 or a JSON object; repeated, all hold.",
        metavar="TERMS",
    ),
]
"""The option of every command that is about some rows: `where: WhereOption = None`."""

_TAG: Final = re.compile(r'\s*(!?)\s*("(?:[^"\\]|\\.)*"|[^\s,=<>!"\[\]{}()]+)\s*')
_OPERATOR: Final = re.compile(r"(!=|<=|>=|==|=|<|>|in(?=[\s\[]))\s*")
_NEXT: Final = re.compile(r"\s*(,|$)")
_BARE: Final = re.compile(r"[^,]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


def parse_where(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """The predicate that `--where` gives; None where it was not given.

    InvalidRequest names the text that is none, and where it stops making sense.
    """
    if not texts:
        return None
    parts: list[dict[str, Any]] = []
    for text in texts:
        parts += [_object(text)] if text.lstrip().startswith("{") else _terms(text)
    names = [name for part in parts for name in part]
    if len(set(names)) == len(names):
        return {name: entry for part in parts for name, entry in part.items()}
    return {"and": parts}


def _object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--where {text!r:.80} is no JSON object: {error}") from None
    return cast("dict[str, Any]", parsed)  # it begins with a brace


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is given twice in one object, and only one could hold")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _terms(text: str) -> list[dict[str, Any]]:
    terms: list[dict[str, Any]] = []
    at = 0
    while True:
        term, at = _term(text, at)
        terms.append(term)
        end = _NEXT.match(text, at)
        if end is None:
            raise _fault(text, at, "a comma, or the end")
        if not end[1]:
            return terms
        at = end.end()


def _term(text: str, at: int) -> tuple[dict[str, Any], int]:
    named = _TAG.match(text, at)
    if named is None:
        raise _fault(text, at, "the name of a tag")
    tag = _quoted(text, named.start(2))[0] if named[2].startswith('"') else named[2]
    if tag in ("and", "or", "not"):
        raise _fault(text, named.start(2), f"a tag ({tag!r} goes into a JSON object only)")
    at = named.end()
    found = _OPERATOR.match(text, at)
    if named[1] or found is None:
        return {tag: {"exists": not named[1]}}, at
    name = "=" if found[1] == "==" else found[1]
    value, at = _value(text, found.end(), listed=name == "in")
    return {tag: value if name == "=" else {name: value}}, at


def _value(text: str, at: int, *, listed: bool) -> tuple[Any, int]:
    if text[at : at + 1] in ('"', "["):
        value, end = _quoted(text, at)
        if listed is not isinstance(value, list):
            raise _fault(text, at, "a list in brackets" if listed else "one value, no list")
        return value, end
    if listed:
        raise _fault(text, at, "a list in brackets")
    bare = cast("re.Match[str]", _BARE.match(text, at))
    word = bare[0].strip()
    if not word:
        raise _fault(text, at, "a value")
    return _typed(text, at, word), bare.end()


def _typed(text: str, at: int, word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    number = _NUMBER.fullmatch(word)
    if number is None:
        return word
    value = json.loads(word)
    if value in (float("inf"), float("-inf")):
        raise _fault(text, at, "a number that fits in 64 bits")
    return value


def _quoted(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        raise _fault(text, at, "a string or list of JSON") from None


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)


def _fault(text: str, at: int, expected: str) -> InvalidRequest:
    rest = text[at:].strip()
    where = f"before {rest!r:.40}" if rest else "at its end"
    return InvalidRequest(f"--where {text!r:.80}: {where} there should be {expected}")
