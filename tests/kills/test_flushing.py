"""Every setting of the journal's flushing survives the death of the process whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import is_gone
from tests.kills.rows import check, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

KILLS = 3


@pytest.mark.parametrize("sync", ["none", "interval", "always"])
def test_a_plane_of_each_setting_has_all_that_was_acknowledged_when_it_is_killed(
    own_plane: Callable[..., Plane], sync: str, seed: int
) -> None:
    chance = random.Random(seed)
    plane = own_plane(journal_sync=sync, snapshot_bytes=64 << 10)
    client, there = plane.client, list[str]()
    for kill in range(KILLS):
        keys = [f"k{kill}-{i}" for i in range(30)]
        put(client, "p", keys, 2000)
        client.kv_put(keys[0], "p", tags={"text": "x" * 20_000})
        there += keys
        chance.shuffle(there)
        client.kv_clear(there[40:], "p")
        there = there[:40]
        claim = client.kv_claim("p", "t", count=2, timeout=10)
        pid = plane.pid
        plane.kill()
        client.kv_commit(claim)
        eventually(lambda pid=pid: is_gone(pid) and plane.pid != pid, "another one serves")
        check(client, "p", there)
    assert client.status()["revision"][0] == KILLS + 1
    client.kv_seal_partition("p")
    left = 0
    while not (claim := client.kv_claim("p", "t", count=1, timeout=10)).end:
        client.kv_commit(claim)
        left += 1
    assert len(there) - 2 * KILLS <= left <= len(there)
    client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks=0)
