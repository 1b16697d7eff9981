"""Trajectories in files to read: lines of JSON, made from rows by key, beside training.

dump.py      when: begun by the loop, read before rows are cleared
hosts.py     where: a thread, or a Ray actor
body.py      reads and writes there
reading.py   what is read from the plane
lines.py     what is written (pure)
"""

from __future__ import annotations

from trainer.dump.dump import TrajectoryDump

__all__ = ["TrajectoryDump"]
