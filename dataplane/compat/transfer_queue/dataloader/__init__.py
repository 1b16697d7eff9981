"""Streaming: rows as a torch dataset and data loader, in micro-batches as they become ready."""

from __future__ import annotations

from .streaming_dataloader import StreamingDataLoader
from .streaming_dataset import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset"]
