"""A value store dies while clients copy into its memory and look at it: bytes stay whose they were.

What a client has mapped it can still write to and read, whatever became of the store: so nobody
may ever be given that memory again.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.codec.encoded import Encoded
from dataplane.config import Config
from tests.deadline import eventually
from tests.faults.processes import Process, Speaker
from tests.kills.planes import Killed
from tests.kills.rows import LARGE, Others, check, content, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

TRIALS = (0, 1, 2)


def put_pausing_in_the_copy(
    speaker: Speaker, joined: Joined, config: Config, partition: str, nbytes: int
) -> None:
    """Put a row, pause in the midst of its copy, go on; and at last, whoever holds that memory by
    now, write once more all over what was reserved first."""
    whole = Encoded.write_into
    targets: list[memoryview] = []

    def pausing(self: Encoded, target: memoryview) -> None:
        if not targets:
            targets.append(target)
            np.frombuffer(target, np.uint8)[: self.nbytes // 2] = 0x55
            speaker.say("copying")
            speaker.hear()
        whole(self, target)

    Encoded.write_into = pausing
    client = Client(joined, config)
    fields, tags = {"x": content("late", nbytes)}, {"nbytes": nbytes}
    made = client.kv_put("late", partition, fields, tags, if_absent=True)
    speaker.say(made.revision)
    speaker.hear()
    targets[0][:] = b"\xff" * len(targets[0])
    speaker.say("written over")
    speaker.hear()


def files(plane: Killed) -> set[str]:
    """Names of the segment files that are there."""
    return {path.name for path in plane.segments.glob("*/segment-*")}


@pytest.mark.parametrize("trial", TRIALS)
def test_a_copy_that_goes_on_after_its_store_died_writes_over_nobodys_bytes(
    killed: Killed, trial: int, seed: int
) -> None:
    chance = random.Random(seed + trial)
    partition, name = f"copy-{trial}", f"copy-{trial}-others"
    standing = [f"s{i}" for i in range(12)]
    put(killed.client, partition, standing, chance.randrange(1000, 2 * LARGE))
    cleared = [key for key in standing if chance.random() < 0.5]
    kept = [key for key in standing if key not in cleared]
    joined = killed.elsewhere()
    nbytes = chance.randrange(LARGE, 10 * LARGE)
    with (
        Process(put_pausing_in_the_copy, joined, killed.config, partition, nbytes) as writer,
        killed.another() as client,
    ):
        assert writer.says() == "copying"
        before = files(killed)
        assert killed.values()["blocks_reserved"] == 1
        with Others(client, name, seed + trial) as others:
            others.go_on(1)
            killed.kill("values")
            # Nobody has it reserved any more; and nobody else is given it.
            assert killed.client.kv_clear(cleared, partition) == len(cleared)
            others.go_on()
            writer.hears("go on")
            revision = writer.says()
            others.go_on()
            writer.hears("once more")
            assert writer.says() == "written over"
            others.go_on()
            check(killed.client, partition, [*kept, "late"])
        # Its second effect would have been AlreadyWritten.
        listing = killed.client.kv_list(partition, where={"nbytes": nbytes})
        assert listing.keys == ["late"]
        assert listing.revision >= revision
        assert killed.values()["blocks_reserved"] == 0
        killed.client.kv_drop_partition(partition)
        # While the writer is still there, with its mapping.
        killed.is_empty()
        eventually(lambda: not files(killed) & before, "segments of the dead store are gone")
        writer.hears("end")


@pytest.mark.parametrize("trial", TRIALS)
def test_a_view_keeps_its_bytes_when_its_store_dies_and_its_rows_are_cleared(
    killed: Killed, trial: int, seed: int
) -> None:
    chance = random.Random(seed + trial)
    partition, name = f"view-{trial}", f"view-{trial}-others"
    keys = [f"v{i}" for i in range(8)]
    nbytes = chance.randrange(LARGE, 5 * LARGE)
    put(killed.client, partition, keys, nbytes)
    before = files(killed)
    with killed.another() as reader, killed.another() as client:
        with reader.kv_view(keys, partition, ["x"], layout="list") as rows:
            seen: list[torch.Tensor] = list(rows.fields["x"])
            killed.kill("values")
            with Others(client, name, seed + trial) as others:
                others.go_on(1)
                killed.client.kv_clear(None, partition, where={})
                # Not for the reader, whose pages the kernel keeps, are the files kept.
                eventually(lambda: not files(killed) & before, "segments of the dead are gone")
                others.go_on(5)
                for key, row in zip(keys, seen, strict=True):
                    assert torch.equal(row, content(key, nbytes)), key
                # The same client views what is there now.
                put(killed.client, partition, ["new"])
                with reader.kv_view(["new"], partition, ["x"], layout="list") as new:
                    assert torch.equal(new.fields["x"][0], content("new", LARGE))
                    del new
        for key, row in zip(keys, seen, strict=True):
            assert torch.equal(row, content(key, nbytes)), key
        del rows, seen
    killed.client.kv_drop_partition(partition)
    killed.is_empty()


@pytest.mark.parametrize("trial", TRIALS)
def test_a_store_that_dies_again_before_it_has_taken_up_what_was_left_loses_nothing(
    killed: Killed, trial: int, seed: int
) -> None:
    """Two deaths, the second when the store has just come: what two stores left lies there."""
    chance = random.Random(seed + trial)
    partition = f"twice-{trial}"
    keys = [f"t{i}" for i in range(20)]
    put(killed.client, partition, keys[:10], chance.randrange(1000, 3 * LARGE))
    killed.kill("values")
    put(killed.client, partition, keys[10:], chance.randrange(1000, 3 * LARGE))
    before = files(killed)
    killed.kill("values")
    killed.kill("values")
    check(killed.client, partition, keys)
    gone = [key for key in keys if chance.random() < 0.5]
    killed.client.kv_clear(gone, partition)
    check(killed.client, partition, [key for key in keys if key not in gone])
    killed.client.kv_drop_partition(partition)
    killed.is_empty()
    eventually(lambda: not files(killed) & before, "segments of the dead are gone")
