"""`python -m tests.bench.gateway`: what one producer outside gets through a gateway.

Bytes: large puts through the gateway into a plane, against the same messages streamed to a plain
gRPC server that looks at none of them; alternating, in the same run. Rows: small trajectories, one
by one, gathered by the producer. Each server is a process of its own; all of them speak TCP on this
machine, without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

import dataplane
from dataplane.producer.aio import AsyncProducer
from dataplane.producer.trajectory import Trajectory
from dataplane.protocol.cells import Cells, cells_of
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.bench.report import spread

MiB = 1 << 20
START_S = 60.0
REQUIRED_SHARE = 0.6
REQUIRED_PER_S = 1000.0
OPTIONS = [
    ("grpc.max_receive_message_length", 16 * MiB),
    ("grpc.max_send_message_length", 16 * MiB),
]


class Plain(dataplane_pb2_grpc.DataPlaneServiceServicer):
    """Takes every message of a put, and does nothing with it."""

    async def PutRows(self, parts: AsyncIterator[pb.PutRowsRequest], _: Any) -> pb.PutRowsResponse:
        async for _part in parts:
            pass
        return pb.PutRowsResponse()


async def serve_plain() -> None:
    """The plain server, until it is killed; it prints its port."""
    server = grpc.aio.server(options=OPTIONS)
    dataplane_pb2_grpc.add_DataPlaneServiceServicer_to_server(Plain(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A server in a process of its own; the line that it prints first."""
    child = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
    finally:
        child.terminate()
        child.wait(30)


def batch(rows: int, tokens: int) -> tuple[list[str], dict[str, Any]]:
    """Rows as trainers read them: ids, labels, log-probabilities."""
    keys = [f"k{i}" for i in range(rows)]
    chance = np.random.default_rng(0)
    ids = chance.integers(0, 150_000, (rows, tokens))
    return keys, {
        "input_ids": list(ids),
        "labels": list(np.where(ids % 4 == 0, -100, ids)),
        "logprobs": list(-chance.random((rows, tokens), np.float32)),
    }


def check(client: dataplane.Client, rows: int, tokens: int) -> None:
    """The plane holds what was put, bit for bit."""
    keys, fields = batch(rows, tokens)
    found = client.kv_batch_get(keys, "bytes", list(fields), layout="list")
    for name, values in fields.items():
        for one, other in zip(values, found[name], strict=True):
            assert np.array_equal(one, other.numpy()), name


async def stream_plain(stub: Any, cells: Cells, chunk: int) -> None:
    """The messages of a put, to whoever takes them."""

    def parts() -> Iterator[pb.PutRowsRequest]:
        yield pb.PutRowsRequest(
            header=pb.PutRowsHeader(
                columns=cells.shape.to_columns(), total_bytes=cells.shape.nbytes
            )
        )
        for offset, data in cells.chunks(chunk):
            yield pb.PutRowsRequest(chunk=pb.Chunk(offset=offset, data=data))

    await stub.PutRows(parts())


async def bytes_per_s(
    gateway: str, plain: str, rounds: int, rows: int, tokens: int
) -> dict[str, list[float]]:
    """Bytes per second of each round, through the gateway and to the plain server."""
    keys, fields = batch(rows, tokens)
    found: dict[str, list[float]] = {"gateway": [], "plain": []}
    async with (
        AsyncProducer(gateway) as producer,
        grpc.aio.insecure_channel(plain, options=OPTIONS) as channel,
    ):
        stub: Any = dataplane_pb2_grpc.DataPlaneServiceStub(channel)
        nbytes = cells_of(keys, fields).shape.nbytes
        for number in range(rounds + 1):
            began = time.perf_counter()
            await stream_plain(stub, cells_of(keys, fields), MiB)
            middle = time.perf_counter()
            await producer.kv_batch_put(keys, "bytes", fields)
            ended = time.perf_counter()
            if number:  # the first meets memory that nobody has touched
                found["plain"].append(nbytes / (middle - began))
                found["gateway"].append(nbytes / (ended - middle))
    return found


async def trajectories_per_s(gateway: str, rounds: int, count: int, tokens: int) -> list[float]:
    """Small trajectories per second, submitted one by one."""
    chance = np.random.default_rng(1)
    ids = chance.integers(0, 32_000, tokens).tolist()
    labels = [-100] * (tokens // 2) + ids[tokens // 2 :]
    logprobs = [0.0] * (tokens // 2) + [-0.5] * (tokens - tokens // 2)
    found: list[float] = []
    async with AsyncProducer(gateway) as producer:
        for number in range(rounds + 1):
            began = time.perf_counter()
            futures = [
                await producer.submit(
                    Trajectory(
                        uid=f"{number}-{i}",
                        input_ids=ids,
                        labels=labels,
                        logprobs=logprobs,
                        prompt_len=tokens // 2,
                        reward=1.0,
                        finish_reason="stop",
                        policy_spans=[(number, 0, tokens - tokens // 2)],
                    ),
                    "rows",
                    if_absent=True,
                )
                for i in range(count)
            ]
            await producer.flush()
            results = await asyncio.gather(*futures)
            took = time.perf_counter() - began
            assert all(result.accepted for result in results)
            if number:
                found.append(count / took)
            await producer.kv_clear(None, "rows", where={})
    return found


def line(what: str, unit: str, values: list[float], scale: float = 1.0) -> str:
    """A median and its spread."""
    median = statistics.median(values) * scale
    return f"{what:<34} {median:10,.0f} {unit:<6} spread {spread(values):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="once, small, and judge nothing")
    parser.add_argument("--serve-plain", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve_plain:
        asyncio.run(serve_plain())
        return 0
    rounds, rows, tokens, count = (1, 8, 1000, 100) if asked.smoke else (9, 64, 50_000, 4000)
    with tempfile.TemporaryDirectory(prefix="dpb-", dir="/tmp") as folder:
        settings = {"host": "embedded", "runtime_dir": folder, "capacity_bytes": 1 << 30}
        client = dataplane.init(settings, name="gateway-bench")
        address = str(Path(folder) / client.plane_id)
        try:
            with (
                process(
                    "dataplane.cli.main", "gateway", "--address", address,
                    "--listen", "127.0.0.1:0",
                ) as said,
                process("tests.bench.gateway", "--serve-plain") as port,
            ):  # fmt: skip
                gateway = said.split()[-1]
                sent = asyncio.run(bytes_per_s(gateway, f"127.0.0.1:{port}", rounds, rows, tokens))
                check(client, rows, tokens)
                small = asyncio.run(trajectories_per_s(gateway, rounds, count, 200))
        finally:
            client.close(destroy=True)
    shares = [ours / plain for ours, plain in zip(sent["gateway"], sent["plain"], strict=True)]
    print(line("a put through the gateway", "MB/s", sent["gateway"], 1e-6))
    print(line("the same messages, plain gRPC", "MB/s", sent["plain"], 1e-6))
    share = statistics.median(shares)
    print(f"{'share, round by round':<34} {share:10.2f}        at least {REQUIRED_SHARE}")
    print(line("trajectories of 200 tokens", "/s", small) + f", at least {REQUIRED_PER_S:,.0f}")
    Path("bench-gateway.json").write_text(json.dumps({"bytes_per_s": sent, "rows_per_s": small}))
    if asked.smoke:
        return 0
    return int(share < REQUIRED_SHARE or statistics.median(small) < REQUIRED_PER_S)


if __name__ == "__main__":
    sys.exit(main())
