"""A small run as a plane holds it in the middle of a step, for commands to look at.

partition train   u1       a group that finished: 4 sessions, 4 trajectories
                  u2       a group that is stuck: 3 of 4 sessions
                  u3       a group whose producer is gone
                  judge    a task that has committed one row; trainer holds two
                  failed   a row with tags alone, which nothing of a terminal's survives
partition val     big      a text of 1,000,000 letters
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from dataplane.client.sync import Client

TRAIN, VAL, ASIDE = "train", "val", "aside"
QUOTA_BYTES: Final = 1 << 20
HOSTILE_KEY: Final = "u9 [red]\u202egpj.exe\u202c [/red] $(reboot);'\""
"""A key that would turn the direction of writing, and is markup, a command and two quotes."""
HOSTILE_TEXT: Final = "\x1b[2J\x1b]0;owned\x07 line\r\nnext [bold]x[/bold] \u202eevil\u202c \u200b"
"""A tag that would clear the screen and name the window."""
LETTERS: Final = 1_000_000
SESSIONS: Final = 4


def trajectory(uid: str, session: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tags of a trajectory: its tokens count from 0, the first half is the prompt."""
    ids = torch.arange(size)
    labels = ids.clone()
    labels[: size // 2] = -100
    fields = {"input_ids": ids, "labels": labels, "logprobs": torch.linspace(-2.0, 0.0, size)}
    tags = {
        "uid": uid,
        "session_id": session,
        "index": 0,
        "status": "completed",
        "prompt_len": size // 2,
        "seq_len": size,
        "global_steps": 3,
        "score": session / 4,
    }
    return fields, tags


def size_of(session: int) -> int:
    """How many tokens a session's trajectory has: 64, 96, 128, 160."""
    return 64 + 32 * session


def put_group(client: Client, uid: str, sessions: int, status: str | None) -> None:
    """A group of four of which so many sessions are there; it ends with a status, or goes on."""
    question = {"messages": [{"role": "user", "content": "1+1?"}]}
    tags = {"is_prompt": True, "uid": uid, "status": "pending", "n": SESSIONS, "global_steps": 3}
    client.kv_put(uid, TRAIN, question, tags)
    attempt = client.begin_group(uid, TRAIN, n=SESSIONS)
    for session in range(sessions):
        fields, its = trajectory(uid, session, size_of(session))
        client.kv_put(f"{uid}_{session}_0", TRAIN, fields, its, attempt=attempt)
    if status is not None:
        client.end_group(attempt, status)


def put_run(client: Client, another: Callable[[], Client]) -> None:
    """Put all of it. `another` makes a client of the same plane, which leaves."""
    put_group(client, "u1", SESSIONS, "finished")
    put_group(client, "u2", SESSIONS - 1, None)
    gone = another()
    put_group(gone, "u3", 1, None)
    gone.close()
    client.kv_put(
        "failed", TRAIN, tags={"uid": "u4", "status": "failed", "error_msg": HOSTILE_TEXT}
    )
    client.kv_put(HOSTILE_KEY, TRAIN, tags={"uid": "u9", "status": "aborted"})
    client.kv_put("big", VAL, {"text": "x" * LETTERS}, {"status": "completed"})
    client.kv_create_partition(ASIDE, quota={"bytes": QUOTA_BYTES})
    done = client.kv_claim(
        TRAIN, "judge", count=1, fields=["input_ids"], where={"uid": "u1", "session_id": 0}
    )
    client.kv_commit(done)
    client.kv_claim(TRAIN, "trainer", count=2, fields=["input_ids"], where={"uid": "u1"})
