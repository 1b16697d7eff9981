"""The proof of a plane's secret: each side's own, for one connection, worthless anywhere else."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.wire.auth import CHALLENGE_BYTES, SECRET_BYTES, client_proof, matches, server_proof

CHALLENGES = st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)
SECRETS = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)
SECRET, THEIRS, MINE = b"s" * SECRET_BYTES, b"t" * CHALLENGE_BYTES, b"m" * CHALLENGE_BYTES


def test_a_proof_is_the_hmac_of_side_and_both_challenges() -> None:
    for prove, side in ((client_proof, b"client"), (server_proof, b"server")):
        text = b"dataplane/1 " + side + THEIRS + MINE
        assert prove(SECRET, THEIRS, MINE) == hmac.digest(SECRET, text, hashlib.sha256)


@given(SECRETS, SECRETS, CHALLENGES, CHALLENGES, CHALLENGES)
def test_a_proof_fits_one_secret_one_side_and_one_pair_of_challenges(
    secret: bytes, other_secret: bytes, theirs: bytes, mine: bytes, another: bytes
) -> None:
    shown = client_proof(secret, theirs, mine)
    assert matches(shown, client_proof(secret, theirs, mine))
    assert not matches(shown, server_proof(secret, theirs, mine))
    assert matches(shown, client_proof(other_secret, theirs, mine)) == (secret == other_secret)
    assert matches(shown, client_proof(secret, another, mine)) == (another == theirs)
    assert matches(shown, client_proof(secret, theirs, another)) == (another == mine)
    assert matches(shown, client_proof(secret, mine, theirs)) == (mine == theirs)


@pytest.mark.parametrize("shown", [b"", b"\0", bytes(31), bytes(32), bytes(33)])
def test_what_is_no_proof_matches_none(shown: bytes) -> None:
    assert not matches(shown, client_proof(SECRET, THEIRS, MINE))


def test_a_proof_shows_nothing_of_the_secret() -> None:
    proof = client_proof(SECRET, THEIRS, MINE)
    assert len(proof) == 32
    assert SECRET[:4] not in proof
