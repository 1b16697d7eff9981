"""What a trainer samples from: groups of a partition, claimed until they are trained and cleared.

buffer.py      samples, finished or given back
sampling.py    the way to one sample: claimed, judged, cleared, replaced
source.py      what is sampled from, and what is asked of it
holdings.py    which claims hold which rows
snapshot.py    what a partition holds, kept up to date by listings (pure)
"""

from __future__ import annotations

from trainer.replay_buffer.buffer import ReplayBuffer, Sample

__all__ = ["ReplayBuffer", "Sample"]
