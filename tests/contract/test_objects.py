"""Values that are no tensors: each comes back as an equal object of the same type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.errors import InvalidRequest, SchemaMismatch
from tests.contract.planes import Plane

VALUES: dict[str, Any] = {
    "text": "héllo \N{SNOWMAN}\n\0",
    "empty text": "",
    "bytes": b"\x00\xff" * 10,
    "int": -(2**62),
    "large int": 2**70,
    "bool": True,
    "float": 0.1,
    "infinity": float("inf"),
    "complex": 1 - 2j,
    "none": None,
    "list": [1, [2, ["three", None]], {}],
    "tuple": (1, (2, "x"), []),
    "map": {"a": {"b": [1, 2]}, "c": None},
    "map of numbers": {1: "one", 2: "two", b"k": 3},
    "long text": "x" * 300_000,
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
}


INSIDE = {"large int", "complex", "map of numbers"}
"""Values that the outside protocol, which other languages speak, has no form for."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.inside("no form outside") if name in INSIDE else ())
        for name in VALUES
    ],
)
def test_a_value_comes_back_equal_and_of_its_type(client: Any, partition: str, name: str) -> None:
    value = VALUES[name]
    client.kv_put("one", partition, {"o": value})
    client.kv_batch_put(["a", "b"], partition, {"o": [value, value]})
    for layout in ("nested", "padded", "list", "packed"):
        got = client.kv_batch_get(["one", "b", "a"], partition, layout=layout)["o"]
        assert type(got) is list
        assert got == [value] * 3
        assert [type(item) for item in got] == [type(value)] * 3
    assert client.kv_list(partition).fields == [("o",)] * 3


@pytest.mark.inside("there an array is a tensor, and a number of numpy a number")
def test_tensors_and_arrays_inside_maps_keep_their_bits(client: Any, partition: str) -> None:
    value = {
        "pixels": torch.randn(3, 4).to(torch.bfloat16),
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3),
        "deep": [{"mask": torch.tensor([True, False])}, torch.tensor(2.5)],
        "scalar": np.float32(1.5),
    }
    client.kv_put("k", partition, {"multi_modal_inputs": value})
    (got,) = client.kv_batch_get(["k"], partition)["multi_modal_inputs"]
    assert torch.equal(got["pixels"], value["pixels"])
    assert got["pixels"].dtype == torch.bfloat16
    assert np.array_equal(got["grid"], value["grid"])
    assert got["grid"].dtype == np.int16
    assert torch.equal(got["deep"][0]["mask"], torch.tensor([True, False]))
    assert got["deep"][1].item() == 2.5
    assert (got["scalar"], type(got["scalar"])) == (1.5, np.float32)
    got["pixels"].zero_()
    (again,) = client.kv_batch_get(["k"], partition)["multi_modal_inputs"]
    assert torch.equal(again["pixels"], value["pixels"])


def test_a_list_of_mixed_rows_is_a_column_of_objects(client: Any, partition: str) -> None:
    rows = [1, "two", None, [3], torch.tensor([4])]
    keys = [f"k{i}" for i in range(5)]
    client.kv_batch_put(keys, partition, {"o": rows})
    got = client.kv_batch_get(keys[::-1], partition)["o"]
    assert got[1:] == [[3], None, "two", 1]
    assert torch.equal(got[0], torch.tensor([4]))


@pytest.mark.parametrize("count", [1, 3])
def test_non_tensor_data_of_a_tensordict_is_one_value_per_row(
    client: Any, partition: str, count: int
) -> None:
    keys = [f"k{i}" for i in range(count)]
    texts = [f"t{i}" for i in range(count)]
    td = TensorDict(
        {
            "stack": NonTensorStack(*texts),
            "same": NonTensorData("every row", batch_size=[count]),
            "x": torch.zeros(count, 2),
        },
        batch_size=[count],
    )
    client.kv_batch_put(keys, partition, td)
    rows = client.kv_batch_get(keys, partition)
    assert rows["stack"] == texts
    assert rows["same"] == ["every row"] * count


def test_a_field_of_objects_takes_no_tensor_and_the_other_way_round(
    client: Any, partition: str
) -> None:
    client.kv_put("a", partition, {"o": [1, 2], "x": torch.tensor([1, 2])})
    for fields, name in (({"o": torch.tensor([1, 2])}, "o"), ({"x": [1, 2]}, "x")):
        with pytest.raises(SchemaMismatch) as refused:
            client.kv_put("b", partition, fields)
        assert (refused.value.keys, refused.value.fields) == (["b"], [name])


def test_what_is_nested_too_deep_or_is_no_text_is_refused(plane: Plane, partition: str) -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for value in (deep, "\ud800", {"\ud800": 1}, {(1, 2): 3}, np.array(["a"], object)):
        with pytest.raises(InvalidRequest, match="'o'"):
            plane.witness.kv_put("k", partition, {"o": value})
    assert partition not in plane.witness.status()["partitions"]
