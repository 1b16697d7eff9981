"""Packs on their way from pinned host memory to a GPU, beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer.materialize import PackTensors


@dataclass(frozen=True, slots=True)
class Sent:
    """A pack that is being copied."""

    pack: PackTensors
    """Its tensors on the device, for whoever has `received` it."""
    copied: Any
    """The event that the copies end with: what they were made from may be overwritten then."""


class CopyLane:
    """Streams of copies to a device, and back from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._results = torch.cuda.Stream(device)

    def send(self, pack: PackTensors) -> Sent:
        """Begin to copy a pack, and return at once where it lies in pinned memory.

        Columns that a stage left on the device stay as they are.
        """
        with torch.cuda.stream(self._stream):
            moved = pack.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Sent(moved, copied)

    def receive(self, sent: Sent) -> PackTensors:
        """The pack, for the stream that the calling thread computes on, which waits for it; the
        thread does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.copied)
        for tensor in _tensors(sent.pack):
            # Its memory is of the other stream, which must not hand it out again too early.
            tensor.record_stream(stream)
        return sent.pack

    def to_host(self, values: torch.Tensor, made: Any) -> torch.Tensor:
        """A copy in host memory, once the event `made` has come. The calling thread waits for it,
        and for nothing that was asked of the device later."""
        with torch.cuda.stream(self._results):
            self._results.wait_event(made)
            values.record_stream(self._results)
            return values.to("cpu")


def _tensors(pack: PackTensors) -> Iterator[torch.Tensor]:
    yield from (pack.input_ids, pack.labels, pack.position_ids, pack.cu_seq_lens)
    yield from pack.columns.values()
    if pack.routed_experts is not None:
        yield pack.routed_experts
