"""A pickle is never loaded, wherever it stands: in any decoder, on any port, in any row."""

from __future__ import annotations

import io
import logging
import pickle
import random
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.errors import DataplaneError
from dataplane.server.tag_service import TagService
from dataplane.wire.frames import MAGIC, PREFIX
from tests.dataplane.replaying import Live
from tests.faults import planes
from tests.faults.planes import Plane
from tests.faults.raw import Raw, block, meta
from tests.fuzz import wire
from tests.fuzz.canary import canaries
from tests.fuzz.targets import TARGETS

PLACES = 8
"""Places of each decoder's formats in which a pickle is tried, of those that there are."""


@pytest.fixture(autouse=True)
def sang(tmp_path: Path) -> Iterator[Path]:
    """The folder that is made if a pickle is loaded; it is not."""
    path = tmp_path / "sang"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
    wire.close_loop()


def test_every_canary_does_sing(tmp_path: Path) -> None:
    for number, (name, data) in enumerate(canaries(tmp_path / "0")):
        path = tmp_path / str(number)
        data = data.replace(str(tmp_path / "0").encode(), str(path).encode())
        if name.startswith("torch"):
            fresh = dict(canaries(path))[name]  # a zip has checksums
            torch.load(io.BytesIO(fresh), weights_only=False)
        elif name == "npy":
            np.load(io.BytesIO(data), allow_pickle=True)
        else:
            pickle.loads(data)  # noqa: S301
        assert path.exists(), name


@pytest.mark.parametrize("name", TARGETS)
def test_no_decoder_loads_a_pickle(name: str, sang: Path) -> None:
    target = TARGETS[name]
    chance = random.Random(name)
    for _, payload in canaries(sang):
        inputs = list(target.planted(payload))
        for data in chance.sample(inputs, min(PLACES, len(inputs))):
            target(data)
            assert not sang.exists()


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Generator[Plane]:
    with ExitStack() as stack:
        plane = planes.start(stack, "canary", tcp_host="127.0.0.1", timeout_s=20, **roots)
        yield plane


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_no_port_loads_a_pickle(plane: Plane, tcp: bool, sang: Path) -> None:
    """Of a stranger, in the place of frames and within them, and of a client that is known."""
    for _, payload in canaries(sang):
        for data in (payload, PREFIX.pack(MAGIC, len(payload), 0) + payload):
            with Raw.to(plane.joined, tcp=tcp) as raw:
                raw.send(data.ljust(16, b"."))
                assert isinstance(raw.refusal(), DataplaneError)
        with Raw.greeted(plane.joined, tcp=tcp) as raw:
            for verb in sorted(_verbs()):
                for body in (payload, [payload], [payload] * 3, {"a": payload}):
                    number = raw.request(verb, body)
                    with suppress(DataplaneError):
                        raw.answer(number)
            head, content = block({"o": {"a": payload}})
            packed = meta("p", [payload.decode("latin-1")])
            with suppress(DataplaneError):
                raw.ask("put_block", [packed, payload, *head, 0.0, None], content)
    plane.client.kv_put("after", "q", None, {"n": 1})
    assert plane.client.kv_list("q").keys == ["after"]
    plane.client.kv_drop_partition("q")


def _verbs() -> set[str]:
    """All verbs but those that end the plane or wait, or have no answer."""
    service: TagService = wire.run(_service())
    return {*service.verbs} - {"destroy", "begun", "forget", "claim_abandon"}


async def _service() -> TagService:
    return Live().service


def test_a_pickle_in_a_row_comes_back_as_bytes(plane: Plane, sang: Path) -> None:
    for name, payload in canaries(sang):
        value: Any = {"bytes": payload, "list": (payload, [payload])}
        plane.client.kv_put(name, "rows", {"o": value, "x": torch.arange(3)}, {"t": name})
        for layout in ("list", "nested", "padded"):
            rows = plane.client.kv_batch_get([name], "rows", layout=layout)
            assert rows.fields["o"] == [value]
    plane.client.kv_drop_partition("rows")
