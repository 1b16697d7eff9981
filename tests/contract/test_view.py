"""Views: rows in place, what they cannot be, and how long they hold what they show."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from dataplane.errors import FieldNotFound, InvalidRequest, KeyNotFound
from tests.contract.planes import MAPPED, Plane
from tests.deadline import eventually

KEYS = ["a", "b", "c"]
ROWS = [torch.arange(3), torch.arange(0), torch.arange(3, 7)]


@pytest.fixture
def filled(plane: Plane, partition: str) -> str:
    """A partition with one block of three rows."""
    plane.client.kv_batch_put(
        KEYS, partition,
        {
            "x": ROWS,
            "m": torch.arange(24).view(3, 2, 4),
            "r": torch.tensor([0.5, 1.5, 2.5]),
            "s": ["p", "q", {"deep": torch.arange(2)}],
        },
    )  # fmt: skip
    return partition


@pytest.mark.kinds("ray-remote")
def test_a_view_elsewhere_than_on_the_node_of_its_rows_is_refused(
    client: Any, partition: str
) -> None:
    client.kv_put("k", partition, {"x": torch.arange(3)})
    with (
        pytest.raises(InvalidRequest, match="kv_batch_get"),
        client.kv_view(["k"], partition, layout="list"),
    ):
        pass


@pytest.mark.parametrize("layout", ["nested", "packed", "list"])
@MAPPED
def test_a_view_shows_what_a_get_brings(client: Any, filled: str, layout: str) -> None:
    names = ["x", "r", "s"] if layout != "list" else ["x", "m", "r", "s"]
    got = client.kv_batch_get(KEYS, filled, names, layout=layout)
    with client.kv_view(KEYS, filled, names, layout=layout) as rows:
        assert rows.keys == KEYS
        assert rows.revision == got.revision
        assert rows.lengths["x"].tolist() == [3, 0, 4]
        if layout == "packed":
            assert torch.equal(rows["x"], got["x"])
            assert rows.cu_seqlens["x"].tolist() == [0, 3, 3, 7]
            assert torch.equal(rows["r"], got["r"])
        elif layout == "nested":
            assert torch.equal(rows["x"].values(), got["x"].values())
            assert rows["x"].offsets().tolist() == [0, 3, 3, 7]
        else:
            for name in ("x", "m", "r"):
                for seen, copy in zip(rows[name], got[name], strict=True):
                    assert torch.equal(seen, copy)
        assert rows["s"][:2] == ["p", "q"]
        assert torch.equal(rows["s"][2]["deep"], torch.arange(2))
        del rows


@MAPPED
def test_a_view_shows_the_bytes_themselves(client: Any, filled: str) -> None:
    with client.kv_view(["b", "a"], filled, ["r"], layout="list") as one:
        with client.kv_view(KEYS, filled, ["r"], layout="packed") as two:
            # The same memory twice: nothing was copied.
            assert one["r"][1].data_ptr() == two["r"].data_ptr()
            del two
        assert one["r"][0].data_ptr() == one["r"][1].data_ptr() + 4
        del one


@MAPPED
def test_only_a_list_takes_rows_in_any_order(client: Any, filled: str) -> None:
    with client.kv_view(["c", "a", "c"], filled, ["x", "m"], layout="list") as rows:
        assert [row.tolist() for row in rows["x"]] == [[3, 4, 5, 6], [0, 1, 2], [3, 4, 5, 6]]
        assert torch.equal(rows["m"][1], torch.arange(8).view(2, 4))
        del rows
    for layout in ("nested", "packed"):
        with (
            pytest.raises(InvalidRequest, match="side by side"),
            client.kv_view(["c", "a"], filled, ["x"], layout=layout),
        ):
            pass
        with (
            pytest.raises(InvalidRequest, match="ragged in dimension 1"),
            client.kv_view(KEYS, filled, ["m"], layout=layout),
        ):
            pass
    with (
        pytest.raises(InvalidRequest, match="padded"),
        client.kv_view(KEYS, filled, layout="padded"),
    ):
        pass


@MAPPED
def test_a_view_of_several_blocks_is_a_list(client: Any, filled: str) -> None:
    client.kv_put("d", filled, {"x": torch.arange(9, 11)})
    client.kv_put("a", filled, {"r": torch.tensor(9.5)})
    with client.kv_view(["d", "a"], filled, ["x"], layout="list") as rows:
        assert [row.tolist() for row in rows["x"]] == [[9, 10], [0, 1, 2]]
        del rows
    with client.kv_view(["a", "b"], filled, ["r", "x"], layout="list") as rows:
        assert [row.item() for row in rows["r"]] == [9.5, 1.5]
        del rows


@MAPPED
def test_a_view_names_what_is_missing(client: Any, filled: str) -> None:
    with pytest.raises(KeyNotFound) as keys, client.kv_view(["a", "no"], filled):
        pass
    assert keys.value.keys == ["no"]
    with pytest.raises(FieldNotFound) as fields, client.kv_view(["a"], filled, ["q"]):
        pass
    assert fields.value.fields == ["q"]


@MAPPED
def test_a_view_of_no_keys_is_empty(client: Any, filled: str) -> None:
    with client.kv_view([], filled, ["x"], layout="list") as rows:
        assert (rows.keys, rows["x"]) == ([], [])


@MAPPED
def test_an_error_inside_the_context_lets_go_of_the_rows(
    plane: Plane, client: Any, filled: str
) -> None:
    with pytest.raises(ZeroDivisionError), client.kv_view(KEYS, filled, layout="list"):
        _ = 1 // 0
    gc.collect()
    client.kv_clear(KEYS, filled)
    plane.settle()
    eventually(lambda: plane.used_bytes() == 0, "no pin is left")


@MAPPED
def test_a_tensor_of_a_view_holds_its_block_until_it_dies(
    plane: Plane, client: Any, filled: str
) -> None:
    with client.kv_view(KEYS, filled, layout="list") as rows:
        kept = rows["x"][2][1:3]
    del rows
    client.kv_clear(KEYS, filled)
    client.kv_put("d", filled, {"x": torch.full((4,), -1)})
    gc.collect()
    assert kept.tolist() == [4, 5]
    pins = [store["pins"] for store in plane.witness.status()["values"].values()]
    assert sum(pins) == 1
    del kept
    gc.collect()
    eventually(
        lambda: not sum(s["pins"] for s in plane.witness.status()["values"].values()),
        "the pin went with the tensor",
    )


@MAPPED
def test_views_are_opened_and_dropped_by_many_threads(
    plane: Plane, client: Any, filled: str
) -> None:
    failed: list[BaseException] = []

    def look() -> None:
        try:
            kept: list[Any] = []
            for i in range(20):
                with client.kv_view(["c", "a"], filled, ["x"], layout="list") as rows:
                    assert rows["x"][0].tolist() == [3, 4, 5, 6]
                    if i % 3 == 0:
                        kept.append(rows["x"])
                    del rows
                if len(kept) > 2:
                    kept.clear()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert failed == []
    gc.collect()
    eventually(
        lambda: not sum(s["pins"] for s in plane.witness.status()["values"].values()),
        "no pin is left",
    )
