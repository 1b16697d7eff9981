"""The fields and tags that a trajectory may have, as one table, and how its rows are aligned.

Owns the names, the shapes and the padding of known fields, and the rule which token an entry
belongs to. Never stores or reads a value, and never refuses a name: a field that is not in the
table is ragged in its last dimension and padded with 0.

Letters: P prompt tokens, R response tokens (tool and environment tokens included), N = P + R,
S rows of a suffix, k alternatives per token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequest

Align: TypeAlias = Literal["full", "shifted", "response", "suffix"]

ALIGNMENTS: Final[tuple[Align, ...]] = ("full", "shifted", "response", "suffix")

Fill: TypeAlias = bool | int | float

IGNORED: Final = -100
"""The label of a token that is not trained on."""


@dataclass(frozen=True, slots=True)
class Field:
    """What is known of one field."""

    name: str
    dtype: str
    """What our own producers write. A partition takes its dtype from the first write."""
    shape: str
    """One row, in the letters of this file; "" for an object or a scalar."""
    align: Align | None
    """Which token entry i of the first dimension belongs to; None where entries are no tokens."""
    ragged_dim: int | None
    """The dimension that differs between rows, 0 or -1 (the last); None for objects."""
    pad: Fill
    """What fills a padded row behind its end."""
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    doc: str


def _table(*fields: Field) -> Mapping[str, Field]:
    return MappingProxyType({field.name: field for field in fields})


_PRODUCER = ("agent loop",)
_WORKERS = ("actor", "reference", "critic")

KNOWN_FIELDS: Final[Mapping[str, Field]] = _table(
    Field(
        "input_ids", "int64", "[N]", "full", -1, 0, _PRODUCER, (*_WORKERS, "reward"),
        "Prompt tokens, then the response region.",
    ),
    Field(
        "labels", "int64", "[N]", "full", -1, IGNORED, _PRODUCER, _WORKERS,
        "The token itself where the policy generated it, else -100. The only carrier of "
        "supervision.",
    ),
    Field(
        "logprobs", "float32", "[N]", "full", -1, 0.0, _PRODUCER, ("actor",),
        "Log-probability at generation; 0.0 where nothing was generated, so at index 0 too.",
    ),
    Field(
        "position_ids", "int64", "[N] or [3, N]", None, -1, 0, _PRODUCER, _WORKERS,
        "Positions of the inputs; three axes for multimodal ones. Ragged in the last dimension "
        "at either rank. They go with inputs, not with predicted tokens: cut, never aligned.",
    ),
    Field(
        "response_model_steps", "int64", "[R]", "response", -1, 0, _PRODUCER, ("actor",),
        "The policy version that generated each response token.",
    ),
    Field(
        "routed_experts", "uint16", "[N-1, layers*topk]", "shifted", 0, 0, _PRODUCER, ("actor",),
        "Row i: the experts that input token i was routed to on the way to token i + 1; the last "
        "token was never an input. int64 where an id needs more than 16 bits.",
    ),
    Field(
        "teacher_ids", "int64", "[S] or [S, k]", "suffix", 0, 0, ("teacher",), ("actor",),
        "Tokens that the teacher scored, for the last S tokens of the row.",
    ),
    Field(
        "teacher_logprobs", "float32", "[S] or [S, k]", "suffix", 0, 0.0, ("teacher",), ("actor",),
        "The teacher's log-probabilities of `teacher_ids`.",
    ),
    Field(
        "multi_modal_inputs", "object", "", None, None, 0, _PRODUCER, _WORKERS,
        "Map of tensors. What a group shares lies once under the prompt key that the tag "
        "`shared` names.",
    ),
    Field(
        "messages", "object", "", None, None, 0, _PRODUCER, ("reward", "dump"),
        "The conversation as chat messages.",
    ),
    Field(
        "reward", "object", "", None, None, 0, ("reward",), ("dump",),
        "Map with `score` and whatever else the judge said.",
    ),
    Field(
        "extra", "object", "", None, None, 0, _PRODUCER, ("dump",),
        "Map of anything else that a producer wants kept.",
    ),
    Field(
        "rm_scores", "float32", "[N]", "full", -1, 0.0, ("reward",), ("advantage",),
        "Zeros, with the score at the last token.",
    ),
    Field(
        "old_logprobs", "float32", "[N]", "full", -1, 0.0, ("actor",), ("actor", "advantage"),
        "Log-probability under the weights at the start of the step.",
    ),
    Field(
        "ref_logprobs", "float32", "[N]", "full", -1, 0.0, ("reference",), ("actor", "advantage"),
        "Log-probability under the reference model.",
    ),
    Field(
        "entropy", "float32", "[N]", "full", -1, 0.0, ("actor",), ("metrics",),
        "Entropy of the distribution that the token was drawn from.",
    ),
    Field(
        "values", "float32", "[N]", "full", -1, 0.0, ("critic",), ("advantage", "critic"),
        "The critic's value of the state in which the token was drawn.",
    ),
    Field(
        "token_level_rewards", "float32", "[N]", "full", -1, 0.0, ("advantage",), ("critic",),
        "Scores less the KL penalty, where that is part of the reward.",
    ),
    Field(
        "advantages", "float32", "[N]", "full", -1, 0.0, ("advantage",), ("actor",),
        "Only where advantages differ by token (GAE) or were asked for; a scalar one is the tag "
        "`advantage`.",
    ),
    Field(
        "returns", "float32", "[N]", "full", -1, 0.0, ("advantage",), ("critic",),
        "Target of the critic; written with `advantages`.",
    ),
)  # fmt: skip
"""Every field that our own stages write."""

DERIVED_FIELDS: Final[Mapping[str, Field]] = _table(
    Field(
        "prompts", "int64", "[P]", None, -1, 0, (), ("reward", "metrics"),
        "The first `prompt_len` of `input_ids`.",
    ),
    Field(
        "responses", "int64", "[R]", "response", -1, 0, (), ("reward", "metrics"),
        "The rest of `input_ids`.",
    ),
    Field(
        "response_mask", "int64", "[R]", "response", -1, 0, (), ("advantage", "metrics"),
        "1 where `labels` supervise the token.",
    ),
    Field(
        "loss_mask", "int64", "[R]", "response", -1, 0, (), ("actor", "critic"),
        "The same as `response_mask`.",
    ),
    Field(
        "attention_mask", "int64", "[N]", "full", -1, 0, (), _WORKERS,
        "Ones, as long as the row.",
    ),
)  # fmt: skip
"""Fields that follow from the known ones and are not stored by our own stages."""


def ragged_dim(name: str, rank: int) -> int | None:
    """Which dimension of a row of this field is ragged: the declared one, else the last.

    None for rank 0. The schema that a partition fixed at its first write stands above this.
    """
    if rank == 0:
        return None
    field = KNOWN_FIELDS.get(name)
    return 0 if field is not None and field.ragged_dim == 0 else rank - 1


def pad_value(name: str) -> Fill:
    """What a padded container of this field holds behind the end of a row; 0 if unknown."""
    field = KNOWN_FIELDS.get(name)
    return 0 if field is None else field.pad


@dataclass(frozen=True, slots=True)
class Tag:
    """What is known of one tag."""

    name: str
    type: str
    doc: str


def _tags(*tags: tuple[str, str, str]) -> Mapping[str, Tag]:
    return MappingProxyType({name: Tag(name, kind, doc) for name, kind, doc in tags})


TRAJECTORY_STATUSES: Final = ("completed", "failed", "aborted", "filtered", "expired")
PROMPT_STATUSES: Final = ("pending", "running", "finished", "failure")
"""In the order of a prompt's life; the last two are final."""

TRAJECTORY_TAGS: Final[Mapping[str, Tag]] = _tags(
    ("uid", "str", "the prompt that it answers"),
    ("session_id", "int", "which run of the agent loop for that prompt"),
    ("index", "int", "which of the trajectories of its session"),
    ("attempt", "int", "the begin of the group that it belongs to"),
    ("status", "str", "one of TRAJECTORY_STATUSES"),
    ("prompt_len", "int", "P"),
    ("response_len", "int", "R, tool and environment tokens included"),
    ("seq_len", "int", "N; a planner packs N - 1"),
    ("policy_len", "int", "supervised entries of labels[1:]"),
    ("num_turns", "int", "turns of the conversation"),
    ("global_steps", "int", "trainer step at submission"),
    ("min_global_steps", "int", "oldest policy version that generated a token"),
    ("max_global_steps", "int", "newest policy version that generated a token"),
    ("policy_spans", "list", "run lengths [[step, supervised tokens], ...] over the response"),
    ("score", "float", "the reward's score"),
    ("advantage", "float", "scalar advantage"),
    ("finish_reason", "str", "stop, length, tool_calls, abort, error or timeout"),
    ("error_msg", "str", "why a session failed"),
    ("is_padding", "bool", "a filler row, left out of every metric"),
    ("task_name", "str", "the task that the prompt came from"),
    ("data_source", "str", "the data set that the prompt came from"),
    ("ids_source", "str", "where the token ids came from: the engine, or text tokenized again"),
    ("logprob_kind", "str", "which distribution the log-probs are of: raw, processed, recomputed"),
    ("group_generate_time_s", "float", "wall time of generating the whole group"),
    ("shared", "str", "key under which the values lie that its group shares"),
    ("position_layout", "str", "1d or mrope_3d"),
    ("has_rollout_logprobs", "bool", "`logprobs` was written"),
    ("has_routed_experts", "bool", "`routed_experts` was written"),
)

PROMPT_TAGS: Final[Mapping[str, Tag]] = _tags(
    ("is_prompt", "bool", "true: the row is a prompt and not a trajectory"),
    ("status", "str", "one of PROMPT_STATUSES"),
    ("global_steps", "int", "trainer step at submission"),
    ("uid", "str", "its own key"),
    ("n", "int", "how many sessions its group has"),
    ("attempt", "int", "the begin of its group that is open now"),
)

RESERVED: Final = "dataplane."
"""How the names begin of tags that the plane itself gives rows, and that no put may bring."""
LOST: Final = "dataplane.lost"
"""Of a row that lost fields with the value store that held them: their names, sorted. It is not
offered, counted or waited for any more where a `where` does not name this tag."""
LOST_ROWS: Final = "dataplane.lost_rows"
"""Of a prompt: how many trajectories of its group were lost, until the group begins anew."""
LOST_STORES: Final = "dataplane.lost_stores"
"""Of a row that lost fields: the value stores that held them, sorted."""
LOST_AT: Final = "dataplane.lost_at"
"""Of a row that lost fields: when it lost the first of them, in seconds since 1970."""

PLANE_TAGS: Final[Mapping[str, Tag]] = _tags(
    (LOST, "list", "the fields of the row that are gone"),
    (LOST_ROWS, "int", "of a prompt: trajectories of its group that were lost"),
    (LOST_STORES, "list", "the value stores that held those fields"),
    (LOST_AT, "float", "when the first of them was lost, in seconds since 1970"),
)
"""What the plane itself says of a row."""


_Row = TypeVar("_Row")


def align(
    values: _Row,
    from_: Align,
    to: Align,
    *,
    prompt_len: int,
    total_len: int,
    fill: Fill,
    name: str = "values",
) -> _Row:
    """One row's per-token values in another alignment, as the container that they came in.

    Entry i belongs to token i (`full`, length N = total_len), to token i + 1 (`shifted`, N - 1),
    to token prompt_len + i (`response`, N - prompt_len), or to token N - S + i (`suffix`, any
    length S up to N). All of them end at the last token, so a conversion only cuts entries off
    the front or puts `fill` there. To `suffix` nothing needs doing: every alignment is one.

    What is cut belongs to tokens that the new alignment has no place for, and is dropped
    whatever it holds: index 0 of a canonical row has no label and no log-prob, and neither has
    its prompt. There and back is the same row if it held `fill` there.

    Takes lists, numpy arrays and torch tensors; the first dimension counts tokens. The result may
    share memory with `values`. Inputs are not aligned like this: next-token layout pairs
    input_ids[:-1] with what `align` makes of labels, log-probs and advantages.

    Example: prompt of 3, response of 2, log-probs a and b.

        align([0, 0, 0, a, b], "full", "shifted", prompt_len=3, total_len=5, fill=0) == [0, 0, a, b]
        align([a, b], "response", "full", prompt_len=3, total_len=5, fill=0) == [0, 0, 0, a, b]

    Raises:
        InvalidRequest: the lengths do not fit each other, or the dtype cannot hold `fill`.
    """
    total = _count("total_len", total_len)
    prompt = _count("prompt_len", prompt_len)
    if prompt > total:
        raise InvalidRequest(f"{name}: prompt_len {prompt} is more than total_len {total}")
    have = _rows(values, name)
    due = _aligned_len(from_, prompt, total)
    if due is None and have > total:
        raise InvalidRequest(f"{name}: a suffix of {have} entries in a row of total_len {total}")
    if due is not None and have != due:
        raise InvalidRequest(
            f"{name}: {have} entries, but {from_!r} alignment has {due} "
            f"(prompt_len {prompt}, total_len {total})"
        )
    want = _aligned_len(to, prompt, total)
    if want is None or want == have:
        return values
    if want < have:
        return cast("Any", values)[have - want :]
    return _fill_front(values, want - have, fill, name)


def _aligned_len(alignment: Align, prompt: int, total: int) -> int | None:
    if alignment == "full":
        return total
    if alignment == "shifted":
        return max(total - 1, 0)
    if alignment == "response":
        return total - prompt
    if alignment == "suffix":
        return None
    raise InvalidRequest(f"unknown alignment {alignment!r}; one of {', '.join(ALIGNMENTS)}")


def _fill_front(values: _Row, missing: int, fill: Fill, name: str) -> _Row:
    if isinstance(values, (list, tuple)):
        entries = cast("list[object]", list(cast("Any", values)))
        if any(isinstance(entry, (list, tuple)) for entry in entries):
            raise InvalidRequest(f"{name}: nested lists cannot be filled; pass an array")
        filled = [fill] * missing + entries
        return cast("_Row", filled if isinstance(values, list) else tuple(filled))
    row = cast("Any", values)  # numpy or torch, told apart by new_full: torch need not be here
    shape = (missing + len(row), *row.shape[1:])
    try:
        if isinstance(values, np.ndarray):
            with np.errstate(invalid="ignore"):  # NaN as an integer: found below
                longer: Any = np.full(shape, fill, cast("npt.NDArray[Any]", values).dtype)
        else:
            longer = row.new_full(shape, fill)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidRequest(f"{name}: fill {fill!r} does not fit {row.dtype}: {error}") from None
    # Integer types wrap or truncate without a word; a label of -100 must not turn into 156.
    if 0 not in shape and not _is_close(longer[(0,) * len(shape)], fill):
        raise InvalidRequest(f"{name}: fill {fill!r} does not fit {row.dtype}")
    longer[missing:] = row
    return longer


def _is_close(stored: Any, fill: Fill) -> bool:
    """The fill survived, up to the rounding of an 8-bit float."""
    value = complex(stored)
    return math.isclose(value.real, fill, rel_tol=0.1) or (math.isnan(value.real) and fill != fill)


def _count(name: str, value: SupportsIndex) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise InvalidRequest(f"{name} is a number of tokens, not {value!r}")
    return count


def _rows(values: object, name: str) -> int:
    shape = cast("tuple[int, ...] | None", getattr(values, "shape", None))
    if shape == () or (shape is None and not isinstance(values, (list, tuple))):
        raise InvalidRequest(
            f"{name}: a list, an array or a tensor of one entry per token is due, "
            f"not {'a scalar' if shape == () else type(values).__name__}"
        )
    return len(cast("Any", values))
