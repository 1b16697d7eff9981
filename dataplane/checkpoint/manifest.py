"""The manifest of a checkpoint: which moment it is, what it holds, how every file must be. Pure.

Everything in it is checked before any other file is opened. What is wrong with a checkpoint is
`Malformed` in this package's pure files; who knows the path makes it CheckpointDamaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dataplane.codec.shapes import ITEM_BYTES, MAX_NAME_BYTES, MAX_RANK
from dataplane.errors import InvalidRequest
from dataplane.tags.keys import check_name
from dataplane.types import FieldSchema, Quota, Retention

FORMAT: Final = "dataplane-checkpoint"
VERSION: Final = 1
"""Version n reads n and n - 1."""

MANIFEST: Final = "manifest.json"
CHECKSUM: Final = "manifest.sha256"
"""The manifest's own checksum, as `sha256sum -c` reads it."""


class Malformed(ValueError):
    """What a checkpoint holds is not what a save writes."""


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FileEntry(_Entry):
    """One file of a checkpoint."""

    name: Annotated[str, Field(pattern=r"^[0-9]{1,9}-(tags\.parquet|values-[0-9]{1,9}\.arrow)$")]
    nbytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rows: Count


class FieldEntry(_Entry):
    """What a partition has fixed for a field."""

    dtype: str
    rank: Annotated[int, Field(ge=0, le=MAX_RANK)]
    ragged_dim: Annotated[int, Field(ge=0, lt=MAX_RANK)] | None

    @model_validator(mode="after")
    def _can_be(self) -> FieldEntry:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"there is no dtype {self.dtype!r:.80}")
        if (self.ragged_dim is None) != (self.rank == 0) or (self.ragged_dim or 0) > self.rank:
            raise ValueError(f"a field of rank {self.rank} is not ragged in {self.ragged_dim}")
        return self

    @property
    def schema_of(self) -> FieldSchema:
        """The same as the store has it."""
        return FieldSchema(self.dtype, self.rank, self.ragged_dim)


class GroupEntry(_Entry):
    """A group: the attempt at one prompt's sessions."""

    uid: str
    attempt: Annotated[int, Field(gt=0, lt=1 << 63)]
    n: Annotated[int, Field(gt=0, lt=1 << 31)]
    declared_bytes: Count
    status: str
    since: Count
    at: Annotated[float, Field(allow_inf_nan=False)]
    open: bool
    producer: str


class PartitionEntry(_Entry):
    """A partition with its settings and the files that hold its rows."""

    partition_id: str
    rows: Count
    revision: Count
    sealed: bool
    open_schema: bool
    fields: dict[Annotated[str, Field(min_length=1, max_length=MAX_NAME_BYTES)], FieldEntry]
    quota: dict[str, int] | None
    retention: dict[str, int] | None
    groups: list[GroupEntry]
    tasks: list[dict[str, Any]]
    """What is known of tasks besides their state of each row, which the tags file has."""
    tags: FileEntry
    values: list[FileEntry]

    @model_validator(mode="after")
    def _fits(self) -> PartitionEntry:
        check_name(self.partition_id, "partition name")
        Quota.of(self.quota)
        Retention.of(self.retention)
        if self.tags.rows != self.rows:
            raise ValueError(f"{self.tags.rows} rows of tags of {self.rows}")
        if self.values and sum(file.rows for file in self.values) != self.rows:
            raise ValueError(f"values of {sum(f.rows for f in self.values)} rows of {self.rows}")
        if len({group.attempt for group in self.groups}) < len(self.groups):
            raise ValueError("two groups of one attempt")
        return self

    @property
    def schema_of(self) -> dict[str, FieldSchema]:
        """The fields as the store has them."""
        return {name: field.schema_of for name, field in self.fields.items()}


class Manifest(_Entry):
    """One moment of a plane."""

    format: Literal["dataplane-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    plane_name: str
    plane_id: str
    epoch: Annotated[int, Field(ge=0, lt=1 << 62)]
    n: Annotated[int, Field(ge=0, lt=1 << 62)]
    floor: Count
    """The last revision that history did not cover any more."""
    saved_at: Annotated[float, Field(allow_inf_nan=False)]
    """Seconds since 1970."""
    partitions: list[PartitionEntry]

    @model_validator(mode="after")
    def _is_one(self) -> Manifest:
        names = [file.name for file in self.files()]
        if len(set(names)) < len(names):
            raise ValueError("a file is named twice")
        if len({p.partition_id for p in self.partitions}) < len(self.partitions):
            raise ValueError("a partition is named twice")
        return self

    def files(self) -> Iterator[FileEntry]:
        """Every file but the manifest itself."""
        for partition in self.partitions:
            yield partition.tags
            yield from partition.values

    @property
    def rows(self) -> int:
        """Rows of all partitions."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.nbytes for file in self.files())

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False).encode() + b"\n"


def checksum_line(content: bytes) -> bytes:
    """What the file beside the manifest says."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def is_manifest(content: bytes) -> bool:
    """Whether this looks like the manifest of a checkpoint, damaged or not."""
    return f'"{FORMAT}"'.encode() in content[:4096]


def parse(content: bytes) -> Manifest:
    """The manifest that `to_bytes` wrote.

    Malformed says what is wrong with it. InvalidRequest: it is of a version unknown here.
    """
    try:
        read: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None
    head = cast("dict[str, Any]", read) if type(read) is dict else {}
    version = head.get("version")
    if type(version) is int and version > VERSION and head.get("format") == FORMAT:
        raise InvalidRequest(
            f"the checkpoint is of format version {version}; this release reads up to {VERSION}: "
            "install the release that wrote it, or a later one"
        )
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise Malformed(f"{place or 'manifest'}: {first['msg']}") from None
