"""What a token file says: tokens and certificates, as JSON, and what may be changed.

    {"version": 1,
     "tokens": [
       {"id": "mzxw6ytboi2w", "principal": "rollout-7", "sha256": "…64 hex digits…",
        "created": "2026-05-01T12:00:00Z", "expires": "2026-06-01T12:00:00Z",
        "grants": [{"partition": "train*", "roles": ["producer"], "fields": ["input_ids"]}],
        "limits": {"calls_per_s": 200}}],
     "certificates": [
       {"subject": "judge.example.org", "principal": "judge",
        "grants": [{"partition": "*", "verbs": ["read", "list"]}]}]}

Anything that is not known is refused: a misspelt limit must not be taken for none. What is refused
is never quoted, since it may be a token that was pasted into the wrong place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from dataplane.errors import InvalidRequest
from dataplane.gateway.access import limits as _limits
from dataplane.gateway.access import roles as _roles
from dataplane.gateway.access.redaction import redact
from dataplane.gateway.access.roles import ANYONE, Principal

Made = TypeVar("Made")


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("has characters that cannot be printed")
    return name


Name = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_printable)]


class _Strict(BaseModel):
    # Without the inputs, for they may be secrets.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Grant(_Strict):
    """Roles and verbs, in the partitions of a pattern."""

    partition: Name
    roles: tuple[Name, ...] = ()
    verbs: tuple[Name, ...] = ()
    fields: tuple[Name, ...] | None = None
    """Fields that may be written or read; all, if it is not set."""

    def grant(self) -> _roles.Grant:
        """The grant, with its roles resolved. InvalidRequest names what does not exist."""
        verbs = _roles.verbs_of(self.roles, self.verbs)
        fields = None if self.fields is None else frozenset(self.fields)
        return _roles.Grant(self.partition, verbs, fields)


class Limits(_Strict):
    """The limits of a principal; what is not set is not limited."""

    calls_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    open_streams: int | None = Field(default=None, gt=0)
    clients: int | None = Field(default=None, gt=0)
    inflight_bytes: int | None = Field(default=None, gt=0)

    def limits(self) -> _limits.Limits:
        return _limits.Limits(**self.model_dump())


class _Credential(_Strict):
    name: Name = Field(alias="principal")
    grants: tuple[Grant, ...] = Field(min_length=1)
    limits: Limits = Limits()
    _principal: Principal = PrivateAttr()

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        if self.name == ANYONE.name:
            # Its rows and claims would be those of whoever calls without credentials.
            raise ValueError(f"no principal may be called {ANYONE.name!r}")
        grants = tuple(grant.grant() for grant in self.grants)
        limits = self.limits.limits()
        self._principal = Principal(self.name, grants, limits, self._token_id())
        return self

    @property
    def principal(self) -> Principal:
        """Whom it stands for."""
        return self._principal

    def _token_id(self) -> str | None:
        return None


class Token(_Credential):
    """A token, without its secret."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{12}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(repr=False)
    created: AwareDatetime
    expires: AwareDatetime | None = None

    def _token_id(self) -> str | None:
        return self.id

    def has_expired(self, now_s: float) -> bool:
        """Whether it holds no more, so many seconds after 1970."""
        return self.expires is not None and now_s >= self.expires.timestamp()


class Certificate(_Credential):
    """A client's certificate, by the name that it shows."""

    subject: Name
    """A subject alternative name of it, or, if it has none of those, its common name."""


class Records(_Strict):
    """All that a token file says."""

    version: Literal[1] = 1
    tokens: tuple[Token, ...] = ()
    certificates: tuple[Certificate, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _each_once("token id", [token.id for token in self.tokens])
        _each_once("certificate subject", [bound.subject for bound in self.certificates])
        return self

    @classmethod
    def parse(cls, data: bytes, source: str) -> Records:
        """What a file says. InvalidRequest says where it is wrong; `source` names it there."""
        try:
            document = json.loads(data, object_pairs_hook=_no_name_twice)
        except (ValueError, RecursionError) as error:
            where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise InvalidRequest(f"token file {source} is no JSON{where}") from None
        return _checked(lambda: cls.model_validate(document), f"token file {source}")

    def dump(self) -> bytes:
        """The file that says this."""
        document = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(document, indent=1).encode() + b"\n"

    def with_token(self, token: Token) -> Records:
        """This, and one more token."""
        return Records(tokens=(*self.tokens, token), certificates=self.certificates)

    def with_certificate(self, bound: Certificate) -> Records:
        """This, and one more certificate; what its subject was bound to before is forgotten."""
        others = (each for each in self.certificates if each.subject != bound.subject)
        return Records(tokens=self.tokens, certificates=(*others, bound))

    def without(self, names: frozenset[str]) -> tuple[Records, list[str]]:
        """What is left without these, and which were there: ids of tokens, subjects of
        certificates, or principals with all that they have."""
        tokens, certificates, gone = list[Token](), list[Certificate](), list[str]()
        for token in self.tokens:
            if names & {token.id, token.name}:
                gone.append(token.id)
            else:
                tokens.append(token)
        for bound in self.certificates:
            if names & {bound.subject, bound.name}:
                gone.append(bound.subject)
            else:
                certificates.append(bound)
        return Records(tokens=tuple(tokens), certificates=tuple(certificates)), gone


def token_record(
    *,
    token_id: str,
    sha256: str,
    principal: str,
    created_s: float,
    expires_s: float | None,
    grants: tuple[Grant, ...],
    limits: Limits,
) -> Token:
    """The record of a new token. InvalidRequest says what is wrong with it."""
    created, expires = _moment(created_s), None if expires_s is None else _moment(expires_s)
    return _checked(
        lambda: Token(
            id=token_id, sha256=sha256, principal=principal, created=created, expires=expires,
            grants=grants, limits=limits,
        ),
        "token",
    )  # fmt: skip


def certificate_record(
    *, subject: str, principal: str, grants: tuple[Grant, ...], limits: Limits
) -> Certificate:
    """The record of a certificate. InvalidRequest says what is wrong with it."""
    return _checked(
        lambda: Certificate(subject=subject, principal=principal, grants=grants, limits=limits),
        "certificate",
    )


def grant_record(
    *,
    partition: str,
    roles: tuple[str, ...],
    verbs: tuple[str, ...],
    fields: tuple[str, ...] | None,
) -> Grant:
    """A grant. InvalidRequest says what is wrong with it."""

    def make() -> Grant:
        grant = Grant(partition=partition, roles=roles, verbs=verbs, fields=fields)
        grant.grant()
        return grant

    return _checked(make, "grant")


def limits_record(**limits: float | None) -> Limits:
    """Limits, checked. InvalidRequest says which is wrong."""
    return _checked(lambda: Limits.model_validate(limits), "limits")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(int(seconds), UTC)


def _checked(make: Callable[[], Made], what: str) -> Made:
    try:
        return make()
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        said = redact("; ".join(found[:5]))
        raise InvalidRequest(f"{what} is not right: {said}{more}") from None


def _each_once(what: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"each {what} may be there once")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Which of the two holds would depend on who reads it.
        raise ValueError("a name twice in one object")
    return found
