"""What must hold in the life of a group, in words, and why a rule may go unjudged. Pure."""

from __future__ import annotations

from typing import Final

RULES: Final = {
    1: "lengths agree with tags",
    2: "one uid, and every session and index once",
    3: "supervised counts fit",
    4: "padding rows stay out",
    5: "rows stay with their keys",
    6: "rows divide by ranks",
    7: "trainer and rollout topologies apart",
    8: "values come back as they were put",
    9: "advantages have the response's length",
    10: "nothing is left, and nothing comes back",
    11: "prompts and trajectories apart, and none after the end",
    12: "a prompt's status goes forward",
    13: "groups in flight are bounded",
    14: "staleness is bounded",
    15: "evicted groups are replaced",
}
"""Of docs/trace.md, by their numbers."""
NOT_JUDGED: Final = {
    1: "no row has a field and a length to compare",
    2: "no trajectory is known",
    3: "no row has the tag policy_len",
    4: "no padding row was read or cleared with the group",
    5: "values are hashed where the plane's setting lineage is 'hashes'",
    6: "how many ranks and mini-batches there are is the trainer's; requests do not say it",
    7: "topologies are in the trainer's records; requests do not say them",
    8: "values are hashed where the plane's setting lineage is 'hashes'",
    9: "no advantages or returns were written",
    10: "nothing of the group was cleared after it ended",
    11: "the group has not ended",
    12: "no prompt's status is known",
    13: "it is about all groups, and a bound that the trainer sets",
    14: "it is about a threshold that the trainer sets; see min_global_steps and global_steps",
    15: "it is about all groups",
}
"""Why a rule was not judged, where nothing more is known."""
