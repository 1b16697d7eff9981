"""A clear whose answer was lost has one effect: its repetition removes nothing that came since."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.client.core import Core
from dataplane.client.tags import clear_rows
from dataplane.wire.channel import Broken


def drive(client: Any, verb: Any, lose_answer_of: str, meanwhile: Any) -> Any:
    """Run a verb through the client's own driver, losing one answer after it was given."""
    lost = False

    def wrapped() -> Any:
        nonlocal lost
        effect = next(verb)
        while True:
            try:
                value = yield effect
            except BaseException as error:
                effect = verb.throw(error)
                continue
            try:
                if not lost and getattr(effect, "verb", None) == lose_answer_of:
                    lost = True
                    meanwhile()
                    effect = verb.throw(Broken("the answer was lost"))
                else:
                    effect = verb.send(value)
            except StopIteration as end:
                return end.value

    return client._drive(wrapped(), client._deadline(None))


@pytest.mark.parametrize("by", ["keys", "where"])
def test_a_repeated_clear_removes_nothing_that_was_put_since(by: str) -> None:
    import dataplane

    with dataplane.init({"host": "embedded"}, name=f"repeated-clear-{by}") as client:
        core: Core = client._core
        client.kv_batch_put(["a", "b"], "p", None, [{"v": 1}, {"v": 1}])
        keys, where = (["a", "b"], None) if by == "keys" else (None, {"v": 1})
        verb = clear_rows(core, keys, "p", where, False, client._deadline(None))
        removed = drive(client, verb, "clear", lambda: client.kv_put("a", "p", None, {"v": 1}))
        assert removed == 2
        assert client.kv_list("p").keys == ["a"]
