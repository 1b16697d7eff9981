"""Proof of the plane's secret on a new connection, both ways. Pure.

The server opens with a random challenge. The client answers with a challenge of its own and an
HMAC over both; the server answers with the HMAC of the other direction. The secret itself never
travels, and a recorded greeting is useless on another connection.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from dataplane.errors import Unauthenticated

CHALLENGE_BYTES = 32
SECRET_BYTES = 32


def client_proof(secret: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """What a client shows to a server."""
    return _proof(secret, b"client", server_challenge, client_challenge)


def server_proof(secret: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """What a server shows to a client."""
    return _proof(secret, b"server", server_challenge, client_challenge)


def matches(shown: bytes, expected: bytes) -> bool:
    """Whether two proofs are the same, in constant time."""
    return hmac.compare_digest(shown, expected)


def challenge_in(body: Any) -> bytes:
    """The challenge with which a server opens. Unauthenticated if it is none."""
    match body:
        case [bytes(challenge)] if len(challenge) == CHALLENGE_BYTES:
            return challenge
        case _:
            raise Unauthenticated("the server does not speak this protocol")


def greeting_in(body: Any) -> tuple[bytes, str, Any]:
    """The proof, the plane's id and the greeting that a server answers a client with.
    Unauthenticated if it is no such answer."""
    match body:
        case [bytes(shown), str(plane_id), greeting]:
            return shown, plane_id, greeting
        case _:
            raise Unauthenticated("the server does not speak this protocol")


def _proof(secret: bytes, side: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    text = b"dataplane/1 " + side + server_challenge + client_challenge
    return hmac.new(secret, text, hashlib.sha256).digest()
