"""A request that comes again after its store died has the answer that it had, and no effect."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from dataplane.errors import DataplaneError, OutcomeUnknown
from dataplane.wire.messages import RETURN_TAGS, PutMeta
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.raw import Raw, block
from tests.history.stepper import revision_of

pytestmark = pytest.mark.faults

TAGS = msgpack.packb({"n": 2})


def put_meta(keys: list[str], number: int, **parts: Any) -> bytes:
    return PutMeta("p", keys, RETURN_TAGS, number, 0, None, None)._replace(**parts).pack()


class Asked:
    """Numbered requests of one client, each kept with its answer."""

    def __init__(self, plane: Plane) -> None:
        self.client_id = os.urandom(8).hex()
        self._plane = plane
        self.raw = self._greeted()
        self.kept: list[tuple[str, list[Any], bytes, Any]] = []
        self.number = 0

    def _greeted(self) -> Raw:
        return Raw.greeted(self._plane.joined, client_id=self.client_id)

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *exc: object) -> None:
        self.raw.close()

    def next(self) -> int:
        self.number += 1
        return self.number

    def ask(self, verb: str, body: list[Any], payload: bytes = b"") -> Any:
        answer = outcome(self.raw, verb, body, payload)
        self.kept.append((verb, body, payload, answer))
        return answer

    def greet_again(self) -> None:
        """Connect to the process that serves now."""
        self.raw.close()
        self.raw = self._greeted()

    def again(self) -> None:
        """Connect to the process that serves now, and ask for everything once more."""
        self.greet_again()
        for verb, body, payload, answer in self.kept:
            assert outcome(self.raw, verb, body, payload) == answer, verb


def outcome(raw: Raw, verb: str, body: list[Any], payload: bytes) -> Any:
    """What a request was answered, be it an error."""
    try:
        return raw.ask(verb, body, payload)
    except DataplaneError as error:
        return type(error), str(error)


def test_every_numbered_request_is_answered_the_same_after_a_kill(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    plane.client.kv_batch_put(["A", "B", "C", "D"], "p", tags=[{"n": 1}] * 4)
    with Asked(plane) as asked:
        head, payload = block({"x": torch.arange(10)})
        asked.ask("put_tags", [put_meta(["A"], asked.next()), TAGS])
        asked.ask("put_block", [put_meta(["E"], asked.next()), TAGS, *head, 1.0, None], payload)
        asked.ask("clear", ["p", ["B"], None, False, asked.next(), 0])
        asked.ask("clear", ["p", ["nobody"], None, False, asked.next(), 0])  # changes nothing
        asked.ask("clear", ["p", None, {"n": 7}, False, asked.next(), 0])  # nor does this
        attempt = asked.ask("begin_group", ["u", "p", 1, None, None, 1.0, asked.next(), 0])
        asked.ask("end_group", [attempt, "finished", asked.next(), 0])
        asked.ask("create_partition", ["q", None, None, None, asked.next(), 0])
        asked.ask("seal_partition", ["q", asked.next(), 0])
        asked.ask("drop_partition", ["q", None, asked.next(), 0])
        claim = asked.raw.ask("claim", ["p", "t", 1, [], None, None, False, 30.0, None, [], 1.0, 1])
        asked.ask("claim_commit", ["p", "t", claim[0], ["C"], asked.next(), 0])
        listed = plane.client.kv_list("p")
        asked.again()  # on the process that answered first
        for _ in range(2):
            before = revision_of(plane)
            killed = plane.pid
            plane.kill()
            eventually(lambda killed=killed: plane.pid != killed, "another process serves")
            asked.again()
            now = plane.client.kv_list("p")
            assert revision_of(plane) == before
            assert (now.keys, now.tags) == (listed.keys, listed.tags)
            assert plane.reads("E", "p") == list(range(10))
        for verb, body, _, answer in asked.kept:
            if verb != "put_block":
                number = body[-2] if verb != "put_tags" else 1
                told = plane.client.request_outcome(f"{asked.client_id}/{number}")
                assert told["applied"], (verb, told, answer)


def test_what_was_settled_or_never_asked_is_known_after_a_kill_too(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    with Asked(plane) as asked:
        for number in (1, 2, 3):
            asked.raw.ask("put_tags", [put_meta([f"k{number}"], number), TAGS])
        asked.raw.ask("put_tags", [put_meta(["k4"], 4, settled=2), TAGS])
        assert not plane.client.request_outcome(f"{asked.client_id}/9")["applied"]
        plane.kill()
        eventually(lambda: plane.client.kv_list("p"), "another process serves")
        with pytest.raises(OutcomeUnknown):
            plane.client.request_outcome(f"{asked.client_id}/2")
        for number in (3, 4):
            assert plane.client.request_outcome(f"{asked.client_id}/{number}")["applied"]
        asked.greet_again()
        # It was said of this one that it had no effect: so it never has one.
        with pytest.raises(DataplaneError, match="comes after it was said"):
            asked.raw.ask("put_tags", [put_meta(["k9"], 9), TAGS])
        with pytest.raises(OutcomeUnknown):
            asked.raw.ask("put_tags", [put_meta(["k2"], 2), TAGS])
        assert sorted(plane.client.kv_list("p").keys) == ["k1", "k2", "k3", "k4"]
