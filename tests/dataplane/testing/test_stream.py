"""Frames are told apart however their bytes come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.testing.stream import Piece, Stream
from dataplane.wire.frames import PREFIX, Header, frame

FRAMES = [
    ("challenge", 0, [b"c"], b""),
    ("put_block", 1, ["meta", 3], b"0123456789"),
    (0, 1, None, b""),
    ("list", 2, [], b"x"),
]
BYTES = [frame(kind, number, body, len(tail)) + tail for kind, number, body, tail in FRAMES]


def fed(cuts: list[int]) -> list[tuple[Piece, Header | None]]:
    """All pieces of the frames, whose bytes come cut at these places; and what the header said."""
    whole = b"".join(BYTES)
    at = [0, *sorted({cut % len(whole) for cut in cuts}), len(whole)]
    stream = Stream()
    return [
        (piece, stream.header())
        for begin, end in pairwise(at)
        for piece in stream.feed(whole[begin:end])
    ]


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_pieces_are_the_frames_however_they_are_cut(cuts: list[int]) -> None:
    seen: list[bytes] = []
    headers: list[Header] = []
    for piece, header in fed(cuts):
        assert piece.data
        if piece.begins:
            assert (piece.part, piece.at) == ("prefix", 0)
            seen.append(b"")
        at = len(seen[-1])
        assert (
            piece.at
            == {
                "prefix": at,
                "header": at - PREFIX.size,
                "payload": at - PREFIX.size - _header_bytes(seen),
            }[piece.part]
        )
        seen[-1] += piece.data
        if piece.part == "header" and piece.at + len(piece.data) == piece.of:
            assert header is not None
            headers.append(header)
        assert piece.ends == (seen[-1] == BYTES[len(seen) - 1])
    assert seen == BYTES
    assert [(h.kind, h.number, h.body) for h in headers] == [f[:3] for f in FRAMES]


def _header_bytes(seen: list[bytes]) -> int:
    return PREFIX.unpack(seen[-1][: PREFIX.size])[1] if len(seen[-1]) >= PREFIX.size else 0


def test_what_is_no_frame_passes_all_the_same() -> None:
    stream = Stream()
    data = b"\x16\x03\x01 TLS, for one, or a damaged prefix"
    pieces = [piece for at in range(len(data)) for piece in stream.feed(data[at : at + 1])]
    assert b"".join(piece.data for piece in pieces) == data
    assert not any(piece.ends for piece in pieces)
    assert stream.header() is None


@pytest.mark.parametrize("header", [b"\xc1", b"\x93", b"\x01"])
def test_a_header_that_is_none_passes(header: bytes) -> None:
    stream = Stream()
    data = PREFIX.pack(BYTES[0][:4], len(header), 0) + header
    (*_, last) = stream.feed(data)
    assert last.ends
    assert stream.header() is None
