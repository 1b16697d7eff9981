"""Tags and what else is known of rows, as Arrow record batches and back. Pure.

Owns the columns of a tags file. `key`, `revision`, `cleared_at`, `attempt` and `producer` are the
store's own; `tag.<name>` is a tag and `task.<name>` what a task did with the row, so that no name
of a caller's meets one of ours. A tag has a typed column (int64, float64, bool, string) where all
rows that have it hold that one type, and null is a row without it. Any other tag is JSON text, as
the metadata of its column says; there too null is a row without the tag, and the text `null` None.

JSON has neither NaN nor infinity: a float that it cannot carry is `{"$float": "<8 bytes in hex>"}`,
and a key of a map that begins with `$` has one more of them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.checkpoint.manifest import Malformed
from dataplane.errors import InvalidRequest
from dataplane.tags.keys import check_keys
from dataplane.tags.restoring import PROMPT
from dataplane.tags.saved_tasks import COMMITTED
from dataplane.types import Tags, TagValue

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


MAX_TAG_COLUMNS: Final = 1024
"""Tags with a column of their own; names beyond, as where an id is one, share a column of maps."""
FLOAT: Final = "$float"

TAG: Final = "tag."
TASK: Final = "task."
MORE: Final = "more_tags"
JSON_MARK: Final = {b"dataplane": b"json"}

_ARROW: Final[dict[type, Any]] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
}
_TYPED: Final = tuple(_ARROW.values())


class Json:
    """Stands for the type of a tag that has no typed column."""


class TagRows(NamedTuple):
    """Rows as a tags file has them, without their values."""

    keys: list[str]
    tags: list[Tags]
    revisions: Ints  # [N]
    cleared_at: Ints  # [N], 0 where the key was not cleared as far as history reaches
    attempts: Ints  # [N], PROMPT for the row of a prompt, 0 where a row belongs to no group
    producers: list[str]
    tasks: dict[str, Ints32]
    """[N], what each task did with each row: COMMITTED, or how often it was offered the row."""


class TagKinds:
    """Which tags occur in a partition, and of which type each is in all of its rows."""

    def __init__(self) -> None:
        self.types: dict[str, type] = {}
        self.more = False
        """Whether there are more names than columns."""

    def note(self, rows: Sequence[Tags]) -> None:
        """Take the tags of more rows into account."""
        types = self.types
        for tags in rows:
            for name, value in tags.items():
                kind = type(value)
                known = types.get(name)
                if known is None:
                    if len(types) == MAX_TAG_COLUMNS:
                        self.more = True
                        continue
                    types[name] = kind if kind in _ARROW else Json
                elif known is not kind:
                    types[name] = Json
                if kind is int and not -(1 << 63) <= cast("int", value) < 1 << 63:
                    types[name] = Json

    def schema(self, tasks: Sequence[str] = ()) -> pa.Schema:
        """The columns of a file of such rows."""
        fields = [
            pa.field("key", pa.string(), nullable=False),
            pa.field("revision", pa.int64(), nullable=False),
            pa.field("cleared_at", pa.int64(), nullable=False),
            pa.field("attempt", pa.int64()),
            pa.field("producer", pa.string(), nullable=False),
        ]
        fields += [pa.field(TASK + task, pa.int32(), nullable=False) for task in tasks]
        for name, kind in self.types.items():
            if kind is Json:
                fields.append(pa.field(TAG + name, pa.string(), metadata=JSON_MARK))
            else:
                fields.append(pa.field(TAG + name, _ARROW[kind]))
        if self.more:
            fields.append(pa.field(MORE, pa.string(), metadata=JSON_MARK))
        return pa.schema(fields)


_OWN: Final = {field.name: field for field in TagKinds().schema()}


def encode(rows: TagRows, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as a batch of a schema that `TagKinds` made of them and maybe others."""
    arrays: list[pa.Array] = []
    for field in schema:
        name = field.name
        cells: Any
        if name == "key":
            cells = rows.keys
        elif name == "revision":
            cells = rows.revisions
        elif name == "cleared_at":
            cells = rows.cleared_at
        elif name == "attempt":
            cells = [attempt or None for attempt in rows.attempts.tolist()]
        elif name == "producer":
            cells = rows.producers
        elif name.startswith(TASK):
            cells = rows.tasks[name[len(TASK) :]]
        elif name == MORE:
            columns = {f.name[len(TAG) :] for f in schema if f.name.startswith(TAG)}
            cells = [_more(tags, columns) for tags in rows.tags]
        elif _is_json(field):
            tag = name[len(TAG) :]
            cells = [to_json(tags[tag]) if tag in tags else None for tags in rows.tags]
        else:
            tag = name[len(TAG) :]
            cells = [tags.get(tag) for tags in rows.tags]
        arrays.append(pa.array(cells, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _is_json(field: pa.Field) -> bool:
    return (field.metadata or {}).get(b"dataplane") == b"json"


def _more(tags: Tags, columns: set[str]) -> str | None:
    rest = {name: value for name, value in tags.items() if name not in columns}
    return to_json(rest) if rest else None


def check_schema(schema: pa.Schema) -> None:
    """Malformed unless these are columns as `TagKinds.schema` makes them."""
    seen: set[str] = set()
    for field in schema:
        name = field.name
        if name in seen:
            raise Malformed(f"two columns {name!r:.80}")
        seen.add(name)
        if name in _OWN:
            own = _OWN[name]
            right = field.type == own.type and field.nullable == own.nullable
        elif name == MORE or _is_json(field):
            right = field.type == pa.string() and _is_json(field)
            right = right and (name == MORE or name.startswith(TAG))
        elif name.startswith(TASK):
            right = field.type == pa.int32() and not field.nullable
        else:
            right = name.startswith(TAG) and field.type in _TYPED
        if not right:
            raise Malformed(f"column {name!r:.80} is of another kind than it should be")
    missing = set(_OWN) - seen
    if missing:
        raise Malformed(f"no column {sorted(missing)}")


def decode(batch: pa.RecordBatch) -> TagRows:
    """The rows of a batch whose schema was checked. Malformed says what is wrong with one."""
    tags: list[Tags] = [{} for _ in range(batch.num_rows)]
    own: dict[str, Any] = {}
    numbers: dict[str, Ints] = {}
    tasks: dict[str, Ints32] = {}
    for i, field in enumerate(batch.schema):
        name, column = field.name, batch.column(i)
        if not field.nullable and column.null_count:
            raise Malformed(f"column {name!r} has rows without a value")
        if name == "revision" or name == "cleared_at":
            numbers[name] = column.to_numpy(zero_copy_only=False)
            continue
        if name.startswith(TASK):
            tasks[name[len(TASK) :]] = column.to_numpy(zero_copy_only=False)
            continue
        cells = column.to_pylist()
        if name in _OWN:
            own[name] = cells
        else:
            _give(tags, name, cells, is_json=_is_json(field))
    numbers["attempt"] = np.array([attempt or 0 for attempt in own["attempt"]], np.int64)
    for name, of in numbers.items():
        if len(of) and of.min() < (PROMPT if name == "attempt" else 0):
            raise Malformed(f"column {name!r} has a negative number")
    for name, counts in tasks.items():
        if len(counts) and counts.min() < COMMITTED:
            raise Malformed(f"column {TASK + name!r} has a negative number")
    try:
        keys = check_keys(own["key"], unique=False)
    except InvalidRequest as error:
        raise Malformed(str(error)) from None
    return TagRows(
        keys,
        tags,
        numbers["revision"],
        numbers["cleared_at"],
        numbers["attempt"],
        own["producer"],
        tasks,
    )


def _give(tags: list[Tags], name: str, cells: Sequence[Any], *, is_json: bool) -> None:
    """Give each row what its column of tags says."""
    if name == MORE:
        for of, cell in zip(tags, cells, strict=True):
            if cell is not None:
                rest = from_json(cell)
                if type(rest) is not dict:
                    raise Malformed(f"column {name!r} holds what is no map")
                of.update(cast("Tags", rest))
        return
    name = name[len(TAG) :]
    for of, cell in zip(tags, cells, strict=True):
        if cell is not None:
            of[name] = from_json(cell) if is_json else cell


# -- JSON that keeps every tag ---------------------------------------------------------------


def to_json(value: TagValue) -> str:
    """A tag as JSON text, from which `from_json` makes the same value, bit for bit."""
    try:
        text = _encoder.encode(value)
    except ValueError:
        text = '"$'
    if '"$' in text:
        text = _encoder.encode(_escaped(value))
    return text


def _escaped(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {FLOAT: struct.pack(">d", value).hex()}
    if isinstance(value, list):
        return [_escaped(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {"$" + name if name[:1] == "$" else name: _escaped(item) for name, item in items}
    return value


def from_json(text: str) -> TagValue:
    """The tag of a JSON text. Malformed if it is none that `to_json` makes."""
    decoder = _unescaping if '"$' in text else _decoder
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{text!r:.80} is not the JSON of a tag: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unescaped(map_: dict[str, Any]) -> Any:
    if FLOAT in map_:
        data = bytes.fromhex(map_[FLOAT]) if type(map_[FLOAT]) is str else b""
        if len(map_) != 1 or len(data) != 8:
            raise ValueError(f"{FLOAT} stands for 8 bytes in hex")
        return struct.unpack(">d", data)[0]
    return {_one_less(name): item for name, item in map_.items()}


def _one_less(name: str) -> str:
    if name[:1] != "$":
        return name
    if name[:2] != "$$":
        raise ValueError(f"the name {name!r:.80} stands for nothing")
    return name[1:]


# Made once: making one takes as long as using it for a short text.
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_decoder = json.JSONDecoder(parse_constant=_no_constant)
_unescaping = json.JSONDecoder(object_hook=_unescaped, parse_constant=_no_constant)
