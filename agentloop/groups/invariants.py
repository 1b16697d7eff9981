"""What holds for every row that agent loops publish: what is wrong with those of a listing.

Says what the fields of DESIGN's table promise to whoever trains on them. A check for operators and
tests; nothing on the path of a trajectory needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentloop.trajectory.state import Status, trajectory_key
from dataplane import AsyncClient, Listing
from dataplane.fields import IGNORED, PROMPT_STATUSES, TRAJECTORY_STATUSES

_FIELDS = ("input_ids", "labels", "logprobs", "response_model_steps", "routed_experts")


async def wrong_rows(client: AsyncClient, listing: Listing) -> list[str]:
    """What is wrong with the rows of a partition, one sentence per row; nothing if all is right."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for i, names in enumerate(listing.fields):
        alike.setdefault(tuple(name for name in _FIELDS if name in names), []).append(i)
    keys, tags = listing.keys, listing.tags
    prompts = {row["uid"]: row for row in tags if row.get("is_prompt")}
    wrong: list[str] = []
    for names, places in alike.items():
        columns: Mapping[str, Any] = {}
        if names:
            rows = await client.kv_batch_get(
                [keys[i] for i in places], listing.partition_id, names, layout="list"
            )
            columns = rows.fields
        for at, i in enumerate(places):
            fields = {name: column[at] for name, column in columns.items()}
            said = what_is_wrong(keys[i], tags[i], fields, prompts)
            if said is not None:
                wrong.append(f"key {keys[i]!r}: {said}")
    return wrong


def what_is_wrong(
    key: str,
    tags: Mapping[str, Any],
    fields: Mapping[str, Any],
    prompts: Mapping[Any, Mapping[str, Any]],
) -> str | None:
    """What is wrong with one row; None if nothing is. `fields` are tensors of one row each."""
    if tags.get("is_prompt"):
        return _wrong_prompt(key, tags)
    return _wrong_trajectory(key, tags, prompts) or (
        _wrong_fields(tags, fields) if _has_row(tags) else None
    )


def _has_row(tags: Mapping[str, Any]) -> bool:
    """Whether it is completed with tokens: an evaluation counts what failed as completed too."""
    return tags["status"] == Status.COMPLETED and not (
        "error_msg" in tags and "seq_len" not in tags
    )


def _wrong_prompt(key: str, tags: Mapping[str, Any]) -> str | None:
    if tags.get("uid") != key:
        return f"uid is {tags.get('uid')!r}"
    if tags.get("status") not in PROMPT_STATUSES:
        return f"status is {tags.get('status')!r}"
    if type(tags.get("attempt")) is int or tags["status"] == "pending":
        return None
    if tags["status"] == "failure" and tags.get("error_msg"):
        return None  # it was never let in, and says why
    return "it has begun and names no attempt"


def _wrong_trajectory(
    key: str, tags: Mapping[str, Any], prompts: Mapping[Any, Mapping[str, Any]]
) -> str | None:
    for name in ("uid", "session_id", "index", "status", "attempt", "global_steps", "task_name"):
        if name not in tags:
            return f"tag {name!r} is missing"
    if trajectory_key(tags["uid"], tags["session_id"], tags["index"]) != key:
        return "uid, session_id and index are another key's"
    if tags["status"] not in TRAJECTORY_STATUSES:
        return f"status is {tags['status']!r}"
    prompt = prompts.get(tags["uid"])
    if prompt is None:
        return "its prompt is not there"
    if prompt.get("attempt") != tags["attempt"]:
        return f"it is of attempt {tags['attempt']}, its group of {prompt.get('attempt')}"
    if tags["session_id"] >= prompt["n"]:
        return f"session {tags['session_id']} of a group of {prompt['n']}"
    if tags["status"] == Status.FAILED and not tags.get("error_msg"):
        return "it failed and does not say why"
    return None


def _wrong_fields(tags: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    for name in ("prompt_len", "response_len", "seq_len", "policy_len", "finish_reason"):
        if name not in tags:
            return f"tag {name!r} is missing"
    if "input_ids" not in fields or "labels" not in fields:
        return "it is completed and has no input_ids or labels"
    size, prompt, response = tags["seq_len"], tags["prompt_len"], tags["response_len"]
    ids, labels = fields["input_ids"].tolist(), fields["labels"].tolist()
    if prompt + response != size or len(ids) != size or len(labels) != size:
        return f"{len(ids)} ids and {len(labels)} labels, but {prompt} + {response} tokens"
    if any(label not in (IGNORED, token) for label, token in zip(labels, ids, strict=True)):
        return "a label is neither its token nor -100"
    if any(label != IGNORED for label in labels[:prompt]):
        return "a token of the prompt is supervised"
    if sum(label != IGNORED for label in labels[1:]) != tags["policy_len"]:
        return f"policy_len is {tags['policy_len']}"
    if bool(tags["has_rollout_logprobs"]) != ("logprobs" in fields):
        return "has_rollout_logprobs is not so"
    if "logprobs" in fields:
        logprobs = fields["logprobs"].tolist()
        if len(logprobs) != size:
            return f"{len(logprobs)} log-probs for {size} tokens"
        if any(p != 0.0 and label == IGNORED for p, label in zip(logprobs, labels, strict=True)):
            return "a token that was not generated has a log-prob"
        if any(not -1e4 < p <= 1e-4 for p in logprobs):
            return "a log-prob is not one"
    steps: list[int] = []
    if "response_model_steps" in fields:
        steps = fields["response_model_steps"].tolist()
    if steps:
        if len(steps) != response:
            return f"{len(steps)} policy versions for {response} response tokens"
        if [min(steps), max(steps)] != [tags.get("min_global_steps"), tags.get("max_global_steps")]:
            return "min_global_steps and max_global_steps are not those of its tokens"
        if sum(count for _, count in tags["policy_spans"]) != sum(
            label != IGNORED for label in labels[size - response :]
        ):
            return "policy_spans do not add up to its supervised tokens"
    return None
