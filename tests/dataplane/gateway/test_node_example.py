"""The Node.js example, run as its readers run it: against a server that fails it, and a gateway."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import pytest
import trustme

from dataplane.errors import DataplaneError, PermissionDenied, RateLimited, Unreachable
from dataplane.protocol.status import code_of, trailers_of
from dataplane.protocol.values import from_value, tags_to
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.dataplane.gateway.gateways import Serve
from tests.dataplane.gateway.guarded import add_token
from tests.dataplane.gateway.nodejs import EXAMPLE, node_command
from tests.faults.planes import Plane
from trainer.trajectory import Trajectory

RUN_S = 60.0
TOKEN = "dpt_this_is_secret"


class Ran(NamedTuple):
    """A run of the example."""

    code: int | None
    out: str
    err: str


class Tls(NamedTuple):
    """An authority, and a certificate of it for this machine, in files."""

    ca: Path
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    files = Tls(folder / "ca.pem", folder / "tls.crt", folder / "tls.key")
    files.key.touch(0o600)
    authority.cert_pem.write_to_path(str(files.ca))
    files.cert.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(files.key))
    return files


async def run_example(address: str, *arguments: str, token_file: Path | None = None) -> Ran:
    """What came of it."""
    secret = {"DATAPLANE_TOKEN": TOKEN}
    if token_file is not None:
        secret = {"DATAPLANE_TOKEN_FILE": str(token_file)}
    process = await asyncio.create_subprocess_exec(
        node_command(), str(EXAMPLE / "example.mjs"), "--address", address, *arguments,
        env={"PATH": os.environ["PATH"], **secret},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ran(process.returncode, out.decode(), err.decode())


# -- a server that does what a test says ----------------------------------------------------------


class Scripted(dataplane_pb2_grpc.DataPlaneServiceServicer):
    """Answers what the example asks, and notes it; fails as often as it is told to."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Any]] = defaultdict(list)
        self.tokens: set[str] = set()
        self.failures: dict[str, list[DataplaneError]] = {}
        self.hanging: set[str] = set()
        self.results = [pb.TrajectoryResult(key="u_0_0")]

    async def _note(self, name: str, request: Any, context: Any) -> None:
        self.asked[name].append(request)
        metadata = dict(context.invocation_metadata())
        self.tokens.add(metadata.get("authorization", ""))
        if name in self.hanging:
            assert context.time_remaining() is not None
            await asyncio.Event().wait()
        if self.failures.get(name):
            error = self.failures[name].pop(0)
            await context.abort(code_of(error), error.message, trailers_of(error))

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:
        await self._note("Describe", request, context)
        return pb.DescribeResponse(
            plane_id="p1", principal="team", revision=pb.Revision(epoch=1, n=7)
        )

    async def BeginGroup(self, request: Any, context: Any) -> pb.BeginGroupResponse:
        await self._note("BeginGroup", request, context)
        return pb.BeginGroupResponse(attempt=(1 << 60) + len(self.asked["BeginGroup"]))

    async def PutTrajectories(self, request: Any, context: Any) -> pb.PutTrajectoriesResponse:
        await self._note("PutTrajectories", request, context)
        return pb.PutTrajectoriesResponse(revision=pb.Revision(epoch=1, n=9), results=self.results)

    async def EndGroup(self, request: Any, context: Any) -> pb.EndGroupResponse:
        await self._note("EndGroup", request, context)
        return pb.EndGroupResponse(revision=pb.Revision(epoch=1, n=8))

    async def List(self, request: Any, context: Any) -> pb.ListResponse:
        await self._note("List", request, context)
        number = int(request.page_token or 0)
        tags = tags_to({"status": "completed", "seq_len": 5 + number, "score": 0.5})
        return pb.ListResponse(
            rows=[pb.Row(key=f"k{number}", tags=tags)],
            next_page_token=str(number + 1) if number < 2 else "",
        )


@asynccontextmanager
async def scripted(tls: Tls) -> AsyncIterator[tuple[Scripted, str]]:
    """Such a server, and its address."""
    service = Scripted()
    server = grpc.aio.server()
    dataplane_pb2_grpc.add_DataPlaneServiceServicer_to_server(service, server)
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        yield service, f"grpcs://127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_it_says_what_it_made_of_every_page(tls: Tls) -> None:
    async with scripted(tls) as (service, address):
        ran = await run_example(address, "--ca", str(tls.ca), "--groups", "1", "--partition", "p")
    assert ran == Ran(
        0,
        "plane p1, as team\n"
        "k0  completed  5 tokens  score 0.5\n"
        "k1  completed  6 tokens  score 0.5\n"
        "k2  completed  7 tokens  score 0.5\n"
        "3 trajectories of 1 groups\n",
        "",
    )
    assert service.tokens == {f"Bearer {TOKEN}"}
    (put,) = service.asked["PutTrajectories"]
    assert (put.partition_id, put.attempt, len(put.trajectories)) == ("p", (1 << 60) + 1, 4)
    where = from_value(service.asked["List"][0].where)
    assert where == {"uid": {"in": [put.trajectories[0].uid]}, "session_id": {"exists": True}}


async def test_what_may_have_happened_is_asked_again_under_its_number(tls: Tls) -> None:
    async with scripted(tls) as (service, address):
        service.failures = {
            "BeginGroup": [Unreachable("away"), Unreachable("away")],
            "PutTrajectories": [RateLimited("slowly", retry_after_s=0.01, limit="bytes")],
            "List": [RateLimited("slowly", retry_after_s=0.0, limit="calls")],
        }
        ran = await run_example(address, "--ca", str(tls.ca), "--groups", "1")
    assert (ran.code, ran.err) == (0, "")
    begins = [one.request for one in service.asked["BeginGroup"]]
    puts = [one.request for one in service.asked["PutTrajectories"]]
    (end,) = [one.request for one in service.asked["EndGroup"]]
    assert [(one.number, one.settled, one.retry) for one in [*begins, *puts, end]] == [
        (1, 0, False), (1, 0, True), (1, 0, True),
        (2, 1, False), (2, 1, False),  # what was refused for its rate did not arrive
        (3, 2, False),
    ]  # fmt: skip
    assert len({one.client_id for one in [*begins, *puts, end]}) == 1
    assert {one.plane_id for one in begins} == {"p1"}
    assert [(one.seen.epoch, one.seen.n) for one in begins] == [(1, 7)] * 3
    assert (end.seen.epoch, end.seen.n) == (1, 9)
    assert len(service.asked["List"]) == 4


async def test_an_error_that_will_not_pass_ends_it(tls: Tls) -> None:
    async with scripted(tls) as (service, address):
        service.failures = {"PutTrajectories": [PermissionDenied("not here: ü")]}
        ran = await run_example(address, "--ca", str(tls.ca))
    assert (ran.code, ran.err) == (1, "PermissionDenied: not here: ü\n")
    assert len(service.asked["PutTrajectories"]) == 1
    assert not service.asked["EndGroup"]


async def test_what_was_refused_is_told(tls: Tls) -> None:
    async with scripted(tls) as (service, address):
        service.results = [pb.TrajectoryResult(key="k", quarantine="quarantine.p", reason="bad")]
        ran = await run_example(address, "--ca", str(tls.ca), "--groups", "1")
    assert (ran.code, ran.err) == (0, "k was refused (quarantine.p): bad\n")


async def test_a_server_that_does_not_answer_is_left_at_the_deadline(tls: Tls) -> None:
    async with scripted(tls) as (service, address):
        service.hanging = {"Describe"}
        ran = await run_example(address, "--ca", str(tls.ca), "--budget-ms", "1500")
    assert ran.code == 1
    assert ran.err.startswith("DEADLINE_EXCEEDED: ")
    assert service.asked["Describe"]


async def test_a_server_of_another_authority_is_not_told_the_token(
    tls: Tls, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    async with scripted(tls) as (service, address):
        ran = await run_example(address, "--ca", str(other), "--budget-ms", "1500")
    assert ran.code == 1
    assert "certificate" in ran.err
    assert not service.tokens
    assert TOKEN not in ran.err + ran.out


@contextmanager
def nobody() -> Iterator[int]:
    """A port of this machine on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_where_nobody_listens_it_gives_up_in_time(tls: Tls) -> None:
    with nobody() as port:
        ran = await run_example(f"grpcs://127.0.0.1:{port}", "--budget-ms", "1500")
    assert ran.code == 1
    assert ran.err.startswith("UNAVAILABLE: the connection broke (")
    assert "ECONNREFUSED" in ran.err


@pytest.mark.parametrize(
    ("closes", "said"),
    [(False, "DEADLINE_EXCEEDED: no answer after"), (True, "UNAVAILABLE: ")],
    ids=["silent", "closes"],
)
async def test_what_is_no_server_of_grpc_is_left_too(closes: bool, said: str) -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not closes and await reader.read(4096):
            pass  # it listens, and says nothing
        writer.close()

    async with await asyncio.start_server(meet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        ran = await run_example(f"grpc://127.0.0.1:{port}", "--budget-ms", "1500")
    assert ran.code == 1
    assert ran.err.startswith(said)


async def test_a_token_is_not_sent_in_plain_text() -> None:
    ran = await run_example("grpc://gateway.example:50051")
    assert ran.code == 1
    assert "a token is not sent in plain text" in ran.err
    assert TOKEN not in ran.err


# -- a gateway ------------------------------------------------------------------------------------


async def test_its_trajectories_are_rows_of_the_plane(
    serve: Serve, plane: Plane, tls: Tls, tmp_path: Path, partition: str
) -> None:
    token = add_token(tmp_path / "tokens.json", "team", "producer", partition=partition)
    (tmp_path / "token").write_text(token.text + "\n")
    server = await serve(
        listen=("127.0.0.1:0",), tls_cert=tls.cert, tls_key=tls.key,
        token_file=tmp_path / "tokens.json", vocab_size=12,
    )  # fmt: skip
    (address,) = server.addresses
    arguments = ("--ca", str(tls.ca), "--partition", partition, "--sessions", "3", "--step", "4")
    ran = await run_example(address, *arguments, token_file=tmp_path / "token")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"plane {plane.joined.plane_id}, as team"
    assert lines[-1] == "6 trajectories of 2 groups"

    def look() -> tuple[Any, Any, Any]:
        client = plane.client
        groups = client.kv_wait(
            partition, {"status": "completed"}, count=2, group_by="uid", timeout=20
        )
        rows = client.kv_batch_get(groups.keys, partition, layout="list", timeout=20)
        prompts = client.kv_list(partition, where={"is_prompt": True}, timeout=20)
        return groups, rows, prompts

    groups, rows, prompts = await asyncio.to_thread(look)
    assert sorted(line.partition(" ")[0] for line in lines[1:-1]) == sorted(groups.keys)
    assert [tags["status"] for tags in prompts.tags] == ["finished"] * 2
    for i, (key, tags) in enumerate(zip(groups.keys, groups.tags, strict=True)):
        read = Trajectory.of(key, tags)
        assert (read.prompt_len, read.policy_len) == (3, read.response_len)
        assert read.score == (0.0 if read.session_id == 2 else 1.0)
        assert read.policy_spans == ((4, read.response_len),)
        assert (tags["producer"], tags["global_steps"]) == ("node", 4)
        fields = {name: column[i] for name, column in rows.fields.items()}
        ids, labels = fields["input_ids"].tolist(), fields["labels"].tolist()
        a, b = ids[0], ids[2]
        answer = int("".join(map(str, ids[3:-1])))
        assert answer == a + b + (read.session_id == 2)
        assert labels == [-100] * 3 + ids[3:]
        half = np.float32(np.log(0.5))
        assert fields["logprobs"].tolist() == [0, 0, 0] + [half] * read.response_len
        assert fields["response_model_steps"].tolist() == [4] * read.response_len
        assert fields["messages"][0] == {"role": "user", "content": f"{a}+{b}"}
        assert fields["reward"] == {"score": read.score}


async def test_a_wrong_token_says_nothing_but_that(serve: Serve, tls: Tls, tmp_path: Path) -> None:
    add_token(tmp_path / "tokens.json", "team", "producer")
    server = await serve(
        listen=("127.0.0.1:0",), tls_cert=tls.cert, tls_key=tls.key,
        token_file=tmp_path / "tokens.json",
    )  # fmt: skip
    ran = await run_example(server.addresses[0], "--ca", str(tls.ca))
    assert ran.code == 1
    assert ran.err.startswith(("Unauthenticated: ", "UNAUTHENTICATED: "))
    assert TOKEN not in ran.err
