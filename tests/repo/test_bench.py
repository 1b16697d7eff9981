"""The benchmark judges by medians, and a wrong row does not pass for a right one."""

from __future__ import annotations

import pytest
import torch

from tests.bench import data, report
from tests.bench.__main__ import WORKLOADS
from tests.bench.data import Columns
from tests.bench.workload import SMOKE, Line

FASTER = Line("put", "ms", "a put", 6)
MORE = Line("rate", "puts/s", "puts", 6, higher_is_better=True)


def _one(line: Line, **samples: list[float]) -> report.Result:
    return report.results([line], {line.name: samples}, judged=True)[0]


def test_a_ratio_is_of_medians_and_says_how_many_times_better() -> None:
    timed = _one(FASTER, ours=[0.010, 0.050, 0.011], transferqueue=[0.066, 0.067, 0.066])
    assert (timed.ours, timed.ratio) == (pytest.approx(11.0), pytest.approx(6.0))
    assert timed.met is True
    counted = _one(MORE, ours=[300.0], transferqueue=[100.0])
    assert counted.ratio == pytest.approx(3.0)
    assert counted.met is False


def test_a_line_without_both_sides_is_not_judged() -> None:
    assert _one(FASTER, ours=[1.0]).met is None
    assert _one(FASTER, transferqueue=[1.0]).met is None


def test_a_limit_is_judged_in_the_lines_unit() -> None:
    line = Line("view", "ms", "a view", limit=5)
    assert _one(line, ours=[0.0049]).met is True
    assert _one(line, ours=[0.0051]).met is False


def test_a_small_run_judges_nothing() -> None:
    found = report.results([FASTER], {"put": {"ours": [9.0], "transferqueue": [1.0]}}, judged=False)
    assert found[0].met is None


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert report.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert report.spread([7.0]) == 0.0


def test_json_objects_have_the_promised_members() -> None:
    members = {"name", "unit", "ours", "peer", "ratio", "required", "spread"}
    assert members <= set(_one(FASTER, ours=[1.0], transferqueue=[9.0]).as_json())


def test_every_line_has_a_name_of_its_own() -> None:
    names = [line.name for workload in WORKLOADS for line in workload.lines]
    assert len(names) == len(set(names))


def test_equality_is_of_bits_lengths_and_dtype() -> None:
    lengths = torch.tensor([2, 1])
    rows = Columns(torch.tensor([0.0, float("nan"), 1.0]), lengths)
    assert rows.same_as(Columns(rows.values.clone(), lengths.clone()))
    assert not rows.same_as(Columns(torch.tensor([-0.0, float("nan"), 1.0]), lengths))
    assert not rows.same_as(Columns(rows.values, torch.tensor([1, 2])))
    assert not rows.same_as(Columns(rows.values.view(torch.int32), lengths))


def test_rounds_differ_in_every_row() -> None:
    batch = data.ragged(data.keys_of(8, "k"), [3, 1, 4, 1, 5, 9, 2, 6])
    before = {name: column.values.clone() for name, column in batch.columns.items()}
    batch.stamp(17)
    for name, column in batch.columns.items():
        old = Columns(before[name], column.lengths).rows()
        assert all(not torch.equal(a, b) for a, b in zip(old, column.rows(), strict=True)), name
        # The container that is put shares the memory that was stamped.
        assert torch.equal(batch.fields[name].values(), column.values)


def test_lengths_are_long_tailed_around_their_mean() -> None:
    lengths = data.long_tailed(1024, 1100, seed=3)
    assert sum(lengths) / 1024 == pytest.approx(1100, rel=0.03)
    assert (min(lengths) >= 64, max(lengths) <= 4096) == (True, True)
    assert sorted(lengths)[512] < 1000 < 3000 < max(lengths)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_workloads_make_the_same_rows_in_every_process(workload: type) -> None:
    one, other = workload(SMOKE), workload(SMOKE)
    one.load()
    other.load()
    if hasattr(one, "batch"):
        assert one.batch.keys == other.batch.keys
        for name, column in one.batch.columns.items():
            assert column.same_as(other.batch.columns[name])
    else:
        assert one.keys == other.keys
