"""Verbs about whole partitions, and the question why something waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.put import list_of
from dataplane.client.retry import ask_again, ask_once
from dataplane.client.tags import Where, plain_where
from dataplane.errors import InvalidRequest
from dataplane.types import Explanation, FieldSchema, Quota, Retention, Revision

Schema = Mapping[str, FieldSchema | Sequence[Any]] | str | None


def create_partition(
    core: Core,
    partition_id: str,
    schema: Schema,
    quota: Quota | Mapping[str, int | None] | None,
    retention: Retention | Mapping[str, int] | None,
    deadline: float,
) -> Verb[Revision]:
    """Make a partition, or change the settings of one; its revision."""
    _check_name(partition_id)
    fields: Any = schema
    if isinstance(schema, Mapping):
        fields = {name: declared(name, parts) for name, parts in schema.items()}
    elif schema not in (None, "open"):
        raise InvalidRequest(f"a schema is a mapping of fields, or 'open', not {schema!r:.80}")
    limits, keep = Quota.of(quota), Retention.of(retention)
    body = [
        partition_id,
        fields,
        None if limits is None else limits.limits(),
        None if keep is None else {"versions": keep.versions},
    ]
    answer = yield from ask_once(core, "create_partition", body, deadline)
    return core.see(answer.body)


def list_partitions(core: Core, deadline: float) -> Verb[dict[str, dict[str, Any]]]:
    """The partitions there are."""
    answer = yield from ask_again(core, "partitions", [], deadline)
    for about in answer.body.values():
        about["schema"] = {n: FieldSchema(*parts) for n, parts in about["schema"].items()}
    return answer.body


def seal_partition(core: Core, partition_id: str, deadline: float) -> Verb[list[str]]:
    """Let no new row in from here on; the older versions that were dropped for it."""
    _check_name(partition_id)
    answer = yield from ask_once(core, "seal_partition", [partition_id], deadline)
    revision, dropped = answer.body
    core.see(revision)
    return dropped


def drop_partition(
    core: Core, partition_id: str, older_than: int | None, deadline: float
) -> Verb[list[str]]:
    """Take partitions away; their names."""
    _check_name(partition_id)
    if older_than is not None and type(older_than) is not int:
        raise InvalidRequest(f"older_than is a version number, not {older_than!r:.80}")
    answer = yield from ask_once(core, "drop_partition", [partition_id, older_than], deadline)
    names, revision = answer.body
    core.see(revision)
    return names


def _check_name(partition_id: object) -> None:
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")


def declared(name: object, parts: object) -> list[Any]:
    """A field of a schema as it travels; the server knows whether there can be such a field."""
    plain = list_of(parts, f"field {name!r:.80} of a schema")
    if type(name) is not str or not all(part is None or type(part) in (str, int) for part in plain):
        raise InvalidRequest(
            f"field {name!r:.80} of a schema is declared as (dtype, rank, ragged_dim), such as "
            f"('int64', 1, 0), not as {parts!r:.80}"
        )
    return plain


def explain(
    core: Core,
    partition_id: str | None,
    where: Where | None,
    fields: Sequence[str],
    task: str | None,
    group_by: str | None,
    count: int | None,
    deadline: float,
    among: Sequence[str] | None = None,
) -> Verb[Explanation]:
    """Why something waits. `among`: the only partitions that are spoken of."""
    if isinstance(fields, str):
        raise InvalidRequest(f"fields is a list of field names; give [{fields!r:.80}] for one")
    body: list[Any] = [
        partition_id, plain_where(where), list_of(fields, "fields"), task,
        grouped(group_by), count,
    ]  # fmt: skip
    if among is not None:
        body.append(list(among))
    answer = yield from ask_again(core, "explain", body, deadline)
    return Explanation(**answer.body)


def grouped(group_by: object) -> bool:
    """Whether whole groups are meant. InvalidRequest for anything but 'uid' or None."""
    if group_by not in (None, "uid"):
        raise InvalidRequest(f"group_by is 'uid' or None, not {group_by!r:.80}")
    return group_by == "uid"
