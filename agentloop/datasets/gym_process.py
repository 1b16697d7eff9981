"""The program that makes rows of a reasoning-gym task: a request in, rows out, as lines of JSON.

A process of its own, because some tasks walk through sets of text: which question comes out then
depends on the hash seed, which a process gets when it starts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from agentloop.datasets.plain import marked
from agentloop.datasets.split import split_of


def rows(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The first `size` entries of the task that belong to the split, with their indices.

    Raises:
        ValueError: so many entries of the split are not to be found.
    """
    gym: Any = importlib.import_module("reasoning_gym")
    size, split, share = request["size"], request["split"], request["eval_share"]
    wanted = 1.0 if split is None else share if split == "eval" else 1.0 - share
    tries = 100 + int(4 * size / wanted)
    # The library's own size bounds nothing but the tasks that lay out all their questions.
    task = gym.create_dataset(
        request["task"], **{"size": tries, **request["config"], "seed": request["seed"]}
    )
    found = 0
    for index in range(tries):
        entry = task[index]
        if split is not None and split_of(entry["question"], share) != split:
            continue
        yield {
            "index": index,
            "question": entry["question"],
            "answer": marked(entry["answer"]),
            "metadata": marked(entry["metadata"]),
        }
        found += 1
        if found == size:
            return
    raise ValueError(
        f"{tries} questions of {request['task']!r} hold {found} of the split {split!r}; "
        f"{size} were asked for"
    )


def main() -> None:
    """Answer the request of standard input; the last line says `done` or `error`."""
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        # Some tasks print dots while they work.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            for row in rows(request):
                answers.write(json.dumps(row) + "\n")
            last = {"done": True}
        except Exception as error:
            last = {"error": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(last) + "\n")


if __name__ == "__main__":
    main()
