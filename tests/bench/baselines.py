"""Yardsticks beside the peer: Redis, a plain Ray actor, and a bare copy of the same bytes."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from tests.bench.data import Batch, Columns, Row, Tags
from tests.bench.subjects import Subject, join_ray

_DTYPES = {"input_ids": np.int64, "labels": np.int64}


def _dtype(field: str) -> Any:
    """The dtype of a field: Redis and the actor keep bytes, so the reader has to know."""
    return _DTYPES.get(field, np.float32)


class Redis(Subject):
    """Redis on a unix socket: a hash of raw bytes per row, one hash of packed tags a partition."""

    name = "redis"

    def start(self, address: str) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-redis-"))
        path = self._folder / "socket"
        self._server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "",
             "--appendonly", "no", "--dir", str(self._folder), "--daemonize", "no"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.join(str(path))
        return str(path)

    def join(self, address: str) -> None:
        import redis
        from redis.backoff import ConstantBackoff
        from redis.retry import Retry

        self.db = redis.Redis(
            unix_socket_path=address,
            retry=Retry(ConstantBackoff(0.1), 100),
            retry_on_error=[redis.exceptions.ConnectionError],
        )
        self.db.ping()

    def close(self, *, destroy: bool) -> None:
        self.db.close()
        if destroy:
            self._server.terminate()
            self._server.wait()
            shutil.rmtree(self._folder)

    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        pipe = self.db.pipeline(transaction=False)
        rows = {name: column.rows() for name, column in batch.columns.items()}
        for i, key in enumerate(keys):
            pipe.hset(
                f"{partition}/{key}",
                mapping={name: memoryview(r[i].numpy()).cast("B") for name, r in rows.items()},
            )
        if batch.tags is not None:
            self._set_tags(pipe, keys, partition, batch.tags)
        pipe.execute()

    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        pipe = self.db.pipeline(transaction=False)
        pipe.hset(
            f"{partition}/{key}",
            mapping={name: memoryview(v.numpy()).cast("B") for name, v in row.items()},
        )
        self._set_tags(pipe, [key], partition, [tags])
        pipe.execute()

    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        self._set_tags(self.db, keys, partition, tags)

    def _set_tags(self, db: Any, keys: list[str], partition: str, tags: list[Tags]) -> None:
        packed = {key: msgpack.packb(tag) for key, tag in zip(keys, tags, strict=True)}
        db.hset(f"{partition}#tags", mapping=packed)

    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        pipe = self.db.pipeline(transaction=False)
        for key in keys:
            pipe.hmget(f"{partition}/{key}", list(fields))
        return _join_columns(list(zip(*pipe.execute(), strict=True)), fields)

    def read(self, got: Any, field: str) -> Columns:
        return got[field]

    def list(self, partition: str) -> Any:
        packed = self.db.hgetall(f"{partition}#tags")
        return {key.decode(): msgpack.unpackb(tag) for key, tag in packed.items()}

    def listed(self, listing: Any) -> dict[str, Tags]:
        return listing

    def clear(self, keys: list[str], partition: str) -> None:
        for at in range(0, len(keys), 10_000):
            some = keys[at : at + 10_000]
            pipe = self.db.pipeline(transaction=False)
            pipe.unlink(*[f"{partition}/{key}" for key in some])
            pipe.hdel(f"{partition}#tags", *some)
            pipe.execute()


class RayActor(Subject):
    """The simplest thing on Ray: one actor with a dict, called with arrays."""

    name = "ray_actor"
    needs_ray = True

    def start(self, address: str) -> str:
        import ray

        join_ray(address)
        actor_class: Any = ray.remote(num_cpus=0)(_Rows)
        self.actor = actor_class.options(
            name="bench-actor", namespace="bench", lifetime="detached"
        ).remote()
        self.ray: Any = ray
        return address

    def join(self, address: str) -> None:
        import ray

        join_ray(address)
        self.ray = ray
        self.actor = ray.get_actor("bench-actor", namespace="bench")

    def close(self, *, destroy: bool) -> None:
        if destroy:
            self.ray.kill(self.actor)

    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        fields = {
            name: (column.values.numpy(), column.lengths.numpy())
            for name, column in batch.columns.items()
        }
        self.ray.get(self.actor.put.remote(keys, partition, fields, batch.tags))

    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        fields = {name: (v.numpy(), np.array([v.numel()])) for name, v in row.items()}
        self.ray.get(self.actor.put.remote([key], partition, fields, [tags]))

    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        self.ray.get(self.actor.put.remote(keys, partition, {}, tags))

    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        got = self.ray.get(self.actor.get.remote(keys, partition, list(fields)))
        # Ray's arrays are read-only views of its object store; a trainer needs its own memory.
        return {
            name: Columns(torch.from_numpy(values.copy()), torch.from_numpy(lengths.copy()))
            for name, (values, lengths) in got.items()
        }

    def read(self, got: Any, field: str) -> Columns:
        return got[field]

    def list(self, partition: str) -> Any:
        return self.ray.get(self.actor.list.remote(partition))

    def listed(self, listing: Any) -> dict[str, Tags]:
        return listing

    def clear(self, keys: list[str], partition: str) -> None:
        self.ray.get(self.actor.clear.remote(keys, partition))


class _Rows:
    """The actor: rows and tags in dicts."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        self.tags: dict[str, dict[str, Tags]] = {}

    def put(self, keys: list[str], partition: str, fields: Any, tags: list[Tags] | None) -> None:
        rows = self.rows.setdefault(partition, {})
        for name, (values, lengths) in fields.items():
            # Copied out of Ray's object store, which would otherwise keep the whole argument.
            parts = np.split(values.copy(), np.cumsum(lengths)[:-1])
            for key, part in zip(keys, parts, strict=True):
                rows.setdefault(key, {})[name] = part
        kept = self.tags.setdefault(partition, {})
        for key, tag in zip(keys, tags or [{}] * len(keys), strict=True):
            kept.setdefault(key, {}).update(tag)

    def get(self, keys: list[str], partition: str, fields: list[str]) -> Any:
        rows = self.rows[partition]
        return {
            name: (
                np.concatenate([rows[key][name] for key in keys]),
                np.array([rows[key][name].size for key in keys]),
            )
            for name in fields
        }

    def list(self, partition: str) -> dict[str, Tags]:
        return self.tags.get(partition, {})

    def clear(self, keys: list[str], partition: str) -> None:
        for kept in (self.rows.get(partition, {}), self.tags.get(partition, {})):
            for key in keys:
                kept.pop(key, None)


class Memcpy(Subject):
    """Not a system: one thread copies the same bytes into, and out of, warm shared memory."""

    name = "memcpy"

    def start(self, address: str) -> str:
        self._map: mmap.mmap | None = None
        self._spans: dict[str, tuple[np.ndarray[Any, Any], torch.Tensor]] = {}
        return ""

    def join(self, address: str) -> None:
        raise RuntimeError("memcpy has one process")

    def close(self, *, destroy: bool) -> None:
        self._spans.clear()

    def put(self, batch: Batch, keys: list[str], partition: str) -> None:
        if self._map is None or len(self._map) < batch.nbytes:
            # The first round maps and touches the pages; rounds after it find them warm.
            self._map = mmap.mmap(-1, batch.nbytes, flags=mmap.MAP_SHARED)
        at = 0
        for name, column in batch.columns.items():
            source = column.values.numpy()
            span = np.frombuffer(self._map, source.dtype, source.size, at)
            np.copyto(span, source)
            self._spans[name] = (span, column.lengths)
            at += source.nbytes

    def get(self, keys: list[str], partition: str, fields: Sequence[str]) -> Any:
        if not hasattr(self, "_out"):
            self._out = {name: np.empty_like(self._spans[name][0]) for name in fields}
        for name in fields:
            np.copyto(self._out[name], self._spans[name][0])
        return {
            name: Columns(torch.from_numpy(self._out[name]), self._spans[name][1])
            for name in fields
        }

    def read(self, got: Any, field: str) -> Columns:
        return got[field]

    def clear(self, keys: list[str], partition: str) -> None:
        """Keeps the mapping: it is warm memory that is measured."""

    def put_row(self, key: str, partition: str, row: Row, tags: Tags) -> None:
        raise NotImplementedError

    def put_tags(self, keys: list[str], partition: str, tags: list[Tags]) -> None:
        raise NotImplementedError

    def list(self, partition: str) -> Any:
        raise NotImplementedError

    def listed(self, listing: Any) -> dict[str, Tags]:
        raise NotImplementedError


def _join_columns(cells: list[tuple[bytes, ...]], fields: Sequence[str]) -> dict[str, Columns]:
    """Rows of bytes as columns: [field][row] -> one tensor a field."""
    columns: dict[str, Columns] = {}
    for name, rows in zip(fields, cells, strict=True):
        dtype = np.dtype(_dtype(name))
        lengths = torch.tensor([len(row) // dtype.itemsize for row in rows])
        values = torch.from_numpy(np.frombuffer(bytearray().join(rows), dtype))
        columns[name] = Columns(values, lengths)
    return columns
