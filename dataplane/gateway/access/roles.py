"""Who may do what: verbs, roles, grants and principals. Pure.

A verb is a group of calls. A grant allows some verbs in the partitions that fit a pattern, with all
fields or those it names. A principal is a name with grants, as some credentials stand for. What no
grant allows is refused, in the same words whether or not there is such a partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dataplane.errors import InvalidRequest, PermissionDenied, quote
from dataplane.gateway.access.limits import Limits

VERBS: Final = frozenset(
    {
        "claim",  # take rows under a lease, finish them, give them back
        "clear",  # remove rows
        "explain",  # why something waits
        "group",  # begin and end groups
        "list",  # keys and tags, and which partitions there are
        "operate",  # hear who the clients are; in all partitions, also of stores and the plane
        "partition",  # make, seal and drop partitions
        "put",  # write rows and trajectories
        "put_tags",  # write tags only
        "read",  # read fields
        "wait",  # wait for rows, watch changes
    }
)
"""Every verb that a grant can allow."""

OWN: Final = "own"
"""The verb of calls that only concern the caller itself: every principal may make them."""

_LOOKING = frozenset({"read", "list", "wait", "explain"})

ROLES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "producer": _LOOKING | {"put", "put_tags", "group", "claim"},
        "consumer": _LOOKING | {"claim"},
        "reader": _LOOKING,
        "admin": VERBS,
    }
)
"""Bundles of verbs by the name that an operator gives. A producer may also claim: prompts are rows
that it takes."""

METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Describe": OWN,
        "PutRows": "put",
        "GetPutProgress": "put",
        "PutTags": "put_tags",
        "PutTrajectories": "put",
        "GetRows": "read",
        "List": "list",
        "Wait": "wait",
        "Watch": "wait",
        "Claim": "claim",
        "Commit": "claim",
        "Release": "claim",
        "Attend": OWN,
        "Clear": "clear",
        "BeginGroup": "group",
        "EndGroup": "group",
        "ListPartitions": "list",
        "CreatePartition": "partition",
        "SealPartition": "partition",
        "DropPartition": "partition",
        "Explain": "explain",
        "GetOutcome": OWN,
        "GetStatus": "list",
        "Inspect": "list",
        "Tally": "list",
        "GetStats": "explain",
        "ListClaims": "explain",
        "ListWaiters": "explain",
        "ListHoldings": "operate",
        "FindRevision": "list",
        "Trace": "explain",
        "GetRecord": "operate",
        "EnterStage": OWN,
    }
)
"""The verb of every call of `dataplane.v1.DataPlaneService`. One that is missing here is refused to
everybody."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Some verbs, in some partitions."""

    partition: str
    """A partition's name, in which each `*` stands for any characters, or none."""
    verbs: frozenset[str]
    fields: frozenset[str] | None = None
    """Fields that may be written or read; None for all of them."""

    def __post_init__(self) -> None:
        unknown = self.verbs - VERBS
        if unknown:
            raise InvalidRequest(
                f"there is no verb {quote(sorted(unknown))}; verbs are {', '.join(sorted(VERBS))}"
            )
        if not self.verbs or not self.partition:
            raise InvalidRequest("a grant names a partition, and at least one verb")

    def covers(self, partition_id: str) -> bool:
        """Whether it is about this partition."""
        return _fits(self.partition, partition_id)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who some credentials stand for, and what they may do."""

    name: str
    grants: tuple[Grant, ...]
    limits: Limits
    token_id: str | None = None
    """The public part of the token it was found by; None if that was something else."""

    def has(self, verb: str) -> bool:
        """Whether the verb is allowed in any partition at all."""
        return verb == OWN or any(verb in grant.verbs for grant in self.grants)

    def may(self, verb: str, partition_id: str, fields: Iterable[str] = ()) -> bool:
        """Whether the verb is allowed in a partition, and with each of the fields. Grants add up:
        fields may be allowed by several of them."""
        if verb == OWN:
            return True
        grants = [grant for grant in self.grants if verb in grant.verbs]
        grants = [grant for grant in grants if grant.covers(partition_id)]
        if not grants:
            return False
        allowed: set[str] = set()
        for grant in grants:
            if grant.fields is None:
                return True
            allowed |= grant.fields
        return allowed.issuperset(fields)

    def fields(self, verb: str, partition_id: str) -> frozenset[str] | None:
        """The fields that the verb is allowed with in a partition, None for all of them. Empty
        where the verb is not allowed there."""
        allowed: frozenset[str] = frozenset()
        for grant in self.grants:
            if verb in grant.verbs and grant.covers(partition_id):
                if grant.fields is None:
                    return None
                allowed |= grant.fields
        return allowed

    def require(self, verb: str, partition_id: str, fields: Iterable[str] = ()) -> None:
        """Raise PermissionDenied unless `may`. What is said does not depend on what there is."""
        named = list(fields)
        if self.may(verb, partition_id, named):
            return
        text = f"{self.name!r:.80} may not {verb} in partition {quote([partition_id])}"
        if named and self.may(verb, partition_id):
            allowed = self.fields(verb, partition_id) or frozenset()
            refused = [name for name in dict.fromkeys(named) if name not in allowed]
            text = f"{text} with fields {quote(refused)}"
        raise PermissionDenied(f"{text}; it needs a grant for that")

    def require_any(self, verb: str) -> None:
        """Raise PermissionDenied unless the verb is allowed in some partition."""
        if not self.has(verb):
            raise PermissionDenied(f"{self.name!r:.80} may not {verb} in any partition")

    def everywhere(self, verb: str) -> bool:
        """Whether the verb is allowed in every partition that there may be."""
        return any(verb in grant.verbs and not grant.partition.strip("*") for grant in self.grants)

    def require_everywhere(self, verb: str) -> None:
        """Raise PermissionDenied unless the verb is allowed in every partition."""
        if not self.everywhere(verb):
            raise PermissionDenied(
                f"{self.name!r:.80} may not {verb} in every partition, which is needed for what "
                "concerns the plane as a whole"
            )

    def sees(self, partition_id: str) -> bool:
        """Whether anything at all is allowed in a partition: to others it does not exist."""
        return any(grant.covers(partition_id) for grant in self.grants)


ANYONE: Final = Principal("anyone", (Grant("*", VERBS),), Limits())
"""Who calls without credentials where none are asked for: may do everything."""


def verbs_of(roles: Iterable[str], verbs: Iterable[str] = ()) -> frozenset[str]:
    """The verbs of some roles, and these. InvalidRequest names a role that does not exist."""
    found = set(verbs)
    for role in roles:
        if role not in ROLES:
            raise InvalidRequest(f"there is no role {role!r:.80}; roles are {', '.join(ROLES)}")
        found |= ROLES[role]
    return frozenset(found)


def _fits(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in time proportional to both: names come from outside."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first):
        return False
    at, end = len(first), len(name) - len(last)
    if end < at or not name.endswith(last):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
