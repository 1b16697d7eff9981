"""Which split a question belongs to, by its text alone: equal questions never part. Pure."""

from __future__ import annotations

import hashlib
from typing import Final, Literal, TypeAlias

Split: TypeAlias = Literal["train", "eval"]

SPLITS: Final[tuple[Split, ...]] = ("train", "eval")


def split_of(question: str, eval_share: float) -> Split:
    """The split of a question; about `eval_share` of all questions are for evaluation.

    The same text is in the same split for every seed, size and run, and stays in `eval` when the
    share grows. Space around and between words does not count.
    """
    text = " ".join(question.split()).encode("utf-8", "surrogatepass")
    position = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return "eval" if position < eval_share * 2.0**64 else "train"
