"""Every metric there is: its name, its kind, its labels, and what it says.

The one list that the endpoint, docs/metrics.md, the dashboard and the alerts are held against.
Names follow Prometheus: base units, `_total` on counters. A label has few values, whatever is put
into a plane: names of partitions and tasks are bounded by labels.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

COUNTER, GAUGE, HISTOGRAM, INFO = "counter", "gauge", "histogram", "info"

Kind = Literal["counter", "gauge", "histogram", "info"]


class Described(NamedTuple):
    """One metric."""

    name: str
    """As it is scraped, less what a histogram adds to its own."""
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


def _table(*rows: tuple[str, Kind, str] | tuple[str, Kind, str, str]) -> tuple[Described, ...]:
    return tuple(
        Described(f"dataplane_{name}", kind, text, tuple(labels[0].split()) if labels else ())
        for name, kind, text, *labels in rows
    )


PROCESS: Final = _table(
    ("build_info", "info", "Which process this is, and of which version",
     "plane plane_id role version"),
    ("start_time_seconds", "gauge", "When the process began to serve, in seconds since 1970"),
    ("loop_delay_seconds", "gauge", "How late the event loop came to the scrape that says this"),
)  # fmt: skip
"""Of every process that serves."""

SERVER: Final = _table(
    ("connections", "gauge", "Connections that have greeted, of clients and of value stores",
     "role"),
    ("requests_in_flight", "gauge", "Requests that are not answered yet"),
    ("oldest_request_seconds", "gauge", "How long the oldest of them has been here", "verb"),
    ("request_duration_seconds", "histogram",
     "From the arrival of a request's header to its answer", "verb"),
    ("requests_failed_total", "counter", "Requests answered with an error, by its class",
     "verb error"),
    ("requests_abandoned_total", "counter",
     "Requests whose connection ended before their answer", "verb"),
)  # fmt: skip
"""Of tag stores and value stores."""

TAG_STORE: Final = _table(
    ("epoch", "gauge", "How often the tag store was started, as its journal says"),
    ("changes_total", "counter", "Changes of the tag store since the plane began: its revision"),
    ("puts_total", "counter", "Puts that were made"),
    ("put_rows_total", "counter", "Rows of puts that were made"),
    ("put_bytes_total", "counter", "Bytes of the blocks of puts that were made"),
    ("puts_refused_total", "counter", "Puts that were refused, by the class of the error",
     "error"),
    ("gets_total", "counter", "Times that somebody asked where rows lie"),
    ("get_rows_total", "counter", "Rows that were asked for"),
    ("clears_total", "counter", "Clears that removed something"),
    ("cleared_rows_total", "counter", "Rows that clears removed"),
    ("claims_total", "counter", "Claims that were granted"),
    ("claimed_rows_total", "counter", "Rows of claims that were granted"),
    ("commits_total", "counter", "Commits of claims"),
    ("committed_rows_total", "counter", "Rows that were committed"),
    ("releases_total", "counter", "Claims given back, or whose term was over"),
    ("lost_rows_total", "counter", "Rows that were lost with a value store"),
    ("partitions", "gauge", "Partitions there are, each version of a family counted", "partition"),
    ("partition_rows", "gauge", "Rows there are", "partition"),
    ("partition_payload_bytes", "gauge", "Bytes of the values of rows there are", "partition"),
    ("partition_tag_bytes", "gauge", "Bytes of the tags of rows there are", "partition"),
    ("partition_used_bytes", "gauge", "Bytes of extents and tags: what a quota counts",
     "partition"),
    ("partition_held_bytes", "gauge", "Bytes reserved for open groups and not used yet",
     "partition"),
    ("partition_quota_bytes", "gauge", "Limit of used and held bytes, where all have one",
     "partition"),
    ("partition_open_groups", "gauge", "Groups that have begun and not ended", "partition"),
    ("partition_oldest_open_group_seconds", "gauge", "How long the oldest of them has been open",
     "partition"),
    ("partition_oldest_unconsumed_seconds", "gauge",
     "Since the last change of the oldest row that some task has not committed", "partition"),
    ("task_lag_rows", "gauge", "Rows that a task has not committed, claimed ones too",
     "partition task"),
    ("task_claimed_rows", "gauge", "Rows that consumers of a task hold", "partition task"),
    ("task_leases", "gauge", "Claims that consumers of a task hold", "partition task"),
    ("clients", "gauge", "Clients that are connected"),
    ("waiting_requests", "gauge", "Requests that wait for rows, claims, room or partitions",
     "reason"),
    ("kept_answers", "gauge", "Answers that are kept for requests that may come again"),
    ("history_changes", "gauge", "Changed keys that the history reaches back over"),
    ("blocks", "gauge", "Blocks that have a live cell"),
    ("dead_blocks", "gauge", "Dead blocks of which their value stores have not heard"),
    ("stores_known", "gauge", "Value stores that have registered and were not given up"),
    ("stores_connected", "gauge", "Those of them that are connected now"),
    ("worst_slice_seconds", "gauge", "The most CPU time that one slice of a walk held the loop"),
    ("journal_bytes", "gauge", "Bytes of the journal that no snapshot has taken the place of"),
    ("journal_snapshot_due_bytes", "gauge", "Size of the journal at which a snapshot is taken"),
    ("journal_unflushed_bytes", "gauge", "Bytes of the journal's file that no flush has covered"),
    ("journal_refused_total", "counter", "Changes that the journal could not take"),
    ("journal_broken", "gauge", "1 where the journal takes no change until a restart"),
    ("snapshot_bytes", "gauge", "Size of the last snapshot"),
    ("snapshot_age_seconds", "gauge", "Since the last snapshot, where there is one"),
    ("snapshots_failed_total", "counter", "Snapshots that could not be taken"),
)  # fmt: skip

VALUE_STORE: Final = _table(
    ("store_capacity_bytes", "gauge", "The most shared memory that a value store takes", "store"),
    ("store_segment_bytes", "gauge", "Shared memory that it has taken", "store"),
    ("store_used_bytes", "gauge", "Bytes of the extents of its blocks", "store"),
    ("store_held_bytes", "gauge", "Bytes that it holds for groups", "store"),
    ("store_holds", "gauge", "Groups that it holds room for", "store"),
    ("store_segments", "gauge", "Its segments", "store"),
    ("store_blocks", "gauge", "Its blocks, by where they are in their life", "store state"),
    ("store_block_bytes", "gauge", "Bytes of those blocks", "store state"),
    ("store_pins", "gauge", "Holds that readers have on blocks", "store"),
    ("store_waiting_requests", "gauge", "Requests that wait for room in it", "store"),
    ("store_received_bytes_total", "counter", "Bytes of the blocks that were put into it",
     "store"),
    ("store_pinned_bytes_total", "counter", "Bytes of blocks that readers of the node pinned",
     "store"),
    ("store_sent_bytes_total", "counter", "Bytes that it sent to readers of other nodes", "store"),
    ("store_joined", "gauge", "1 while it is connected to its tag store", "store"),
)  # fmt: skip

GATEWAY: Final = _table(
    ("gateway_serving", "gauge", "1 while the plane behind it answers"),
    ("gateway_calls_total", "counter", "Calls that ended, by status", "method code"),
    ("gateway_call_duration_seconds", "histogram", "From the arrival of a call to its end",
     "method"),
    ("gateway_open_calls", "gauge", "Calls that are under way"),
    ("gateway_received_bytes_total", "counter", "Bytes of messages that came", "method"),
    ("gateway_sent_bytes_total", "counter", "Bytes of messages that went", "method"),
    ("gateway_refused_total", "counter", "Calls that ended with an error, by its class", "error"),
    ("gateway_inflight_bytes", "gauge", "Memory that calls under way hold"),
    ("gateway_buffer_bytes", "gauge", "The most memory that they may hold"),
    ("gateway_waiting_calls", "gauge", "Calls that wait for such memory"),
    ("gateway_clients", "gauge", "Clients that are here"),
    ("gateway_quarantined_rows_total", "counter", "Trajectories that are kept in quarantine"),
    ("gateway_unkept_rows_total", "counter", "Refused trajectories that no quarantine took"),
)  # fmt: skip

CLIENT: Final = _table(
    ("client_call_duration_seconds", "histogram", "From the call of a client's verb to its end",
     "verb"),
    ("client_calls_failed_total", "counter", "Calls that ended with an error, by its class",
     "verb error"),
    ("client_put_bytes_total", "counter", "Bytes of values that puts moved", "verb"),
    ("client_got_bytes_total", "counter", "Bytes of values that gets moved", "verb"),
    ("client_waiting_seconds_total", "counter", "Time in verbs that wait for others", "verb"),
    ("run_value", "gauge", "What the program says of itself: its last value of each name",
     "name"),
    ("run_step", "gauge", "The step that it said it of"),
)  # fmt: skip
"""Of a process that asked for an endpoint of its own (`dataplane.serve_metrics`)."""

ALL: Final = (*PROCESS, *SERVER, *TAG_STORE, *VALUE_STORE, *GATEWAY, *CLIENT)
BY_NAME: Final = {metric.name: metric for metric in ALL}

SUFFIXES: Final = {HISTOGRAM: ("_bucket", "_sum", "_count")}


def series_names(metrics: Iterable[Described] = ALL) -> dict[str, set[str]]:
    """The names of all series, as queries use them, with the labels of each."""
    found: dict[str, set[str]] = {}
    for metric in metrics:
        labels = set(metric.labels)
        if metric.kind != HISTOGRAM:
            found[metric.name] = labels
        else:
            for suffix in SUFFIXES[HISTOGRAM]:
                found[metric.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found
