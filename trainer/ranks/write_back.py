"""Columns of stages on their way back to the plane, beside the training."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dataplane import Client
from trainer.materialize import PackTensors
from trainer.ranks.copying import CopyLane
from trainer.ranks.waiting import PlaneTime


class WriteBack:
    """Puts of one batch, pack by pack, in a thread of their own."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        client: Client,
        partition_id: str,
        time: PlaneTime,
        lane: CopyLane | None = None,
    ) -> None:
        self._threads = threads
        self._client = client
        self._partition_id = partition_id
        self._time = time
        self._lane = lane
        self._puts: list[Future[None]] = []

    def put(self, pack: PackTensors, columns: Mapping[str, torch.Tensor]) -> None:
        """Begin to write columns under the keys of a pack's rows, which must exist. Leave the
        columns as they are. # name -> [1, L]"""
        if pack.keys:
            made = None
            if self._lane is not None:
                made = torch.cuda.Event()
                made.record()
            self._puts.append(self._threads.submit(self._put, pack, dict(columns), made))

    def wait(self) -> None:
        """Return once all of it is acknowledged. What the first put to fail raised, this does."""
        with self._time.wait():
            try:
                for put in self._puts:
                    put.result()
            finally:
                self.close()

    def close(self) -> None:
        """Begin no further put, and wait for the one under way."""
        for put in self._puts:
            if not put.cancel():
                put.exception()
        self._puts.clear()

    def _put(
        self, pack: PackTensors, columns: Mapping[str, torch.Tensor], made: torch.cuda.Event | None
    ) -> None:
        fields: dict[str, list[torch.Tensor]] = {}
        for name, values in columns.items():
            if self._lane is not None:
                values = self._lane.to_host(values, made)
            rows = pack.rows_of(values)
            fields[name] = [rows[key] for key in pack.keys]
        with self._time.call():
            self._client.kv_batch_put(pack.keys, self._partition_id, fields, must_exist=True)
