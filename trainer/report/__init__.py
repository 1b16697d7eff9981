"""What a run says of itself: trackers, the names of values, throughput, progress, a picture.

Nothing in here can stop a training step.

    trackers = open_trackers([("jsonl", {})], run, name="quickstart")
    values = step_values(times=times, data_info=batch.metrics, reports=reports)
    trackers.log(values, step)
    trackers.close()
    draw_picture(run / "metrics.jsonl", run / "picture.png")
"""

from __future__ import annotations

from trainer.report.jsonl import MetricsLine, jsonl, read_metrics
from trainer.report.names import OptimizerSteps, step_values
from trainer.report.opening import open_trackers
from trainer.report.picture import draw_picture
from trainer.report.plane_share import PlaneShare, plane_share
from trainer.report.progress import Progress
from trainer.report.prometheus import prometheus
from trainer.report.services import trackio, wandb
from trainer.report.step_line import StepLine
from trainer.report.tensorboard import tensorboard
from trainer.report.throughput import StepWork, Throughput
from trainer.report.tracker import Tracker, TrackerNotInstalled, Trackers

__all__ = [
    "MetricsLine",
    "OptimizerSteps",
    "PlaneShare",
    "Progress",
    "StepLine",
    "StepWork",
    "Throughput",
    "Tracker",
    "TrackerNotInstalled",
    "Trackers",
    "draw_picture",
    "jsonl",
    "open_trackers",
    "plane_share",
    "prometheus",
    "read_metrics",
    "step_values",
    "tensorboard",
    "trackio",
    "wandb",
]
