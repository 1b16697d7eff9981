"""A clear that leaves what changed since: the same clear after a kill, and when it is repeated."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.faults import planes


def test_the_rows_that_stayed_are_those_that_stay(roots: dict[str, Path]) -> None:
    with ExitStack() as stack:
        plane = planes.start(stack, "until", **roots)
        client = plane.client
        keys = [f"k{i}" for i in range(3000)]
        client.kv_batch_put(keys, "p", tags=[{"status": "failed"}] * 3000)
        seen = client.tally("p", where={"status": "failed"})
        client.kv_put("k7", "p", tags={"more": 1})
        client.kv_put("new", "p", tags={"status": "failed"})
        assert seen.rows == 3000
        assert client.kv_clear(None, "p", where={"status": "failed"}, until=seen.revision) == 2999
        client.kv_batch_put(["a", "b"], "p", tags=[{}, {}])
        upto = client.tally("p").revision
        client.kv_put("a", "p", tags={"again": 1})
        assert client.kv_clear(["a", "b", "nobody"], "p", until=upto) == 1
        before = client.kv_list("p")
        assert set(before.keys) == {"k7", "new", "a"}
        plane.kill()
        after = client.kv_list("p")
        assert after.keys == before.keys
        assert after.tags == before.tags
        # A revision of before the kill still stands for what it stood for.
        client.kv_put("k7", "p", tags={"more": 2})
        assert client.kv_clear(None, "p", where={}, until=before.revision) == 2
        assert client.kv_list("p").keys == ["k7"]
        client.close(destroy=True)
