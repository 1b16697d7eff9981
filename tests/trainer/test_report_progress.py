"""What a person sees: lines, a live table, a picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from trainer.report import Progress, StepLine, draw_picture, jsonl

VALUES = {
    "response/rewards/mean": 0.5,
    "response/response_len/mean": 18.25,
    "training/off_policy/staleness/mean": 1.0,
    "time/step": 0.5,
}


def test_elsewhere_than_in_a_terminal_a_step_is_a_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        progress.begin("grpo", 100)
        progress.step(3, {**VALUES, "eval/accuracy": 0.75}, plane_s=0.01)
        progress.step(4, {"time/step": 0.25})
        progress.say("reward before warm-up 0.1 " + "x" * 200)
    assert out.getvalue().splitlines() == [
        "grpo: 100 steps",
        "grpo  step 3/100  reward 0.500  held-out 0.750  length 18.2  lag 1.00  time 0.50 s"
        "  plane 2.0%",
        "grpo  step 4/100  time 0.25 s",
        "reward before warm-up 0.1 " + "x" * 200,
    ]


def test_in_a_terminal_there_is_a_bar_and_a_table() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Progress(console) as progress:
        progress.begin("warm-up", 2)
        progress.step(1, VALUES)
        progress.begin("grpo", 10, done=4)
        for step in range(5, 11):
            progress.step(step, VALUES, plane_s=0.01)
        progress.say("done")
    shown = out.getvalue()
    assert shown.index("warm-up") < shown.index("1/2") < shown.index("grpo")  # it stays
    assert "10/10" in shown
    assert "held-out" in shown
    last = shown[shown.rindex("grpo") :]
    assert "2.0%" in last
    assert "1/2" not in last
    assert "done" in shown


def test_a_terminal_that_goes_away_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out))
    progress.begin("grpo", 2)
    out.close()
    progress.step(1, VALUES)
    progress.step(2, VALUES)
    progress.close()
    assert sum("shown no more" in record.message for record in caplog.records) == 1


def test_a_line_knows_the_lag_of_oldest_tokens_where_that_is_all() -> None:
    line = StepLine.of(1, {"training/off_policy/worst/mean": 2.0, "eval/reward/mean": 0.5})
    assert (line.lag, line.held_out, line.plane_share, line.reward) == (2.0, 0.5, None, None)


def png(path: Path) -> set[tuple[int, ...]]:
    """The colours of a picture of the right size."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1540, 980)
        return {color for _, color in image.convert("RGB").getcolors(1 << 20) or []}


ORANGE, BLUE, GREEN = (0xD9, 0x77, 0x2B), (0x2F, 0x6F, 0xB5), (0x3D, 0x8F, 0x5F)


@pytest.mark.parametrize("steps", [0, 1, 90])
def test_a_picture_has_every_curve_that_was_logged(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    metrics = jsonl(tmp_path / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics.log({"train_metrics/worker_0/loss": 1.0}, 4 * step)
        values = {**VALUES, "response/rewards/mean": step / 100}
        metrics.log(values | ({} if step % 10 else {"eval/accuracy": step / 90}), step)
    metrics.close()
    target = tmp_path / "run" / "picture.png"
    pyplot = "matplotlib.pyplot" in sys.modules
    assert draw_picture(tmp_path / "metrics.jsonl", target, title="quickstart") == target
    assert ("matplotlib.pyplot" in sys.modules) == pyplot  # no window, no state of the process
    colors = png(target)
    assert ((BLUE in colors), (GREEN in colors)) == (steps > 0, steps > 0)
    assert (ORANGE in colors) == (steps == 90)  # the held-out reward
    assert [path.name for path in target.parent.iterdir()] == ["picture.png"]


def test_a_resumed_steps_last_values_are_drawn(tmp_path: Path) -> None:
    from trainer.report.jsonl import read_metrics
    from trainer.report.picture import PANELS

    metrics = jsonl(tmp_path / "metrics.jsonl")
    for step, reward in ((1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3)):
        metrics.log({"response/rewards/mean": reward}, step)
    metrics.close()
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert PANELS[0].curves[0].points(lines) == ([1, 2, 3], [0.1, 0.2, 0.3])


def test_there_is_no_picture_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        draw_picture(tmp_path / "metrics.jsonl", tmp_path / "picture.png")
