"""Dataset files of every kind as prompts: real files, read by the real libraries."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentloop.datasets import DatasetError, PromptRow, Sampler, make_dataset
from agentloop.datasets.messages import messages_of, tools_of
from agentloop.datasets.plain import plain
from tests.agentloop.letters import Letters

VERL = [
    {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(5)
]

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def parquet(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **settings)
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def files(*paths: Path, tokenizer: Letters | None = None, **settings: Any) -> Any:
    config = {"kind": "files", "paths": [str(path) for path in paths], **settings}
    return make_dataset(config, tokenizer or Letters())


def written(tmp_path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        return parquet(path, rows)
    if kind == "jsonl":
        return jsonl(path, rows)
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_rows_of_verls_form_are_prompts_whatever_the_file(tmp_path: Path, kind: str) -> None:
    dataset = files(written(tmp_path, kind, VERL))
    assert len(dataset) == 5
    assert dataset.overlong == 0
    prompt = dataset[3]
    assert prompt == PromptRow(
        index=3,
        messages=[{"role": "user", "content": "What is 3 + 3?"}],
        row={
            "data_source": "gsm8k",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "6"},
            "extra_info": {"split": "train", "index": 3},
        },
        data_source="gsm8k",
        prompt_ids=[ord(letter) for letter in "user:What is 3 + 3?;"],
    )
    with pytest.raises(IndexError, match="none at 5"):
        dataset[5]


def test_several_files_of_different_kinds_follow_one_another(tmp_path: Path) -> None:
    first = parquet(tmp_path / "a.parquet", VERL[:3], row_group_size=2)
    second = jsonl(
        tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "more"}], "x": 1}]
    )
    third = parquet(tmp_path / "c.parquet", VERL[3:])
    dataset = files(first, second, third)
    assert [p.messages[0]["content"][:9] for p in dataset] == [
        "What is 0", "What is 1", "What is 2", "more", "What is 3", "What is 4",
    ]  # fmt: skip
    assert [p.index for p in dataset] == list(range(6))
    assert dataset[3].row == {"x": 1}


def test_large_parquet_files_are_read_batch_by_batch(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "n": n} for n in range(2500)]
    dataset = files(parquet(tmp_path / "a.parquet", rows, row_group_size=700))
    for n in (0, 699, 700, 1023, 1024, 2048, 2499):
        assert (dataset[n].messages[0]["content"], dataset[n].row) == (f"p{n}", {"n": n})


def test_plain_text_is_the_users_and_a_system_prompt_goes_first(tmp_path: Path) -> None:
    rows = [
        {"prompt": "hi"},
        {"prompt": [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]},
    ]
    dataset = files(jsonl(tmp_path / "a.jsonl", rows), system_prompt="be brief")
    assert dataset[0].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert [m["content"] for m in dataset[1].messages] == ["mine", "a"]


def test_another_prompt_column_can_be_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "q", "prompt": "other"}])
    prompt = files(path, prompt_column="question")[0]
    assert (prompt.messages[0]["content"], prompt.row) == ("q", {"prompt": "other"})


def test_names_that_parquet_adds_to_every_message_are_left_out(tmp_path: Path) -> None:
    """Chat templates ask whether `tool_calls` is there, and not whether it is null."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
    conversation = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "user", "content": "and?"},
    ]
    path = parquet(tmp_path / "a.parquet", [{"messages": conversation, "tools": [SEARCH]}])
    prompt = files(path)[0]
    assert prompt.messages == [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "user", "content": "and?"},
    ]
    assert prompt.tools == [SEARCH]
    assert "tools" not in prompt.row
    assert prompt.prompt_ids[-len(json.dumps([SEARCH])) :] == [ord(c) for c in json.dumps([SEARCH])]


def test_content_may_be_text_here_and_parts_there(tmp_path: Path) -> None:
    """pyarrow's own reader of JSON refuses such a file, and makes dates of text."""
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "day": "2024-01-31"},
        {"prompt": [{"role": "user", "content": parts}], "day": "never"},
    ]
    dataset = files(jsonl(tmp_path / "a.jsonl", rows))
    assert dataset[1].messages[0]["content"] == parts
    assert [p.row["day"] for p in dataset] == ["2024-01-31", "never"]


def test_images_pass_through_beside_the_row(tmp_path: Path) -> None:
    picture = {"bytes": b"\x89PNG\0", "path": None}
    rows = [
        {"prompt": "<image> what?", "images": [picture], "n": 1},
        {"prompt": "none", "images": [], "n": 2},
    ]
    dataset = files(parquet(tmp_path / "a.parquet", rows))
    assert dataset[0].multi_modal_inputs == {"images": [picture]}
    assert dataset[0].row == {"n": 1}
    assert dataset[1].multi_modal_inputs is None
    kept = files(parquet(tmp_path / "b.parquet", rows), media_columns=[])
    assert kept[0].row == {"n": 1, "images": [picture]}


def test_values_of_arrow_become_plain_data(tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "day": datetime.date(2024, 1, 31),
        "at": datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=1.5),
        "price": decimal.Decimal("1.10"),
        "blob": b"\0\1",
        "nothing": None,
    }
    got = files(parquet(tmp_path / "a.parquet", [row]))[0].row
    assert got == {
        "day": "2024-01-31",
        "at": "2024-01-31T12:00:00+00:00",
        "took": 1.5,
        "price": "1.10",
        "blob": b"\0\1",
        "nothing": None,
    }


def test_a_row_that_was_changed_changes_no_other_draw(tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl"):
        dataset = files(written(tmp_path, kind, VERL))
        prompt = dataset[0]
        prompt.row["reward_model"]["ground_truth"] = "wrong"
        prompt.messages[0]["content"] = "changed"
        assert dataset[0].row["reward_model"]["ground_truth"] == "0"
        assert dataset[0].messages[0]["content"] == "What is 0 + 0?"


def test_a_data_source_of_several_judges_is_named_by_the_largest(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "data_source": {"maths": 0.7, "style": 0.3}},
        {"prompt": "b", "data_source": {"code": 1.0}},
        {"prompt": "c", "data_source": None},
    ]
    dataset = files(parquet(tmp_path / "a.parquet", rows), data_source="other")
    assert [p.data_source for p in dataset] == ["maths", "code", "other"]
    assert dataset[1].row["data_source"] == {"code": 1.0, "maths": None, "style": None}


# -- over-long prompts -----------------------------------------------------------------------


def test_overlong_prompts_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * n, "n": n} for n in (1, 50, 2, 94, 95, 3)]
    with caplog.at_level(logging.WARNING):
        dataset = files(jsonl(tmp_path / "a.jsonl", rows), max_prompt_tokens=len("user:;") + 94)
    assert [p.row["n"] for p in dataset] == [1, 50, 2, 94, 3]
    assert [p.index for p in dataset] == [0, 1, 2, 3, 5]
    assert (len(dataset), dataset.overlong) == (5, 1)
    assert "1 of 6 rows have more than 100 prompt tokens" in caplog.text


def test_what_is_counted_is_the_whole_prompt_with_system_and_tools(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "x", "tools": [SEARCH]}])
    assert files(path, max_prompt_tokens=30).overlong == 1
    with pytest.raises(DatasetError, match="all have more than 30 prompt tokens"):
        files(path, max_prompt_tokens=30, system_prompt="a long system prompt")


def test_nothing_is_counted_without_a_limit(tmp_path: Path) -> None:
    tokenizer = Letters()
    dataset = files(written(tmp_path, "jsonl", VERL), tokenizer=tokenizer)
    assert tokenizer.asked == 0
    assert dataset[0].prompt_ids
    assert tokenizer.asked == 1


def test_samplers_draw_from_what_is_left(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * (200 if n % 2 else 1), "n": n} for n in range(10)]
    dataset = files(jsonl(tmp_path / "a.jsonl", rows), max_prompt_tokens=100)
    sampler = Sampler(dataset, seed=3)
    prompts = [sampler.next() for _ in range(5)]
    assert sorted(p.row["n"] for p in prompts) == [0, 2, 4, 6, 8]
    assert len({p.uid for p in prompts}) == 5


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', r"a\.jsonl, line 2 is no JSON"),
        ("a.jsonl", '{"prompt": "a"}\n\n[1]', r"a\.jsonl, line 3 is a list, not an object"),
        ("a.json", '[{"prompt": "a"}, 3]', r"a\.json, entry 1 is a int, not an object"),
        ("a.json", "[1", r"a\.json is no JSON"),
        ("a.json", "[" * 100_000, "is no JSON"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"text": "b"}', r"line 3 has no prompt or .*; it has text"),
        ("a.jsonl", '{"prompt": []}', r"line 1: a prompt is text or a list of messages"),
        ("a.jsonl", '{"prompt": {"role": "user"}}', "a prompt is text or a list"),
        ("a.jsonl", '{"prompt": [{"content": "a"}]}', "message 0 has no role; it has content"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', r"message 0 \(user\) has no content"),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": 3}]}', "of message 0 is a int"),
        ("a.jsonl", '{"prompt": ["a"]}', "message 0 is a str"),
        ("a.jsonl", '{"prompt": "a", "tools": "search"}', "line 1: "),
        ("a.jsonl", '{"prompt": "a", "tools": ["search"]}', "schema of a tool is a map"),
        ("a.jsonl", '{"prompt": "a", "data_source": 3}', "a data source is a name or a map"),
        ("a.jsonl", "", "no row is left of 0"),
        ("a.parquet", "no parquet", r"a\.parquet is no parquet file"),
        ("a.csv", "prompt\na", r"'\.csv' is none of \.parquet"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_where_and_why(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        files(tmp_path / name)


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(DatasetError, match=r"a\.parquet, row 1 has no prompt or messages"):
        files(path)


def test_a_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DatasetError, match="cannot be read"):
        files(tmp_path / "a.jsonl")


def test_json_lines_in_a_json_file_and_a_byte_order_mark_are_understood(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in VERL) + "\n"
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert len(files(tmp_path / "a.json")) == 5
    (tmp_path / "b.jsonl").write_text(json.dumps(VERL), encoding="utf-8")
    assert len(files(tmp_path / "b.jsonl")) == 5


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"there is no file .*gone\.jsonl"):
        files(tmp_path / "gone.jsonl")


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    class Refuses(Letters):
        def prompt(self, messages: Any, tools: Any = ()) -> list[int]:
            raise ValueError("roles must alternate")

    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    with pytest.raises(DatasetError, match="line 1: roles must alternate"):
        files(path, tokenizer=Refuses(), max_prompt_tokens=5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no dataset of kind None"), ({"kind": "magic"}, "there are files, reasoning_gym"),
        ({"kind": "files"}, "needs the setting paths"),
        ({"kind": "files", "paths": []}, "at least one path"),
        ({"kind": "files", "paths": "x", "max_tokens": 3}, "'max_tokens'; it has .*max_prompt"),
        ({"kind": "reasoning_gym", "task": "chain_sum"}, "needs the setting size"),
        ({"kind": "reasoning_gym", "task": "x", "size": 1, "paths": []}, "no setting 'paths'"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_says_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        make_dataset(config, Letters())


# -- the small rules -------------------------------------------------------------------------


def test_tools_may_be_json_text_or_absent() -> None:
    assert tools_of(json.dumps([SEARCH])) == tools_of([SEARCH]) == tools_of((SEARCH,)) == [SEARCH]
    assert tools_of(None) == tools_of("") == tools_of([]) == []


def test_messages_are_copies() -> None:
    given = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    messages_of(given)[0]["content"][0]["text"] = "changed"
    assert given[0]["content"][0] == {"type": "text", "text": "a"}


@pytest.mark.parametrize("value", [object(), {1: "a"}, {"a": {object()}}, 1j])
def test_what_has_no_plain_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        plain(value)


def test_numbers_of_numpy_and_large_ones_become_plain() -> None:
    assert plain({"a": np.float32(0.5), "b": np.arange(2), "c": 2**70, "d": (1, 2)}) == {
        "a": 0.5,
        "b": [0, 1],
        "c": str(2**70),
        "d": [1, 2],
    }
