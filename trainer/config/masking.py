"""What is not written down: values that look like secrets.

Owns what looks like one: strings under names such as `api_key` or `hf_token`, the user's part of a
URL, and values of environment variables of such names, wherever they turn up.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any, Final, cast

MASK: Final = "***"
SHORTEST: Final = 8
"""Values of environment variables that are shorter are words, and not searched for."""

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET_WORDS: Final = frozenset(
    "token tokens secret secrets password passwords passwd passphrase apikey credential "
    "credentials authorization bearer cookie".split()
)
_KEY_KINDS: Final = frozenset("api access private secret auth account".split())
_USER_INFO = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^/@\s]+@")
_QUERY = re.compile(
    r"([?&](?:[\w-]*(?:token|secret|password|key|signature))=)[^&\s]+", re.IGNORECASE
)


def looks_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret.

    Example: `api_key`, `HF_TOKEN` and `AWS_SECRET_ACCESS_KEY` do, `tokenizer` and `key` do not.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if _SECRET_WORDS.intersection(words):
        return True
    return any(
        one in _KEY_KINDS and other in ("key", "keys") for one, other in itertools.pairwise(words)
    )


def masked(data: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A copy of plain data in which secrets are `***`. Numbers are none: `max_tokens` stays."""
    variables = os.environ if environment is None else environment
    secrets = [
        value for name, value in variables.items() if looks_secret(name) and len(value) >= SHORTEST
    ]
    return _masked(data, sorted(secrets, key=len, reverse=True), hidden=False)


def _masked(data: Any, secrets: list[str], *, hidden: bool) -> Any:
    if isinstance(data, Mapping):
        named = cast("Mapping[Any, Any]", data).items()
        return {
            _text(n, secrets) if isinstance(n, str) else n: _masked(
                v, secrets, hidden=hidden or looks_secret(str(n))
            )
            for n, v in named
        }
    if isinstance(data, list | tuple):
        return [_masked(v, secrets, hidden=hidden) for v in cast("list[Any]", data)]
    if isinstance(data, str):
        return MASK if hidden and data else _text(data, secrets)
    return data


def _text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _QUERY.sub(rf"\1{MASK}", _USER_INFO.sub(rf"\1{MASK}@", text))
