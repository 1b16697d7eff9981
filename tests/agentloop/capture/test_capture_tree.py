"""The tree of turns: what goes on from what, whatever the order; and what is trained of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.capture.ending import Identity, Verdict, ended
from agentloop.capture.lines import head_line, of_lines, turn_line
from agentloop.capture.run import Run
from agentloop.capture.tree import Tree, shared_messages
from agentloop.capture.turn import Turn, of_plain, to_plain
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.state import RolloutState, Status
from dataplane.fields import IGNORED

IDENTITY = Identity("run", "uid", 3)
WON = Verdict({"score": 1.0})


def placed(tree: Tree, number: int, prompt: list[int], made: list[int], **changes: Any) -> Turn:
    """A turn that was answered with `made`, where the tree puts it."""
    ids = np.array(prompt, np.int32)
    place = tree.place(ids, number)
    given: dict[str, Any] = {
        "logprobs": np.array([-0.5 - token for token in made], np.float32),
        "spans": ((2, len(made)),) if made else (),
        "finish_reason": "stop",
        "messages": [{"role": "user", "content": str(prompt)}],
        **changes,
    }
    return Turn(
        number=number,
        parent=place.parent,
        tokens=np.concatenate([ids[place.begin :], np.array(made, np.int32)]),
        begin=len(prompt) - place.begin,
        logprob_kind="raw",
        sampling={"temperature": 1.0},
        kept=0,
        extra={},
        **given,
    )


def grown(*turns: tuple[int, list[int], list[int]]) -> Tree:
    tree = Tree()
    for number, prompt, made in turns:
        tree.add(placed(tree, number, prompt, made))
    return tree


def states(tree: Tree, verdict: Verdict = WON) -> list[RolloutState]:
    return ended(IDENTITY, tree, (), verdict).states


def paths(tree: Tree) -> list[list[int]]:
    return [[turn.number for turn in branch.path] for branch in tree.branches()]


def test_a_turn_that_begins_with_the_last_one_goes_on_with_its_trajectory() -> None:
    tree = grown((0, [1, 2], [10, 11]), (1, [1, 2, 10, 11, 5], [12]))
    (state,) = states(tree)
    assert state.canonical is not None
    assert state.canonical.input_ids == [1, 2, 10, 11, 5, 12]
    assert state.canonical.labels == [IGNORED, IGNORED, 10, 11, IGNORED, 12]
    assert state.canonical.logprobs == [0.0, 0.0, -10.5, -11.5, 0.0, -12.5]
    assert (state.status, state.num_turns, state.prompt_ids) == (Status.COMPLETED, 2, [1, 2])
    assert state.response_model_steps == [2, 2, 2, 2]


def test_a_prompt_that_was_tokenized_anew_begins_a_branch_and_says_where() -> None:
    tree = grown((0, [1, 2], [10, 11]), (1, [1, 2, 10, 99, 5], [12]))
    (first, second) = tree.branches()
    assert paths(tree) == [[0], [1]]
    assert (first.differs_at, first.differs_from) == (None, None)
    assert (second.differs_at, second.differs_from, second.shared) == (3, 0, 0)
    assert states(tree)[1].extra["capture"]["differs_at"] == 3


def test_turns_that_share_a_turn_train_it_once() -> None:
    tree = grown(
        (0, [1], [10, 11]), (1, [1, 10, 11, 5], [12]), (2, [1, 10, 11, 6], [13]),
    )  # fmt: skip
    assert paths(tree) == [[0, 1], [0, 2]]
    one, other = states(tree)
    assert one.canonical is not None
    assert other.canonical is not None
    assert one.canonical.labels == [IGNORED, 10, 11, IGNORED, 12]
    assert other.canonical.input_ids == [1, 10, 11, 6, 13]
    assert other.canonical.labels == [IGNORED, IGNORED, IGNORED, IGNORED, 13]
    assert other.canonical.logprobs == [0.0, 0.0, 0.0, 0.0, -13.5]
    branch = tree.branches()[1]
    assert (branch.differs_at, branch.differs_from, branch.shared) == (3, 1, 1)


def test_the_same_question_twice_is_two_trajectories() -> None:
    tree = grown((0, [1, 2], [10]), (1, [1, 2], [10]), (2, [1, 2, 10, 3], [11]))
    assert paths(tree) == [[0, 2], [1]]
    assert tree.branches()[1].differs_at == 2


def test_a_turn_goes_on_from_the_longest_that_it_begins_with() -> None:
    tree = grown((0, [1], [10]), (1, [1], [10, 11]), (2, [1, 10, 11, 4], [12]))
    assert paths(tree) == [[0], [1, 2]]


def test_a_turn_of_no_tokens_is_no_end() -> None:
    tree = grown((0, [1], [10]), (1, [1, 10, 4], []))
    (state,) = states(tree)
    assert state.canonical is not None
    assert state.canonical.input_ids == [1, 10]


def test_a_branch_on_which_nothing_was_generated_fails_unless_others_are_there() -> None:
    (state,) = states(grown((0, [1], [])))
    assert (state.status, state.failure) == (Status.FAILED, "empty")
    made = ended(IDENTITY, grown((0, [1], []), (1, [2], [9])), (), WON)
    assert [state.index for state in made.states] == [1]
    assert [(one.name, one.reason) for one in made.rejected] == [
        ("branch-0", "the policy generated nothing")
    ]


def test_a_run_without_a_turn_fails_and_says_so() -> None:
    (state,) = states(Tree())
    assert state.status is Status.FAILED
    assert trajectory_tags(state)["error_msg"] == "the agent asked the model nothing"
    assert trajectory_fields(state) == {}


@pytest.mark.parametrize(
    ("finish", "status"), [("abort", Status.ABORTED), ("error", Status.FAILED), ("length", None)]
)
def test_what_the_agent_says_of_the_end_counts(finish: str, status: Status | None) -> None:
    tree = grown((0, [1, 2], [10, 11]))
    (state,) = states(tree, Verdict({"score": 1.0}, finish, {}, "it broke"))
    assert state.status is (status or Status.COMPLETED)
    tags = trajectory_tags(state)
    assert tags["finish_reason"] == finish
    assert ("score" in tags) is (status is None)
    assert ("input_ids" in trajectory_fields(state)) is (finish != "error")


def test_a_turn_that_the_server_aborted_aborts_its_trajectory_alone() -> None:
    tree = Tree()
    tree.add(placed(tree, 0, [1], [10], finish_reason="abort"))
    tree.add(placed(tree, 1, [2], [11]))
    assert [state.status for state in states(tree)] == [Status.ABORTED, Status.COMPLETED]


def test_versions_that_nobody_says_are_not_made_up() -> None:
    tree = Tree()
    tree.add(placed(tree, 0, [1], [10]))
    tree.add(placed(tree, 1, [1, 10, 2], [11], spans=None))
    (state,) = states(tree)
    assert state.response_model_steps == []
    assert state.meta is not None
    assert state.meta.min_global_steps is None


def test_what_others_go_on_from_is_not_removed() -> None:
    tree = grown((0, [1], [10]), (1, [1, 10, 2], [11]))
    assert not tree.remove(0)
    assert tree.remove(1)
    assert not tree.remove(1)
    assert tree.remove(0)
    assert len(tree) == 0


# -- whatever comes in whatever order --------------------------------------------------------------

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of turns, of which each goes on from an earlier one or from nothing."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from([None, *range(len(turns))]))
        prompt = [] if before is None else turns[before][0] + turns[before][1]
        turns.append((prompt + draw(tokens), draw(tokens)))
    return turns


@given(conversations())
def test_every_token_is_trained_once_and_every_row_is_a_turn(
    turns: list[tuple[list[int], list[int]]],
) -> None:
    tree = grown(*((number, *turn) for number, turn in enumerate(turns)))
    made = states(tree)
    supervised = sum(
        label != IGNORED
        for state in made
        for label in (state.canonical.labels if state.canonical else ())
    )
    assert supervised == sum(len(completion) for _, completion in turns)
    whole = [prompt + completion for prompt, completion in turns]
    for state in made:
        assert state.status is Status.COMPLETED, state.error_msg
        assert state.canonical is not None
        assert state.canonical.input_ids in whole
    assert [state.index for state in made] == list(range(len(made)))


@given(conversations(), st.randoms(use_true_random=False))
def test_the_order_of_answers_makes_no_difference(
    turns: list[tuple[list[int], list[int]]], chance: random.Random
) -> None:
    """A turn is answered after the one that it goes on from, and else at any time."""
    first = grown(*((number, *turn) for number, turn in enumerate(turns)))
    needs = {turn.number: turn.parent for turn in first}
    other, left = Tree(), list(needs)
    while left:
        ready = [number for number in left if needs[number] not in left]
        number = chance.choice(ready)
        left.remove(number)
        other.add(placed(other, number, *turns[number]))
    # Of turns with the very same tokens either may have been seen by what follows.
    rows = [sorted(map(_row, states(tree))) for tree in (first, other)]
    if (
        len({(tuple(prompt), tuple(made)) for prompt, made in turns})
        == len(turns)
        == len({tuple(prompt + made) for prompt, made in turns})
    ):
        assert paths(first) == paths(other)
        assert rows[0] == rows[1]
    assert sum(row[1] for row in rows[0]) == sum(row[1] for row in rows[1])


def _row(state: RolloutState) -> tuple[list[int], int]:
    assert state.canonical is not None
    labels = state.canonical.labels
    return state.canonical.input_ids, sum(label != IGNORED for label in labels)


def test_a_conversation_takes_memory_for_its_tokens_once() -> None:
    tree, sizes, prompt = Tree(), [], list[int]()
    messages: list[dict[str, Any]] = []
    for number in range(40):
        prompt += [7] * 100
        ids = np.array(prompt, np.int32)
        messages.append({"role": "user", "content": "x" * 500})
        known = shared_messages(tree.dialogue(tree.place(ids, number).parent), messages)
        turn = placed(tree, number, prompt, [8] * 100, messages=messages[known:])
        turn = replace(turn, kept=known)
        messages = [*messages, {"role": "assistant", "content": "y" * 500}]
        turn = replace(turn, messages=messages[known:])
        tree.add(turn)
        sizes.append(turn.nbytes)
        prompt += [8] * 100
    assert max(sizes) < 1.1 * min(sizes)
    assert tree.dialogue(39) == messages
    assert tree.sequence(39).tolist() == prompt


# -- the plain form --------------------------------------------------------------------------------


def test_a_turn_is_the_same_after_its_plain_form() -> None:
    tree = Tree()
    turn = placed(tree, 4, [1, 2], [70000, 11], spans=((2, 1), (3, 1)), digest="d", answer="{}")
    again = of_plain(to_plain(turn))
    assert again.tokens.tolist() == [1, 2, 70000, 11]
    assert again.logprobs.tobytes() == turn.logprobs.tobytes()
    assert (again.number, again.begin, again.spans) == (4, 2, ((2, 1), (3, 1)))
    assert (again.digest, again.answer, again.versions) == ("d", "{}", [2, 3])


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": "AA=="}, {"tokens": "not base64"}, {"logprobs": ""}, {"begin": -1},
        {"begin": 9}, {"spans": [[1, 7]]}, {"number": "0"}, {"messages": 3}, {"sampling": None},
    ],
)  # fmt: skip
def test_a_damaged_plain_form_is_refused(damage: dict[str, Any]) -> None:
    plain = to_plain(placed(Tree(), 0, [1, 2], [10, 11])) | damage
    with pytest.raises(ValueError, match="turn"):
        of_plain(plain)


def test_a_run_is_the_same_after_its_lines() -> None:
    run = Run(IDENTITY, bytes(32), 5)
    for number, prompt in itertools.islice(enumerate([[1], [1, 10, 2], [7]]), 3):
        run.add(placed(run.tree, number, prompt, [10 + number]))
    lines = [head_line(run), *(turn_line(turn) for turn in run.tree)]
    again = of_lines(lines)
    assert again.shown() == run.shown()
    assert (again.key, again.version, again.next_number) == (run.key, 5, 3)
