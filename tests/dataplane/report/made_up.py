"""Records of runs and planes that were never there: of any size, and with hostile names."""

from __future__ import annotations

import json
import math
from pathlib import Path

from dataplane.report.record import GroupLife, PlaneRecord, PlaneSamples, Waited

HOSTILE = (
    "</title></style><script>fetch('http://198.51.100.1/')</script>\x1b[31m\u202e\x00'\"&[red]"
)
BEGIN_S = 1_790_000_000.0


def plane_of(groups: int, *, name: str = "train-plane", seconds: int = 600) -> PlaneRecord:
    """The record of a plane with so many groups, a few of them failed or open."""
    lives: list[GroupLife] = []
    each = seconds / max(1, groups)
    for i in range(groups):
        begun = BEGIN_S + i * each * 0.8
        ended = begun + min(8 * each, 0.1 * seconds)
        claimed = ended + min(2 * each, 0.02 * seconds)
        if i == groups - 1:
            lives.append(GroupLife(f"open-{i}", "train", i + 1, "running", 8, 3, begun))
        elif i % 41 == 40:
            lives.append(
                GroupLife(f"bad-{i}", "train", i + 1, "failure", 8, 2, begun, begun + 0.1, ended)
            )
        else:
            uid = HOSTILE if i == 0 else f"uid-{i}"
            lives.append(
                GroupLife(
                    uid, "val" if i % 5 == 4 else "train", i + 1, "finished", 8, 8, begun,
                    begun + each, ended, claimed, claimed + 0.01 * seconds,
                    claimed + 0.015 * seconds,
                )
            )  # fmt: skip
    times = [BEGIN_S + at for at in range(seconds)] if groups else []
    wave = [abs(math.sin(at / 40)) for at in range(len(times))]
    samples = PlaneSamples(
        1.0,
        times,
        {
            "keys": [round(4000 * w) for w in wave],
            "used_bytes": [round(9e8 * w) for w in wave],
            "tag_bytes": [round(1e6 * w) for w in wave],
            "held_bytes": [round(2e8 * (1 - w)) for w in wave],
            "waiting_rows": [round(6 * w) for w in wave],
            "waiting_claims": [round(3 * (1 - w)) for w in wave],
            "waiting_room": [0 for _ in wave],
            "open_groups": [round(64 * w) for w in wave],
            "rows_put": [80 * at for at in range(len(times))],
            "rows_got": [70 * at for at in range(len(times))],
            "rows_cleared": [60 * at for at in range(len(times))],
        },
        [("train", "trainer", [None, *(round(900 * w) for w in wave[1:])])] if times else [],
        [
            Waited("claim", "trainer rank 0 on node-a", "train", "trainer", 95.0),
            Waited("rows", HOSTILE, HOSTILE, HOSTILE, 20.0),
        ]
        if times
        else [],
    )
    lengths = {
        "train": {
            "prompt_len": [20 + i % 60 for i in range(4 * groups)],
            "response_len": [50 + (i * i) % 900 for i in range(4 * groups)],
            "seq_len": [70 + i % 60 + (i * i) % 900 for i in range(4 * groups)],
        }
    }
    return PlaneRecord(
        name, "0123456789abcdef", "0.1.0", BEGIN_S + seconds, float(seconds), 4 << 30,
        {"keys": 3, "clients": 5, "stores": 2, "open_groups": 1 if groups else 0,
         "groups": {"finished": groups, "failure": groups // 41}},
        samples, lives, 0, 0, lengths if groups else {},
    )  # fmt: skip


def write_run(folder: Path, steps: int) -> Path:
    """The folder of a run of so many steps."""
    (folder / "logs").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            share = step / max(1, steps)
            values = {
                "time/step": 2.0 + share, "time/produce_batch": 1.1, "time/training": 0.6 + share,
                "time/sync_weight": 0.1, "response/rewards/mean": 0.1 + 0.8 * share,
                "response/packing/padding_tokens": 900.0 * (1 - share / 2),
                "response/packing/real_tokens": 6000.0,
                "training/off_policy/staleness/mean": share, HOSTILE: 1.0,
                "training/off_policy/staleness/min": 0.0, "training/off_policy/staleness/max": 2.0,
                "training/off_policy/worst/mean": 1.5 * share,
                "throughput/e2e_effective_tgs": 1000.0 + step,
            }  # fmt: skip
            if step % 10 == 0 or steps < 10:
                values["eval/reward/mean"] = 0.1 + 0.7 * share
            line = {"step": step, "time": BEGIN_S + 3 * step, "non_finite": 0, "values": values}
            lines.write(json.dumps(line) + "\n")
        lines.write('{"step": 9, "val')  # a torn last line
    (folder / "summary.json").write_text(json.dumps({"wall_s": 3.0 * steps, "rows_left": 0}))
    (folder / "logs" / "env.json").write_text(
        json.dumps({"python": "3.11.7", "packages": {"rl-dataplane": "0.1.0", "torch": HOSTILE}})
    )
    return folder
