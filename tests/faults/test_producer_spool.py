"""Producers that die with puts on disk: what they were told is kept arrives, once, and no more."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dataplane.client.put import put_block
from dataplane.codec.tags import pack_tags
from dataplane.errors import InvalidRequest, StaleWrite
from dataplane.gateway.config import GatewayConfig
from dataplane.producer import Producer, Rejected
from dataplane.producer.puts import put_of_rows
from dataplane.producer.spool import Spool
from dataplane.types import Revision
from dataplane.wire.messages import RETRY
from tests.dataplane.producer.serving import Serving
from tests.faults.planes import Plane

pytestmark = pytest.mark.faults

PUTS = """
import sys
from dataplane.producer import Producer
address, partition, spool = sys.argv[1:]
producer = Producer(address, spool=spool, spool_after_s=0.2)
print("open", flush=True)
i = 0
while True:
    meta = producer.kv_put(f"k{i:05d}", partition, {"x": bytes(500)}, {"n": i}, if_absent=True)
    print("spooled" if meta.revision is None else "written", flush=True)
    i += 1
"""

SENDS_ON = """
import sys
from dataplane.producer import Producer
address, spool = sys.argv[1:]
producer = Producer(address, spool=spool)
print(producer.spooled, flush=True)
producer.flush(timeout=60)
print("done", flush=True)
"""


class Child:
    """A producer in a process that may be killed."""

    def __init__(self, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        """What it says next; "" if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> list[str]:
        """Kill it; what else it had said."""
        self.process.send_signal(signal.SIGKILL)
        said, _ = self.process.communicate(timeout=20)
        return said.split()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(program: str, *arguments: object) -> Child:
        made.append(Child(program, *arguments))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.kill()
        if one.process.stdout is not None:
            one.process.stdout.close()


@pytest.fixture
def config(roots: dict[str, Path]) -> GatewayConfig:
    return GatewayConfig(listen=(f"unix:{roots['runtime_dir']}/spool.sock",), drain_s=0.0)


def address_of(config: GatewayConfig) -> str:
    return f"grpc+unix://{config.listen[0].removeprefix('unix:')}"


def test_a_producer_that_is_killed_loses_nothing_of_what_it_was_told_is_kept(
    plane: Plane,
    config: GatewayConfig,
    partition: str,
    tmp_path: Path,
    child: Callable[..., Child],
) -> None:
    spool, address = tmp_path / "spool", address_of(config)
    first = child(PUTS, address, partition, spool)
    assert first.line() == "open"
    with pytest.raises(InvalidRequest, match=f"in use by process {first.process.pid}"):
        Spool(spool, max_bytes=1 << 30)
    acknowledged = 0
    while acknowledged < 300:
        assert first.line() == "spooled"
        acknowledged += 1
    acknowledged += len(first.kill())

    with Serving(plane, config):
        # The next one dies while it sends them on.
        second = child(SENDS_ON, address, spool)
        waiting = int(second.line())
        assert acknowledged <= waiting <= acknowledged + 1
        while plane.client.status()["partitions"].get(partition, {}).get("keys", 0) < 20:
            assert second.process.poll() is None
        assert "done" not in second.kill()

        third = child(SENDS_ON, address, spool)
        left = int(third.line())
        assert third.line() == "done"
        third.process.wait(20)
    # Each has arrived, once: a second try would have met the first, and would be set aside.
    assert left < waiting
    listing = plane.client.kv_list(partition)
    assert sorted(listing.keys) == [f"k{i:05d}" for i in range(waiting)]
    assert not (spool / "rejected").exists()
    assert not list(spool.glob("*.spool"))


def left_behind(spool: Path, plane: Plane, number: int, seen: Revision, partition: str) -> None:
    """A put of key `a` that a dead producer had sent, and of which it had no answer."""
    put = put_of_rows(
        ["a"], partition, None, [{"n": 1}], attempt=None, must_exist=False, if_absent=True,
        return_tags=False,
    )  # fmt: skip
    put.message.request.seen.epoch, put.message.request.seen.n = seen
    it = Spool(spool, max_bytes=1 << 20)
    it.join(plane.joined.plane_id)
    it.set_aside(number)
    it.append(put, number, sent=True)
    it.close()


@pytest.mark.parametrize("applied", [True, False], ids=["it had arrived", "it had not"])
def test_what_was_cleared_meanwhile_does_not_come_back(
    plane: Plane, config: GatewayConfig, partition: str, tmp_path: Path, applied: bool
) -> None:
    """A key is there, and cleared, while a put of it is on its way for a long time."""
    spool, told = tmp_path / "spool", list[Rejected]()
    with Serving(plane, config) as serving:
        with Producer(serving.address, spool=spool) as producer:
            if applied:
                seen = producer.kv_put("a", partition, tags={"n": 1}, if_absent=True).revision
            else:
                seen = plane.client.kv_put("a", partition, tags={"n": 0}).revision
            assert seen is not None
        left_behind(spool, plane, 1 if applied else 2, seen, partition)
        plane.client.kv_clear(["a"], partition)
        with Producer(serving.address, spool=spool, on_rejected=told.append) as producer:
            producer.flush(timeout=30)
            assert producer.spooled == 0
        assert plane.client.kv_list(partition).keys == []
    assert [type(one.error).__name__ for one in told] == ([] if applied else ["StaleWrite"])


@pytest.mark.parametrize("applied", [True, False], ids=["it had arrived", "it had not"])
def test_a_put_older_than_the_history_of_the_plane_is_settled_all_the_same(
    own_plane: Callable[..., Plane], config: GatewayConfig, tmp_path: Path, applied: bool
) -> None:
    """Nobody can tell any more what was cleared since it was first asked for; what became of it,
    the plane can. One that had arrived, and was cleared, does not come back."""
    plane = own_plane(history_changes=5)
    spool, told = tmp_path / "spool", list[Rejected]()
    with Serving(plane, config) as serving:
        with Producer(serving.address, spool=spool) as producer:
            if applied:
                seen = producer.kv_put("a", "p", tags={"n": 1}, if_absent=True).revision
            else:
                seen = producer.kv_put("other", "p", tags={}).revision
            assert seen is not None
        plane.client.kv_clear(["a"], "p")
        for i in range(20):
            plane.client.kv_put(f"k{i}", "p", tags={})
        with pytest.raises(StaleWrite, match="before what history still covers"):
            judged_from(plane, seen)
        left_behind(spool, plane, 1 if applied else 2, seen, "p")
        with Producer(serving.address, spool=spool, on_rejected=told.append) as producer:
            producer.flush(timeout=30)
    assert told == []
    assert ("a" in plane.client.kv_list("p").keys) is not applied


def judged_from(plane: Plane, seen: Revision) -> None:
    """A repetition of a put that nobody remembers, judged from this revision."""
    with closing(plane.another()) as client:
        client._core.seen = seen
        client.run(
            lambda core, deadline: put_block(
                core, ["b"], "p", None, pack_tags({}), [{}], RETRY, deadline, None
            )
        )


def test_a_gateway_that_dies_under_a_put_has_it_once(
    plane: Plane, config: GatewayConfig, partition: str, tmp_path: Path
) -> None:
    """Gateways come and go while puts are made; each put is in the plane exactly once."""
    with Producer(address_of(config), spool=tmp_path / "spool", spool_after_s=0.2) as producer:
        written = 0
        for _ in range(4):
            with Serving(plane, config):
                for _ in range(10):
                    producer.kv_put(f"k{written}", partition, tags={}, if_absent=True)
                    written += 1
            producer.kv_put(f"k{written}", partition, tags={}, if_absent=True)
            written += 1
        assert producer.spooled
        with Serving(plane, config):
            producer.flush(timeout=30)
        assert producer.rejected == 0
    assert len(plane.client.kv_list(partition)) == written
