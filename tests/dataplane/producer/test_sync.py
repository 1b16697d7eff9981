"""The blocking producer: from threads, across a fork, and at the end of its process."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import AlreadyWritten, InvalidRequest, PlaneLost
from dataplane.gateway.config import GatewayConfig
from dataplane.producer import AsyncProducer, Producer, Rejected, Trajectory
from tests.dataplane.producer.serving import Serving
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def address(plane: Plane, roots: dict[str, Path]) -> Iterator[str]:
    """A gateway that serves in a thread, for blocking callers."""
    config = GatewayConfig(listen=(f"unix:{roots['runtime_dir']}/sync.sock",), drain_s=0.0)
    with Serving(plane, config) as serving:
        yield serving.address


@pytest.fixture
def producer(address: str) -> Iterator[Producer]:
    with Producer(address) as it:
        yield it


def trajectory(uid: str, session_id: int = 0) -> Trajectory:
    return Trajectory.from_response(uid, [1], [2], [-0.5], session_id=session_id)


def test_both_producers_have_the_same_verbs_and_arguments() -> None:
    for name, verb in inspect.getmembers(AsyncProducer, inspect.isfunction):
        if name.startswith(("_", "close_")):
            continue
        of = inspect.signature(verb).parameters
        own = inspect.signature(getattr(Producer, name)).parameters
        assert list(own.values()) == list(of.values()), name


def test_its_options_are_those_of_the_other() -> None:
    from dataplane.producer.sync import Options

    arguments = list(inspect.signature(AsyncProducer).parameters)
    assert arguments == ["address", *Options.__annotations__]


def test_threads_share_one_producer(producer: Producer, partition: str) -> None:
    def put(i: int) -> None:
        producer.kv_put(f"k{i}", partition, tags={"n": i})

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(producer.kv_list(partition).keys) == [f"k{i}" for i in range(8)]


def test_a_group_a_claim_and_what_was_submitted(producer: Producer, partition: str) -> None:
    with producer.group("u", partition, n=2, declared_bytes=1 << 20) as attempt:
        told = [
            producer.submit(trajectory("u", i), partition, attempt=attempt, if_absent=True)
            for i in range(2)
        ]
        again = producer.submit(trajectory("u"), partition, attempt=attempt, if_absent=True)
        producer.flush()
        assert all(one.result(20).accepted for one in told)
        with pytest.raises(AlreadyWritten):
            again.result(20)
    claim = producer.kv_claim(partition, "train", count=1, groups=True)
    assert sorted(claim.keys) == ["u_0_0", "u_1_0"]
    producer.kv_release(claim)
    changes = producer.kv_watch(partition, since=producer.kv_put("x", partition, tags={}).revision)
    producer.kv_put("y", partition, tags={})
    assert next(changes).rows.keys == ["y"]


def test_a_producer_that_was_closed_says_so(address: str, partition: str) -> None:
    producer = Producer(address)
    producer.kv_put("a", partition, tags={})
    producer.close()
    producer.close()
    with pytest.raises(PlaneLost, match="closed"):
        producer.kv_put("a", partition, tags={})
    assert threads() == 1, "all producers of a process share one"


def threads() -> int:
    """Those that call gateways."""
    return sum(thread.name == "dataplane-gateway-calls" for thread in threading.enumerate())


def test_a_producer_that_nobody_has_any_more_is_closed(address: str, partition: str) -> None:
    def use() -> AsyncProducer:
        producer = Producer(address)
        producer.kv_put("a", partition, tags={})
        return producer._lived.producer

    assert use()._closed
    assert threads() == 1


def test_a_process_ends_without_a_word_however_many_it_had(address: str, partition: str) -> None:
    """gRPC complains, from threads of its own, where several loops of a process come and go."""
    code = (
        "from dataplane.producer import Producer\n"
        f"many = [Producer({address!r}) for _ in range(6)]\n"
        f"nobody = Producer('grpc+unix:///nobody.sock', timeout=0.3)\n"
        "try: nobody.kv_list('p')\n"
        "except OSError: pass\n"
        f"for n, each in enumerate(many): each.kv_put(str(n), {partition!r}, tags={{}})\n"
        "many.pop().close()\n"
        "del many[:2]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")


FORK = """
import os, sys
from dataplane.errors import InvalidRequest
from dataplane.producer import Producer
address, partition, spool, used = sys.argv[1:]
producer = Producer(address, spool=spool)
if used:
    producer.kv_put("parent", partition, tags={}, if_absent=True)
before = producer.client_id
child = os.fork()
if not child:
    assert producer.client_id != before
    try:
        producer.kv_put("child", partition, tags={}, if_absent=True, timeout=20)
        assert not used
    except InvalidRequest as error:
        assert used and "forked" in str(error), error
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
producer.kv_put("parent again", partition, tags={}, if_absent=True)
assert producer.client_id == before
# It is not closed: the end of the process does that.
"""


@pytest.mark.parametrize(
    ("used", "written"),
    [("", ["child", "parent again"]), ("used", ["parent", "parent again"])],
    ids=["before the first call", "after it"],
)
def test_a_forked_child_is_a_new_producer(
    producer: Producer, address: str, partition: str, tmp_path: Path, used: str, written: list[str]
) -> None:
    """And where gRPC cannot work in it, it says so at once."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, address, partition, str(tmp_path / "spool"), used],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(producer.kv_list(partition).keys) == written


AT_EXIT = """
import sys
from dataplane.producer import BatchPolicy, Producer, Trajectory
address, partition = sys.argv[1:]
producer = Producer(address, batch=BatchPolicy(max_delay_s=60.0))
for i in range(3):
    producer.submit(Trajectory.from_response("u", [1], [2], session_id=i), partition)
"""


def test_what_was_submitted_is_sent_at_the_end_of_the_process(
    producer: Producer, address: str, partition: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, address, partition],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(producer.kv_list(partition)) == 3


def test_a_callback_that_waits_for_a_verb_of_its_own_is_told_so(
    address: str, partition: str, tmp_path: Path
) -> None:
    """It would wait for itself."""
    told: list[Exception] = []

    def again(rejected: Rejected) -> None:
        try:
            producer.kv_put("b", partition, tags={})
        except InvalidRequest as error:
            told.append(error)

    with Producer(
        f"{address}.late", spool=tmp_path / "spool", spool_after_s=0.1, on_rejected=again
    ) as away:
        away.kv_put("a", partition, tags={}, if_absent=True)
    with Producer(address) as other:
        other.kv_put("a", partition, tags={})
    with Producer(address, spool=tmp_path / "spool", on_rejected=again) as producer:
        producer.flush(timeout=20)
        assert producer.rejected == 1
    assert "callback" in str(told[0])
