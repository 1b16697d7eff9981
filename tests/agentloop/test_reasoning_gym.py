"""reasoning-gym's tasks as datasets, and its scorers as rewards: the real library."""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from agentloop.datasets import DatasetError, PromptRow, gym_process, make_dataset
from agentloop.datasets.plain import marked, unmarked
from agentloop.datasets.reasoning_gym import INSTRUCTION, GymRows
from agentloop.datasets.split import split_of
from agentloop.rewards import ReasoningGymReward, RewardError
from agentloop.rewards import gym_scorer as scorer
from agentloop.rewards.reasoning_gym import tagged
from agentloop.trajectory.state import RolloutState
from tests.agentloop.letters import Letters

TASKS = sorted(DATASETS.keys() - {"composite"})


def answered(row: dict[str, Any], answer: str | None) -> RolloutState:
    response = "no idea" if answer is None else f"Well. <answer>{answer}</answer>"
    return RolloutState(messages=[], row=row, response=response)


def entries(task: str, size: int, **settings: Any) -> list[dict[str, Any]]:
    """Rows as `GymRows` has them, made in this process."""
    config = settings.pop("config", {})
    request = {
        "task": task,
        "size": size,
        "seed": 0,
        "config": config,
        "split": None,
        "eval_share": 0.1,
    }
    return [
        {**entry, "reasoning_gym": {"task": task, "config": config}}
        for entry in gym_process.rows({**request, **settings})
    ]


def questions(task: str, size: int, **settings: Any) -> set[str]:
    return {entry["question"] for entry in entries(task, size, **settings)}


# -- rows ------------------------------------------------------------------------------------


def test_a_task_is_a_dataset_of_prompts() -> None:
    dataset = make_dataset(
        {
            "kind": "reasoning_gym",
            "task": "chain_sum",
            "size": 5,
            "seed": 3,
            "config": {"max_terms": 3},
        },
        Letters(),
    )
    assert len(dataset) == 5
    prompt = dataset[2]
    assert isinstance(prompt, PromptRow)
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[0]["content"] == INSTRUCTION
    assert prompt.messages[1]["content"] == prompt.row["question"]
    assert prompt.data_source == "chain_sum"
    assert prompt.row["reasoning_gym"] == {
        "task": "chain_sum",
        "config": {"max_terms": 3},
        "index": 2,
    }
    assert prompt.row["metadata"]["num_terms"] <= 3
    assert json.loads(json.dumps(prompt.row)) == prompt.row


def test_rows_of_neighbouring_seeds_overlap_and_splits_do_not() -> None:
    one, next_seed = (questions("chain_sum", 20, seed=s) for s in (5, 6))
    assert len(one & next_seed) == 19
    for task in ("chain_sum", "coin_flip"):  # the second has 260 different questions only
        train = set[str]()
        held_out = set[str]()
        for seed in (5, 6):
            train |= questions(task, 60, seed=seed, split="train")
            held_out |= questions(task, 12, seed=seed, split="eval")
        assert train
        assert held_out
        assert not train & held_out


@given(st.text(), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_the_split_follows_from_the_text_alone(text: str, one: float, other: float) -> None:
    assert split_of(text, one) == split_of(f"  {text}\n", one)
    small, large = sorted((one, other))
    if split_of(text, small) == "eval":
        assert split_of(text, large) == "eval"


def test_about_the_named_share_is_for_evaluation() -> None:
    held_out = sum(split_of(f"question {n}", 0.2) == "eval" for n in range(10_000))
    assert 1850 < held_out < 2150


def test_rows_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This task walks through sets of text, whose order is the hash seed's."""
    made: list[list[Any]] = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        rows = GymRows("ransom_note", size=4, seed=7)
        made.append([rows.row(index) for index in range(4)])
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "chain_su"}, "'chain_su' not registered"),
        ({"config": {"seed": 3}}, "beside its config"),
        ({"config": {"min_terms": object()}}, "no plain data"),
        ({"size": 0}, "size is at least 1"),
        ({"split": "test"}, "split one of train, eval; got .*'test'"),
        ({"split": "eval", "eval_share": 1.0}, "eval_share between 0 and 1"),
        ({"timeout_s": 0.01}, "were not made in"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_made_says_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        GymRows(**{"task": "chain_sum", "size": 2, **settings})


def test_wrong_settings_and_too_few_questions_are_named() -> None:
    with pytest.raises(TypeError, match="'bogus'"):
        entries("chain_sum", 1, config={"bogus": 1})
    with pytest.raises(AssertionError, match="min_terms must be positive"):
        entries("chain_sum", 1, config={"min_terms": 0})
    few = {"min_trials": 3, "max_trials": 3}
    with pytest.raises(
        ValueError, match=r"500 questions of 'coin_flip' hold 0 of the split 'eval'"
    ):
        entries("coin_flip", 1, split="eval", eval_share=0.01, config=few)


# -- entries survive the way -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", TASKS)
def test_an_entry_of_every_task_comes_back_as_it_was(task: str) -> None:
    """As JSON, tuples would be lists, and two tasks would score every answer as wrong."""
    made = reasoning_gym.create_dataset(task, seed=7, size=3)
    entry = made[0]
    assert unmarked(json.loads(json.dumps(marked(entry["metadata"])))) == entry["metadata"]


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=6), st.integers(), st.just("$tuple")), inner, max_size=3
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@given(PLAIN)
def test_marking_and_unmarking_loses_nothing(value: Any) -> None:
    back = unmarked(json.loads(json.dumps(marked(value))))
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", math.inf.__class__, [object()]])
def test_what_cannot_come_back_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        marked(value)


# -- scores ----------------------------------------------------------------------------------

EVALUATED = ["countdown", "n_queens", "simple_integration", "string_insertion"]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_right_answers_score_one_and_the_tag_decides_what_the_answer_is() -> None:
    reward = ReasoningGymReward(timeout_s=30, processes=1)
    for task in ("chain_sum", "arc_agi", "rearc", *EVALUATED):
        rows = entries(task, 2, seed=5)
        said = await reward.score([answered(row, row["answer"]) for row in rows])
        assert [one["score"] for one in said] == [1.0, 1.0], task
        assert [one["answer"] for one in said] == [row["answer"].strip() for row in rows]
    (row,) = entries("chain_sum", 1)
    wrong, none, untagged = await reward.score(
        [
            answered(row, "1000001"),
            answered(row, None),
            RolloutState(messages=[], row=row, response=row["answer"]),
        ]
    )
    assert (wrong["score"], none["score"], untagged["score"]) == (0.0, 0.0, 0.0)
    assert (none["answer"], untagged["answer"]) == (None, None)
    await reward.close()
    whole = ReasoningGymReward(answer_tag=None, processes=1)
    (said,) = await whole.score(
        [RolloutState(messages=[], row=row, response=f" {row['answer']}\n")]
    )
    await whole.close()
    assert said["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> or <answer> 2 </answer>", "2"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("", None),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<answer>a<answer>b</answer>", "b"),
    ],
)
def test_the_last_tagged_text_is_the_answer(text: str, answer: str | None) -> None:
    assert tagged(text, "answer") == answer


async def test_the_task_is_scored_with_the_settings_it_was_made_with() -> None:
    row = {"question": "24?", "answer": "6*4*1*1", "metadata": {"numbers": [6, 4, 1, 1]}}
    small = {**row, "reasoning_gym": {"task": "puzzle24", "config": {"max_value": 5}}}
    large = {**row, "reasoning_gym": {"task": "puzzle24", "config": {}}}
    reward = ReasoningGymReward(timeout_s=30, processes=1)
    said = await reward.score([answered(r, r["answer"]) for r in (small, large)])
    await reward.close()
    assert [one["score"] for one in said] == [0.01, 1.0]


async def test_rows_of_other_origin_name_their_task_in_the_metadata() -> None:
    metadata = {"source_dataset": "chain_sum", "num_terms": 2}
    rows: list[dict[str, Any]] = [
        {"question": "1 + 1 =", "answer": "2", "metadata": json.dumps(metadata)},
        {"question": "1 + 1 =", "answer": "2", "metadata": metadata},
        {"question": "1 + 1 =", "answer": "2", "metadata": {}},
    ]
    reward = ReasoningGymReward(task="basic_arithmetic", timeout_s=30, processes=1)
    assert [one["score"] for one in await reward.score([answered(r, "2") for r in rows])] == [
        1.0
    ] * 3
    for wrong in ({"answer": "2"}, {"answer": "2", "metadata": "{"}, {"metadata": metadata}):
        with pytest.raises(RewardError, match=r"none of reasoning-gym.*it has"):
            await reward.score([answered(wrong, "2")])
    unknown = {**rows[1], "metadata": {"source_dataset": "no_such_task"}}
    with pytest.raises(RewardError, match="'no_such_task' not registered"):
        await reward.score([answered(unknown, "2")])
    await reward.close()


async def test_no_answer_is_evaluated_as_python(tmp_path: Path) -> None:
    here = tmp_path / "was_here"
    attacks = [
        f"open('{here}', 'w')", f"__import__('pathlib').Path('{here}').touch()",
        f"[x for x in [open('{here}', 'w')]]", f"(lambda: open('{here}', 'w'))()",
    ]  # fmt: skip
    reward = ReasoningGymReward(timeout_s=30, processes=2)
    for task in sorted(scorer._LITERALS | scorer._ARITHMETIC):
        (row,) = entries(task, 1)
        for said in await reward.score([answered(row, attack) for attack in attacks]):
            assert said["score"] < 0.1, task
    await reward.close()
    assert not here.exists()


async def test_lists_and_other_forms_of_an_answer_are_still_read() -> None:
    reward = ReasoningGymReward(timeout_s=30, processes=1)
    (row,) = entries("string_insertion", 1)
    (said,) = await reward.score([answered(row, repr(list(row["answer"])))])
    assert said["score"] == 0.1
    row = {
        "question": "?",
        "answer": "2*x + 2",
        "metadata": {},
        "reasoning_gym": {"task": "polynomial_multiplication"},
    }
    (said,) = await reward.score([answered(row, "x + 2 + x")])
    assert said["score"] == 1.0
    (row,) = entries("simple_integration", 1)
    trick = f"Integral({row['metadata']['integrand']}, {row['metadata']['variable']})"
    (said,) = await reward.score([answered(row, trick)])
    assert said["score"] == 0.0
    await reward.close()


@pytest.mark.parametrize(
    "text",
    [
        "2*x**2 + C",
        "(1 + 2)*3 - 4/5",
        "sin(x)*exp(-x)/2",
        "x1 + y",
        "3.5e-2*x",
        "5!",
        "",
        "-log(x, 2)",
        ".5",
    ],
)
def test_arithmetic_passes(text: str) -> None:
    scorer.require_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "open(x)", "x.real", "().__class__", "'a'", '"a"', "[1]",
        "x if y else z", "a;b", "lambda: 1", "x=1", "exec", "f\"{x}\"", "1 .real",
        "x\\y", "print(1)", "x" * 10_001, "é", "a\0",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_does_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|no answer"):
        scorer.require_arithmetic(text)


@pytest.mark.parametrize("task", TASKS)
def test_the_scorer_of_every_task_is_known_to_evaluate_nothing(task: str) -> None:
    for owner in DATASETS[task][0].__mro__:
        scorer._refuse_unknown(task, sys.modules[owner.__module__])


def test_a_scorer_that_evaluates_in_a_new_place_is_refused(tmp_path: Path) -> None:
    assert scorer.evaluating("def f(a):\n  return eval(a) + sympy.sympify(a) + re.compile(a)") == [
        "eval", "sympy.sympify",
    ]  # fmt: skip
    module = sys.modules["reasoning_gym.arithmetic.chain_sum"]
    source = inspect.getsource(module)
    assert scorer.evaluating(source) == []
    assert scorer.evaluating(source.replace("rng.randint(", "eval(", 1)) == ["eval"]
