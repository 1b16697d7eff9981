"""Bearer tokens: what one looks like, how it is kept, and how it is found again.

A token is `dpt_<id>_<secret>`. The id is public and names it in lists, errors and logs; the secret
is shown once, when it is made. A token file keeps the SHA-256 of the secret, which is as good as
the secret to nobody: 32 random bytes cannot be guessed, so no slow hash is needed.

Whoever shows a token that is malformed, unknown, wrong or expired is told the same, after the same
work: one hash and one comparison in constant time.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dataplane.errors import InvalidRequest
from dataplane.gateway.access.roles import Principal
from dataplane.gateway.access.token_disk import read_records, state_of
from dataplane.gateway.access.token_records import Records, Token

log = logging.getLogger("dataplane.gateway")

PREFIX: Final = "dpt"
ID_CHARS: Final = 12
SECRET_BYTES: Final = 32
SECRET_CHARS: Final = 43
"""Of base64url, without the padding."""

_TOKEN: Final = re.compile(
    rf"{PREFIX}_([a-z2-7]{{{ID_CHARS}}})_([A-Za-z0-9_-]{{{SECRET_CHARS}}})", re.ASCII
)

_NOBODY: Final = "0" * SECRET_CHARS
"""What is hashed for a token that is none, and compared with a digest that nothing has."""
_NO_DIGEST: Final = "0" * 64

CHECK_EVERY_S: Final = 1.0
"""How often it is looked whether the file has changed, at most."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made."""

    id: str
    text: str = field(repr=False)
    """What its holder is given. It is kept nowhere."""
    sha256: str


def new_token(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> NewToken:
    """A token that nobody has yet."""
    token_id = base64.b32encode(random_bytes(8)).decode().lower()[:ID_CHARS]
    secret = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).decode().rstrip("=")
    return NewToken(token_id, f"{PREFIX}_{token_id}_{secret}", digest_of(secret))


def digest_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def split_token(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if it is none."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else (match[1], match[2])


class TokenFile:
    """The tokens of a file, as it is now: changes are taken up within a second.

    A file that is broken, missing or unsafe after a change is reported and not used: the last good
    one holds, so that a slip of an editor does not lock everybody out.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """InvalidRequest if the file cannot be used.

        Args:
            clock: seconds since 1970, for expiry.
            monotonic: seconds from any beginning, for when to look at the file again.
        """
        self.path = path
        self._clock = clock
        self._monotonic = monotonic
        self._tokens: Mapping[str, Token] = {}
        self._certificates: Mapping[str, Principal] = {}
        self._state = state_of(path)
        self._next_check = monotonic() + CHECK_EVERY_S
        self._take(read_records(path))

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self._tokens)} tokens)"

    @property
    def binds_certificates(self) -> bool:
        """Whether any certificate stands for somebody."""
        return bool(self._certificates)

    def find(self, shown: str) -> Principal | None:
        """Whom a token stands for; None if it is none, is not known, is wrong or has expired."""
        self.refresh()
        parts = split_token(shown)
        token_id, secret = ("", _NOBODY) if parts is None else parts
        token = self._tokens.get(token_id)
        kept = _NO_DIGEST if token is None else token.sha256
        same = hmac.compare_digest(digest_of(secret), kept)
        if not same or token is None or token.has_expired(self._clock()):
            return None
        return token.principal

    def find_certificate(self, names: Iterable[str]) -> Principal | None:
        """Whom a client's certificate stands for, by the names that it has; None if by none of
        them, or if they are bound to several."""
        self.refresh()
        found = {
            principal
            for name in names
            if (principal := self._certificates.get(name)) is not None
        }  # fmt: skip
        if len(found) > 1:
            log.warning(
                "the names of a certificate are bound to several principals, so it is refused: %s",
                sorted(principal.name for principal in found),
            )
            return None
        return found.pop() if found else None

    def present(self, principal: Principal, names: Iterable[str] = ()) -> Principal | None:
        """Whom credentials that were good once stand for now, for calls that last; None if they
        were revoked or have expired. `names` are those of a certificate."""
        self.refresh()
        if principal.token_id is None:
            return self.find_certificate(names)
        token = self._tokens.get(principal.token_id)
        return None if token is None or token.has_expired(self._clock()) else token.principal

    def refresh(self) -> None:
        """Take up the file if it has changed, looking at most once a second."""
        now = self._monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_EVERY_S
        state = state_of(self.path)
        if state == self._state:
            return
        # Noted before it is read: should it change meanwhile, it is read once more.
        self._state = state
        try:
            records = read_records(self.path)
        except InvalidRequest as error:
            log.error("%s; what it said before still holds", error.message)
            return
        self._take(records)
        log.info("token file %s: %d tokens", self.path, len(self._tokens))

    def _take(self, records: Records) -> None:
        self._tokens = {token.id: token for token in records.tokens}
        self._certificates = {bound.subject: bound.principal for bound in records.certificates}
