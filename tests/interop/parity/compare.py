"""What is unlike between two sides' answers, as lines that say where."""

from __future__ import annotations

import json
from typing import Any

SHOWN = 300


def unlike(peer: Any, dropin: Any, where: str = "") -> list[str]:
    """One line per place that differs; none where the answers are alike.

    Alike is meant text by text: 1 is unlike 1.0 and True, a list is unlike a tuple. Only an error
    may differ: the drop-in's may be of a subclass of the peer's.
    """
    if isinstance(peer, dict) and isinstance(dropin, dict):
        if "raises" in peer and "raises" in dropin:
            alike = peer["raises"] in dropin["is a"]
            return [] if alike else [_line(where, peer["raises"], " < ".join(dropin["is a"][:-3]))]
        if peer.keys() == dropin.keys():
            return [
                line for name in sorted(peer)
                for line in unlike(peer[name], dropin[name], f"{where}/{name}")
            ]  # fmt: skip
    if isinstance(peer, list) and isinstance(dropin, list) and len(peer) == len(dropin):
        return [
            line for i, pair in enumerate(zip(peer, dropin, strict=True))
            for line in unlike(*pair, f"{where}/{i}")
        ]  # fmt: skip
    if _text(peer) == _text(dropin):
        return []
    return [_line(where, _text(peer), _text(dropin))]


def differences(peer: dict[str, Any], dropin: dict[str, Any]) -> dict[str, list[str]]:
    """The cases that are unlike, each with its lines."""
    assert peer.keys() == dropin.keys(), "the sides ran different cases"
    found = {name: unlike(peer[name], dropin[name]) for name in peer}
    return {name: lines for name, lines in found.items() if lines}


def broken(answers: dict[str, Any]) -> dict[str, str]:
    """The cases that ended in an error which they did not ask for."""
    return {
        name: answer["where"] for name, answer in answers.items()
        if isinstance(answer, dict) and "broke" in answer
    }  # fmt: skip


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _line(where: str, peer: str, dropin: str) -> str:
    return f"{where or '/'}: peer {_cut(peer)}, drop-in {_cut(dropin)}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"
