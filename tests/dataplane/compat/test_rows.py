"""Keys, tags and values through this face's verbs: what it forgives, and what it never does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane
from dataplane.errors import PlaneLost
from dataplane.host import embedded
from tests.deadline import eventually

from transfer_queue.verbs import rows  # isort: skip
from transfer_queue.link import Link  # isort: skip
from transfer_queue.metadata import KVBatchMeta  # isort: skip
from transfer_queue.names import HIDDEN, KEYLESS, RESERVED_TAG  # isort: skip

P = "train"


@pytest.fixture(scope="module")
def face(roots: dict[str, Path]) -> Iterator[Link]:
    """A link to a plane whose partitions are open, as the drop-in starts it."""
    config = dataplane.Config(
        host="embedded", open_schemas=True, segment_bytes=4 << 20, capacity_bytes=64 << 20, **roots
    )
    started = embedded.start("face", config)
    link = Link(started.joined, config)
    yield link
    link.close()
    started.stop()


@pytest.fixture
def link(face: Link) -> Iterator[Link]:
    """The same, emptied afterwards."""
    yield face
    for name in face.sync.kv_list_partitions():
        face.sync.kv_drop_partition(name)


def put(link: Link, keys: list[str], fields: dict[str, Any] | None = None, tags: Any = None) -> Any:
    columns = None if fields is None else TensorDict(fields, batch_size=[len(keys)])
    return link.run(partial(rows.put, keys=keys, partition_id=P, fields=columns, tags=tags))


def get(link: Link, keys: list[str], select: list[str] | None = None) -> TensorDict:
    return link.run(partial(rows.get, keys=keys, partition_id=P, select=select))


def listed(link: Link, partition_id: str | None = P) -> Any:
    return link.run(partial(link.listings.all, partition_id=partition_id))


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


# -- puts ------------------------------------------------------------------------------------


def test_a_tag_merges_and_the_whole_of_it_comes_back(link: Link) -> None:
    """V10 of the worked vectors."""
    put(link, ["u"], tags=[{"is_prompt": True, "status": "pending", "global_steps": 7}])
    meta = put(link, ["u"], tags=[{"status": "running"}])
    whole = {"is_prompt": True, "status": "running", "global_steps": 7}
    assert isinstance(meta, KVBatchMeta)
    assert (meta.keys, meta.tags, meta.fields, meta.extra_info) == (["u"], [whole], [], {})
    assert listed(link) == {P: {"u": whole}}


def test_fields_add_up_and_those_in_common_come_back(link: Link) -> None:
    """V11 of the worked vectors."""
    put(link, ["a"], {"x": torch.rand(1, 2)})
    put(link, ["b"], {"x": torch.rand(1, 3), "y": torch.zeros(1, 2)})
    meta = put(link, ["a", "b"], {"z": torch.tensor([1, 2])})
    assert (meta.fields, meta.tags) == (["x", "z"], [{}, {}])
    assert set(get(link, ["a", "b"]).keys()) == {"x", "z"}
    assert set(get(link, ["a", "b"], ["y", "z"]).keys()) == {"z"}
    assert get(link, ["a", "b"], ["y"]).batch_size == torch.Size([0])
    assert get(link, ["b", "absent", "a", "b"], ["z"])["z"].tolist() == [2, 1, 2]
    put(link, ["a", "b"], {"x": torch.arange(10).view(2, 5)})
    again = get(link, ["a", "b"], ["x"])["x"]
    assert (again.dtype, again.offsets().diff().tolist()) == (torch.int64, [5, 5])


def test_a_put_that_is_refused_leaves_no_key(link: Link) -> None:
    with pytest.raises(ValueError, match="once"):
        put(link, ["a", "a"], {"x": torch.zeros(2)})
    with pytest.raises(ValueError, match="a set cannot be stored"):
        put(link, ["a"], {"x": NonTensorStack({"s": {1, 2}})})
    assert listed(link) == {}


def test_writers_of_different_tags_of_one_key_lose_nothing(link: Link) -> None:
    def write(name: str) -> None:
        for n in range(25):
            put(link, ["k"], tags=[{f"{name}{n}": n}])

    writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert listed(link)[P]["k"] == {f"{name}{n}": n for name in "abcd" for n in range(25)}


# -- containers ------------------------------------------------------------------------------

ROWS = {
    "scalars": ([torch.tensor(1.5), torch.tensor(2.5)], "dense"),
    "equal": ([torch.zeros(3), torch.ones(3)], 1),
    "ragged": ([torch.zeros(2), torch.ones(5)], 1),
    "empty": ([torch.zeros(0), torch.zeros(0)], 1),
    "equal matrices": ([torch.zeros(3, 4), torch.ones(3, 4)], 1),
    "ragged in the first": ([torch.zeros(3, 4), torch.ones(5, 4)], 1),
    "ragged in the last": ([torch.zeros(4, 3), torch.ones(4, 5)], 2),
    "ragged in both": ([torch.zeros(2, 3), torch.ones(4, 5)], "strided"),
}


@pytest.mark.parametrize("case", ROWS)
def test_the_container_follows_from_the_rows(link: Link, case: str) -> None:
    values, kind = ROWS[case]
    for key, value in zip("ab", values, strict=True):
        put(link, [key], {"x": value.unsqueeze(0)})
    found: Any = get(link, ["a", "b"])["x"]
    if kind == "dense":
        assert not found.is_nested
        assert found.shape == (2,)
    elif kind == "strided":
        assert found.is_nested
        assert found.layout is torch.strided
    else:
        assert found.layout is torch.jagged
        assert found._ragged_idx == kind
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), values, strict=True))


def test_values_that_are_no_tensors_come_back_as_a_stack(link: Link) -> None:
    values = ["text", None, {"a": [1, 2]}]
    put(link, ["a", "b", "c"], {"v": NonTensorStack(*values)})
    found = get(link, ["c", "a", "b"])
    assert found["v"] == [{"a": [1, 2]}, "text", None]
    assert next(v for _, v in found.items()).tolist() == [{"a": [1, 2]}, "text", None]


def test_an_array_put_by_itself_stays_an_array(link: Link) -> None:
    one = rows.one_row({"v": np.arange(3), "t": torch.arange(2)})
    link.run(partial(rows.put_one, key="a", partition_id=P, fields=one, tag=None))
    found = get(link, ["a"])
    assert list(found.keys()) == ["t", "v"]
    (value,) = found["v"]
    assert isinstance(value, np.ndarray)
    assert value.tolist() == [0, 1, 2]


def test_a_field_that_changed_between_rows_comes_back_promoted(link: Link) -> None:
    put(link, ["a", "b"], {"x": torch.tensor([[1, 2], [3, 4]]), "y": torch.zeros(2)})
    put(link, ["b"], {"x": torch.tensor([[0.5]])})
    found = get(link, ["a", "b", "a"])
    assert [row.tolist() for row in found["x"].unbind()] == [[1.0, 2.0], [0.5], [1.0, 2.0]]
    assert found["x"].dtype is torch.float32
    assert found["y"].tolist() == [0, 0, 0]
    put(link, ["b"], {"x": torch.tensor([7.0])})  # another rank
    mixed = get(link, ["a", "b"], ["x"]).get("x").tolist()
    assert [row.tolist() for row in mixed] == [[1, 2], 7.0]


def test_what_comes_back_is_the_caller_s_own(link: Link) -> None:
    put(link, ["a"], {"x": torch.zeros(1, 4)}, [{"l": [1]}])
    get(link, ["a"])["x"].values().fill_(7)
    listed(link)[P]["a"]["l"].append(2)
    assert get(link, ["a"])["x"].values().tolist() == [0, 0, 0, 0]
    assert listed(link)[P]["a"] == {"l": [1]}


# -- what is not there -----------------------------------------------------------------------


def test_a_get_of_nothing_says_so(link: Link) -> None:
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        get(link, ["a"])
    put(link, ["a"], tags=[{"n": 1}])
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        get(link, ["b"])
    with pytest.raises(ValueError, match="Some fields are not ready"):
        get(link, ["a"])
    with pytest.raises(ValueError, match="Some fields are not ready"):
        get(link, ["a"], ["x"])
    put(link, ["a"], {"y": torch.zeros(1)})
    assert get(link, ["a"], ["x"]).batch_size == torch.Size([0])


def test_clearing_what_is_not_there_is_no_error(link: Link) -> None:
    clear = partial(rows.clear, keys=["a", "b", "a"], partition_id=P)
    assert link.run(clear) == 0
    put(link, ["a"], {"x": torch.zeros(1)})
    assert link.run(clear) == 1
    assert listed(link) == {P: {}}, "a partition whose keys were cleared stays"


# -- listings --------------------------------------------------------------------------------


def test_a_listing_follows_what_changed_and_shows_nothing_of_its_own(link: Link) -> None:
    put(link, ["a", "b"], tags=[{"n": 1, RESERVED_TAG: {"index": 0}}, {"n": 2}])
    link.sync.kv_put(f"{KEYLESS}3", P, None, {"n": 3})
    link.sync.kv_put("own", HIDDEN, None, {"next": 1})
    assert listed(link, None) == {P: {"a": {"n": 1}, "b": {"n": 2}}}
    link.sync.kv_clear(["a"], P)
    meta = put(link, ["b"], tags=[{RESERVED_TAG: {"index": 5}}])
    assert meta.tags == [{"n": 2}]
    put(link, ["c"], tags=[{"n": 3}])
    assert listed(link) == {P: {"b": {"n": 2}, "c": {"n": 3}}}
    link.sync.kv_drop_partition(P)
    assert listed(link) == {}
    put(link, ["d"], tags=[{}])
    assert listed(link) == {P: {"d": {}}}, "dropped and made anew, it is another partition"


def test_later_listings_bring_only_changes(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue.verbs import listing as module

    put(link, [f"k{i}" for i in range(500)], tags=[{"n": i} for i in range(500)])
    brought: list[int] = []
    take = module._Copy.take  # pyright: ignore[reportPrivateUsage]

    def counted(self: Any, found: Any) -> None:
        brought.append(len(found))
        take(self, found)

    monkeypatch.setattr(module._Copy, "take", counted)  # pyright: ignore[reportPrivateUsage]
    listed(link)
    put(link, ["k7"], tags=[{"n": -1}])
    assert listed(link)[P]["k7"] == {"n": -1}
    assert brought == [500, 1]


# -- event loops -----------------------------------------------------------------------------


def test_verbs_are_awaited_on_several_loops_at_once(link: Link) -> None:
    async def work(name: str) -> list[int]:
        async def one(i: int) -> int:
            key = f"{name}{i}"
            await link.run_async(
                partial(
                    rows.put_one,
                    key=key,
                    partition_id=P,
                    fields={"x": torch.full((3,), i)},
                    tag={"n": i},
                )
            )
            found = await link.run_async(
                partial(rows.get, keys=[key], partition_id=P, select=["x"])
            )
            return int(found["x"].values()[0])

        return list(await asyncio.gather(*map(one, range(20))))

    results: dict[str, list[int]] = {}

    def loop(name: str) -> None:
        results[name] = asyncio.run(work(name))

    threads = [threading.Thread(target=loop, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    put(link, ["sync"], tags=[{}])
    for thread in threads:
        thread.join()
    assert results == {name: list(range(20)) for name in "abc"}
    assert len(listed(link)[P]) == 61


def test_a_link_that_is_closed_leaves_no_connection_on_a_loop_that_goes_on(link: Link) -> None:
    other = Link(link.joined, link.config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        put_one = partial(rows.put_one, key="a", partition_id=P, fields=None, tag={})
        asyncio.run_coroutine_threadsafe(other.run_async(put_one), loop).result(10)
        put(other, ["b"], tags=[{}])
        connected = clients(link)
        other.close()
        eventually(lambda: clients(link) == connected - 2, "both clients are gone")
        with pytest.raises(PlaneLost):
            asyncio.run_coroutine_threadsafe(other.run_async(put_one), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def clients(link: Link) -> int:
    """How many clients the plane has."""
    return int(link.sync.status()["clients"])


# -- names -----------------------------------------------------------------------------------


def test_names_that_are_the_drop_in_s_own_are_refused() -> None:
    with pytest.raises(ValueError, match="__transfer_queue__"):
        rows.new_keys(["a"], HIDDEN)
    with pytest.raises(ValueError, match="__row__"):
        rows.new_keys(["a", f"{KEYLESS}1"], P)
    with pytest.raises(ValueError, match="__tq__"):
        rows.checked_tags([{}, {RESERVED_TAG: 1}], ["a", "b"])
    with pytest.raises(ValueError, match="__tq__"):
        rows.one_tag({RESERVED_TAG: 1})
