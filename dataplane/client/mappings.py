"""The segments of this node's value store as this process has mapped them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from dataplane.client.memory import Bytes
from dataplane.values.segments import Mapping, open_segment, segment_path


class Mappings:
    """Segments of one store, mapped on first use. For any thread.

    A mapping whose file was unlinked is let go when another one is made: the store has given
    those pages back, and only whoever still reads them should keep them.
    """

    def __init__(self, folder: str, plane_id: str, nonce: bytes) -> None:
        self._folder = Path(folder)
        self._plane_id = plane_id
        self._nonce = nonce
        self._lock = threading.Lock()  # guards both tables
        self._read: dict[int, Mapping] = {}
        self._written: dict[int, Mapping] = {}

    def readable(self, segment_id: int) -> Bytes:
        """All bytes of a segment; writing to them kills the process. Unreachable if it is not
        a segment of this store on this node."""
        mapping = self._read.get(segment_id)
        return (mapping or self._map(self._read, segment_id, writable=False)).array

    def writable(self, segment_id: int) -> Bytes:
        """All bytes of a segment, to copy into what was reserved there."""
        mapping = self._written.get(segment_id)
        return (mapping or self._map(self._written, segment_id, writable=True)).array

    def close(self) -> None:
        """Let go of all of them; tensors over them stay valid."""
        with self._lock:
            for table in (self._read, self._written):
                for mapping in table.values():
                    mapping.close()
                table.clear()

    def _map(self, table: dict[int, Mapping], segment_id: int, *, writable: bool) -> Mapping:
        with self._lock:
            mapping = table.get(segment_id)
            if mapping is not None:
                return mapping
            for other in (self._read, self._written):
                for known in [s for s in other if not os.path.exists(self._path(s))]:
                    del other[known]  # arrays taken from it keep it mapped
            mapping = open_segment(
                self._path(segment_id),
                plane_id=self._plane_id,
                nonce=self._nonce,
                segment_id=segment_id,
                writable=writable,
            )
            table[segment_id] = mapping
            return mapping

    def _path(self, segment_id: int) -> Path:
        return segment_path(self._folder, segment_id)
