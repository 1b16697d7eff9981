// Made of proto/dataplane/v1/dataplane.proto by generate.py. Do not edit.

import { Message } from './protobuf.mjs';

export const PutMode = Object.freeze({
  // Write, whether or not the keys exist.
  UNSPECIFIED: 0,
  // Every key exists.
  MUST_EXIST: 1,
  // No key exists.
  IF_ABSENT: 2,
});

export const PutState = Object.freeze({
  UNSPECIFIED: 0,
  // This gateway holds nothing of it: begin at 0.
  NOT_HELD: 1,
  // It may be resumed.
  RECEIVING: 2,
  // All bytes are here, and the plane is asked.
  APPLYING: 3,
});

export const FinishReason = Object.freeze({
  UNSPECIFIED: 0,
  STOP: 1,
  LENGTH: 2,
  TOOL_CALLS: 3,
  ABORT: 4,
});

export const TrajectoryStatus = Object.freeze({
  // Completed.
  UNSPECIFIED: 0,
  COMPLETED: 1,
  FAILED: 2,
  ABORTED: 3,
});

export const IdsSource = Object.freeze({
  // Not known.
  UNSPECIFIED: 0,
  // The engine said them.
  ENGINE: 1,
  // Made of text again: they may differ from what was generated.
  RETOKENIZED: 2,
});

// A position in the plane's history; later ones are greater, epoch first.
export const Revision = new Message('Revision', () => [
  [1, 'epoch', 'int64'],
  [2, 'n', 'int64'],
]);

// Who asks for an effect, and which of its effects it is.
export const Request = new Message('Request', () => [
  // Chosen by the client, random, up to 64 printable characters; the same after a restart if it
  // repeats what it asked before.
  [1, 'client_id', 'string'],
  // 1, 2, 3 ... of this client.
  [2, 'number', 'int64'],
  // Every number up to this one has been answered: its answer may be forgotten.
  [3, 'settled', 'int64'],
  // An earlier try of the same request may have arrived.
  [4, 'retry', 'bool'],
  // The latest revision that the client had seen when the effect was first asked for. With `retry`
  // a put is judged from it: it cannot bring back what was cleared since.
  [5, 'seen', Revision],
  // The plane that is meant; empty for any. Another one is FAILED_PRECONDITION.
  [6, 'plane_id', 'string'],
]);

// A value of a tag, or of an object field.
const valueKind = {
  oneof: [
    'null_value',
    'bool_value',
    'int_value',
    'float_value',
    'string_value',
    'bytes_value',
    'list_value',
    'map_value',
    'tensor_value',
  ],
};
export const Value = new Message('Value', () => [
  [1, 'null_value', 'bool', valueKind],
  [2, 'bool_value', 'bool', valueKind],
  [3, 'int_value', 'sint64', valueKind],
  [4, 'float_value', 'double', valueKind],
  [5, 'string_value', 'string', valueKind],
  // Object fields only, as are tensors.
  [6, 'bytes_value', 'bytes', valueKind],
  [7, 'list_value', ListValue, valueKind],
  [8, 'map_value', MapValue, valueKind],
  [9, 'tensor_value', TensorValue, valueKind],
]);

export const ListValue = new Message('ListValue', () => [
  [1, 'items', Value, 'repeated'],
  // A tuple, where the language has both.
  [2, 'fixed', 'bool'],
]);

export const MapValue = new Message('MapValue', () => [
  [1, 'entries', ['string', Value]],
]);

export const TensorValue = new Message('TensorValue', () => [
  // A dtype as `Column.dtype` has it.
  [1, 'dtype', 'string'],
  [2, 'shape', 'int64', 'repeated'],
  // Row-major, little endian.
  [3, 'data', 'bytes'],
]);

export const Tags = new Message('Tags', () => [
  [1, 'values', ['string', Value]],
]);

// A row as listings show it.
export const Row = new Message('Row', () => [
  [1, 'key', 'string'],
  [2, 'tags', Tags],
  // Fields that have been produced.
  [3, 'fields', 'string', 'repeated'],
  // Of ragged fields, the length of the row; of object fields, its bytes in the store.
  [4, 'lengths', ['string', 'int32']],
]);

// One field of the rows of a put or a get. On the wire the bytes of a column are its rows back to
// back, row-major, little endian; columns follow each other without a gap.
export const Column = new Message('Column', () => [
  [1, 'name', 'string'],
  // bool, int8 ... uint64, float16, bfloat16, float32, float64, float8_*, complex*; or `object`:
  // each row is a serialized `Value`, and its length the bytes of that.
  [2, 'dtype', 'string'],
  // Sizes of one row's dimensions; -1 where rows differ.
  [3, 'dims', 'int64', 'repeated'],
  // The dimension that is ragged; not set for rank 0.
  [4, 'ragged_dim', 'int32', 'optional'],
  // For each -1 in `dims`, in order: one length per row.
  [5, 'lengths', 'int32', 'repeated'],
]);

export const Chunk = new Message('Chunk', () => [
  // Where in all bytes of the stream it begins.
  [1, 'offset', 'int64'],
  [2, 'data', 'bytes'],
]);

// What a client's errors are made of; in the trailing metadata `dataplane-error-bin`.
export const Error = new Message('Error', () => [
  // The name of the error's class, such as `StaleWrite`.
  [1, 'type', 'string'],
  [2, 'message', 'string'],
  // The attributes of its class, such as `keys`.
  [3, 'attributes', ['string', Value]],
]);

export const DescribeRequest = new Message('DescribeRequest', () => []);

export const DescribeResponse = new Message('DescribeResponse', () => [
  [1, 'plane_id', 'string'],
  [2, 'revision', Revision],
  [3, 'version', 'string'],
  // The name of the caller's credentials.
  [4, 'principal', 'string'],
  [5, 'limits', Limits],
]);

export const Limits = new Message('Limits', () => [
  // Of one message.
  [1, 'max_message_bytes', 'int64'],
  // Of all chunks of one put.
  [2, 'max_put_bytes', 'int64'],
  // Of one get.
  [3, 'max_get_bytes', 'int64'],
  // A good size of a chunk.
  [4, 'chunk_bytes', 'int64'],
  [5, 'max_rows', 'int32'],
  [6, 'max_page_size', 'int32'],
  // How long a put that broke off may be resumed.
  [7, 'resume_s', 'double'],
  // How long after its last call a client counts as here.
  [8, 'absence_s', 'double'],
]);

const putRowsRequestPart = {
  oneof: [
    'header',
    'chunk',
  ],
};
export const PutRowsRequest = new Message('PutRowsRequest', () => [
  // The first message of a stream, and no other.
  [1, 'header', PutRowsHeader, putRowsRequestPart],
  [2, 'chunk', Chunk, putRowsRequestPart],
]);

export const PutRowsHeader = new Message('PutRowsHeader', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  // Up to `max_rows`, each once.
  [3, 'keys', 'string', 'repeated'],
  // None, or one per key.
  [4, 'tags', Tags, 'repeated'],
  [5, 'columns', Column, 'repeated'],
  // Bytes of all columns.
  [6, 'total_bytes', 'int64'],
  [7, 'mode', 'int32'],
  // An attempt that BeginGroup answered and that is to be open; 0 for none.
  [8, 'attempt', 'int64'],
  // Answer with the merged tags.
  [9, 'return_tags', 'bool'],
  // Where this stream goes on; 0 for a put from its start.
  [10, 'resume_offset', 'int64'],
]);

export const PutRowsResponse = new Message('PutRowsResponse', () => [
  [1, 'revision', Revision],
  // With `return_tags`: the tags of each key as they are now.
  [2, 'tags', Tags, 'repeated'],
  // With `return_tags` every field that each of the rows has now, else those that were written.
  [3, 'fields', 'string', 'repeated'],
]);

export const GetPutProgressRequest = new Message('GetPutProgressRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
]);

export const GetPutProgressResponse = new Message('GetPutProgressResponse', () => [
  [1, 'state', 'int32'],
  // Where to go on.
  [2, 'offset', 'int64'],
]);

export const PutTagsRequest = new Message('PutTagsRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'keys', 'string', 'repeated'],
  // One per key.
  [4, 'tags', Tags, 'repeated'],
  [5, 'mode', 'int32'],
  [6, 'attempt', 'int64'],
  [7, 'return_tags', 'bool'],
]);

export const PutTagsResponse = new Message('PutTagsResponse', () => [
  [1, 'revision', Revision],
  [2, 'tags', Tags, 'repeated'],
  // With `return_tags`: every field that each of the rows has now.
  [3, 'fields', 'string', 'repeated'],
]);

export const GetRowsRequest = new Message('GetRowsRequest', () => [
  [1, 'partition_id', 'string'],
  [2, 'keys', 'string', 'repeated'],
  // None for every field that all of the rows have.
  [3, 'fields', 'string', 'repeated'],
  // Leave out rows that are missing or lack a field, rather than refuse.
  [4, 'drop_missing', 'bool'],
]);

const getRowsResponsePart = {
  oneof: [
    'header',
    'chunk',
  ],
};
export const GetRowsResponse = new Message('GetRowsResponse', () => [
  [1, 'header', GetRowsHeader, getRowsResponsePart],
  [2, 'chunk', Chunk, getRowsResponsePart],
]);

export const GetRowsHeader = new Message('GetRowsHeader', () => [
  [1, 'revision', Revision],
  // Those that come, in the order asked for.
  [2, 'keys', 'string', 'repeated'],
  [3, 'columns', Column, 'repeated'],
  [4, 'total_bytes', 'int64'],
]);

export const PutTrajectoriesRequest = new Message('PutTrajectoriesRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'trajectories', Trajectory, 'repeated'],
  [4, 'mode', 'int32'],
  [5, 'attempt', 'int64'],
  // Refuse all of them where one is wrong, rather than put that one into quarantine.
  [6, 'all_or_nothing', 'bool'],
]);

// One trainable token sequence. N tokens, of which the first `prompt_len` are the prompt.
export const Trajectory = new Message('Trajectory', () => [
  // Its key is `{uid}_{session_id}_{index}`.
  [1, 'uid', 'string'],
  [2, 'session_id', 'int32'],
  [3, 'index', 'int32'],
  // [N] Prompt, then everything after it.
  [4, 'input_ids', 'int32', 'repeated'],
  // [N] The token itself where the policy generated it, else -100.
  [5, 'labels', 'sint32', 'repeated'],
  // [N] At generation; 0 where nothing was generated. None if they are not known.
  [6, 'logprobs', 'float', 'repeated'],
  [7, 'prompt_len', 'int32'],
  // Which policy generated which tokens of the response; they follow each other, and cover all of
  // it; versions do not go down. None if it is not known.
  [8, 'policy_spans', PolicySpan, 'repeated'],
  [9, 'reward', 'double', 'optional'],
  [10, 'finish_reason', 'int32'],
  [11, 'status', 'int32'],
  // Of a failed one, why, and then it is due; its tokens are not kept.
  [12, 'error', 'string'],
  [13, 'num_turns', 'int32'],
  // The trainer's step that it belongs to.
  [14, 'global_steps', 'int64', 'optional'],
  [15, 'task_name', 'string'],
  [16, 'data_source', 'string'],
  [17, 'ids_source', 'int32'],
  // Of what the log-probabilities are: `raw`, `processed` or `recomputed`.
  [18, 'logprob_kind', 'string'],
  // Further tags; none of the plane's or its trainers' own names, nor `dataplane.…`.
  [19, 'tags', Tags],
  // The conversation, kept as an object.
  [20, 'messages', Value],
  // Anything else, kept as an object.
  [21, 'extra', Value],
]);

// Tokens [start, end) of the response.
export const PolicySpan = new Message('PolicySpan', () => [
  [1, 'version', 'int64'],
  [2, 'start', 'int32'],
  [3, 'end', 'int32'],
]);

export const PutTrajectoriesResponse = new Message('PutTrajectoriesResponse', () => [
  // Of those that are right; not set if none is.
  [1, 'revision', Revision],
  // One per trajectory, in order.
  [2, 'results', TrajectoryResult, 'repeated'],
]);

export const TrajectoryResult = new Message('TrajectoryResult', () => [
  // In the partition asked for, or in quarantine.
  [1, 'key', 'string'],
  // Of one that is wrong: the quarantine partition; empty where it could not be kept.
  [2, 'quarantine', 'string'],
  // What is wrong with it.
  [3, 'reason', 'string'],
]);

export const ListRequest = new Message('ListRequest', () => [
  [1, 'partition_id', 'string'],
  // A predicate, as data: a map of tag names to values, or to maps of operators to values.
  [2, 'where', Value],
  [3, 'since', Revision],
  // Names of the tags that are wanted.
  [4, 'columns', 'string', 'repeated'],
  // Only those of `columns`, so none if it is empty; otherwise an empty one stands for all.
  [5, 'only_columns', 'bool'],
  // At most `max_page_size`, which 0 stands for.
  [6, 'page_size', 'int32'],
  // Of the page before; everything else as there.
  [7, 'page_token', 'string'],
  // At most so many rows in all pages; 0 for no limit.
  [8, 'limit', 'int32'],
  // The first rows by a tag, with `-` before it the last: numbers, then texts, then rows without
  // it. With a `limit` of at most 1000, and without `since`.
  [9, 'order_by', 'string'],
]);

export const ListResponse = new Message('ListResponse', () => [
  // The same on every page.
  [1, 'revision', Revision],
  // All rows are listed, rather than those that changed since.
  [2, 'full', 'bool'],
  [3, 'rows', Row, 'repeated'],
  // On the first page: keys that were cleared and are still gone.
  [4, 'cleared', 'string', 'repeated'],
  // Empty on the last page.
  [5, 'next_page_token', 'string'],
]);

export const WaitRequest = new Message('WaitRequest', () => [
  [1, 'partition_id', 'string'],
  [2, 'where', Value],
  [3, 'count', 'int32'],
  // A tag; then `count` counts whole groups of it.
  [4, 'group_by', 'string'],
]);

export const WaitResponse = new Message('WaitResponse', () => [
  [1, 'revision', Revision],
  [2, 'rows', Row, 'repeated'],
]);

export const WatchRequest = new Message('WatchRequest', () => [
  [1, 'partition_id', 'string'],
  [2, 'where', Value],
  // Now, if it is not set.
  [3, 'since', Revision],
]);

export const WatchResponse = new Message('WatchResponse', () => [
  // Pass it as `since` to go on from here.
  [1, 'revision', Revision],
  [2, 'rows', Row, 'repeated'],
  [3, 'cleared', 'string', 'repeated'],
  // History does not reach back to `since`: `rows` is everything that there is.
  [4, 'full', 'bool'],
  // The first answer, which comes at once: the watch stands, from `revision` on.
  [5, 'begun', 'bool'],
]);

export const ClaimRequest = new Message('ClaimRequest', () => [
  // As in `Request`: whose claim it is.
  [1, 'client_id', 'string'],
  [2, 'plane_id', 'string'],
  [3, 'partition_id', 'string'],
  [4, 'task', 'string'],
  // Rows, or groups with `groups`.
  [5, 'count', 'int32'],
  // Fields that the rows must have.
  [6, 'fields', 'string', 'repeated'],
  [7, 'where', Value],
  // A tag; the oldest revision first if it is not set.
  [8, 'order_by', 'string'],
  [9, 'groups', 'bool'],
  // 30 if it is 0.
  [10, 'lease_s', 'double'],
  [11, 'replica', Replica],
  // 1, 2, 3 ... of this client's tries to claim, apart from the numbers of its effects; 0 for a
  // client that never asks again.
  [12, 'number', 'int64'],
  // Tries of which no answer came.
  [13, 'abandoned', 'int64', 'repeated'],
]);

// Of a batch that data-parallel groups share.
export const Replica = new Message('Replica', () => [
  [1, 'dp_rank', 'int32'],
  [2, 'dp_size', 'int32'],
  [3, 'batch_index', 'int32'],
]);

export const ClaimResponse = new Message('ClaimResponse', () => [
  [1, 'claim_id', 'int64'],
  [2, 'revision', Revision],
  [3, 'rows', Row, 'repeated'],
  // How often each row was offered, this time included.
  [4, 'deliveries', 'int32', 'repeated'],
  // The partition is sealed and everything committed: nothing is to come.
  [5, 'end', 'bool'],
]);

export const CommitRequest = new Message('CommitRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'task', 'string'],
  [4, 'claim_id', 'int64'],
  [5, 'keys', 'string', 'repeated'],
]);

export const CommitResponse = new Message('CommitResponse', () => [
  [1, 'revision', Revision],
]);

export const ReleaseRequest = new Message('ReleaseRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'task', 'string'],
  [4, 'claim_id', 'int64'],
  [5, 'keys', 'string', 'repeated'],
]);

export const ReleaseResponse = new Message('ReleaseResponse', () => [
  [1, 'revision', Revision],
]);

export const AttendRequest = new Message('AttendRequest', () => [
  [1, 'client_id', 'string'],
  [2, 'plane_id', 'string'],
]);

export const AttendResponse = new Message('AttendResponse', () => []);

export const ClearRequest = new Message('ClearRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  // Keys, or a predicate, not both.
  [3, 'keys', 'string', 'repeated'],
  [4, 'where', Value],
  // Close the attempts of the groups whose rows go, too.
  [5, 'retire', 'bool'],
  // Rows that changed after it stay: what was looked at then is what is cleared.
  [6, 'until', Revision],
]);

export const ClearResponse = new Message('ClearResponse', () => [
  [1, 'removed', 'int64'],
]);

export const BeginGroupRequest = new Message('BeginGroupRequest', () => [
  [1, 'request', Request],
  [2, 'uid', 'string'],
  [3, 'partition_id', 'string'],
  // Sessions of the group.
  [4, 'n', 'int32'],
  // Room that is kept for it; 0 for the partition's default.
  [5, 'declared_bytes', 'int64'],
]);

export const BeginGroupResponse = new Message('BeginGroupResponse', () => [
  [1, 'attempt', 'int64'],
]);

export const EndGroupRequest = new Message('EndGroupRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'attempt', 'int64'],
  [4, 'status', 'string'],
]);

export const EndGroupResponse = new Message('EndGroupResponse', () => [
  [1, 'revision', Revision],
]);

export const ListPartitionsRequest = new Message('ListPartitionsRequest', () => []);

export const ListPartitionsResponse = new Message('ListPartitionsResponse', () => [
  // What is known of each, by name: rows, bytes, fields, settings.
  [1, 'partitions', ['string', MapValue]],
]);

export const FieldSchema = new Message('FieldSchema', () => [
  [1, 'dtype', 'string'],
  [2, 'rank', 'int32'],
  [3, 'ragged_dim', 'int32', 'optional'],
]);

// 0 is no limit.
export const Quota = new Message('Quota', () => [
  [1, 'bytes', 'int64'],
  [2, 'rows', 'int64'],
  [3, 'producer_bytes', 'int64'],
  [4, 'producer_rows', 'int64'],
  [5, 'group_bytes', 'int64'],
]);

export const CreatePartitionRequest = new Message('CreatePartitionRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  [3, 'schema', ['string', FieldSchema]],
  // Let a field change its dtype and rank.
  [4, 'open_schema', 'bool'],
  [5, 'quota', Quota],
  // How many sealed versions are kept; 0 for what is set already, which is all of a new one.
  [6, 'retention_versions', 'int32'],
]);

export const CreatePartitionResponse = new Message('CreatePartitionResponse', () => [
  [1, 'revision', Revision],
]);

export const SealPartitionRequest = new Message('SealPartitionRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
]);

export const SealPartitionResponse = new Message('SealPartitionResponse', () => [
  [1, 'dropped', 'string', 'repeated'],
]);

export const DropPartitionRequest = new Message('DropPartitionRequest', () => [
  [1, 'request', Request],
  [2, 'partition_id', 'string'],
  // Drop the versions before this one instead.
  [3, 'older_than', 'int64', 'optional'],
]);

export const DropPartitionResponse = new Message('DropPartitionResponse', () => [
  [1, 'dropped', 'string', 'repeated'],
]);

export const ExplainRequest = new Message('ExplainRequest', () => [
  // All partitions, if it is empty.
  [1, 'partition_id', 'string'],
  [2, 'where', Value],
  [3, 'fields', 'string', 'repeated'],
  [4, 'task', 'string'],
  [5, 'group_by', 'string'],
  [6, 'count', 'int32'],
]);

export const ExplainResponse = new Message('ExplainResponse', () => [
  [1, 'text', 'string'],
  [2, 'matching', 'int64'],
  [3, 'total', 'int64'],
  [4, 'failing', ['string', 'int64']],
  [5, 'stuck', Tags, 'repeated'],
  [6, 'holders', Tags, 'repeated'],
]);

export const GetOutcomeRequest = new Message('GetOutcomeRequest', () => [
  [1, 'client_id', 'string'],
  [2, 'plane_id', 'string'],
  [3, 'number', 'int64'],
]);

export const GetOutcomeResponse = new Message('GetOutcomeResponse', () => [
  // What is remembered of it: whether it had its effect, and what was answered.
  [1, 'outcome', MapValue],
]);

// A client of the plane, as the plane knows it.
export const ClientReport = new Message('ClientReport', () => [
  // As in `Request` if it is the caller's own; else the plane's name for it. Empty if that is not
  // told.
  [1, 'client_id', 'string'],
  // Where it runs, as it said itself.
  [2, 'label', 'string'],
  // Whether it has a connection.
  [3, 'alive', 'bool'],
]);

export const GetStatusRequest = new Message('GetStatusRequest', () => []);

export const GetStatusResponse = new Message('GetStatusResponse', () => [
  // Names and what they mean are those of the plane's own status.
  [1, 'status', MapValue],
]);

export const InspectRequest = new Message('InspectRequest', () => [
  [1, 'partition_id', 'string'],
  // Up to 1000.
  [2, 'keys', 'string', 'repeated'],
  // Whose own client is named by its own id.
  [3, 'client_id', 'string'],
]);

export const InspectResponse = new Message('InspectResponse', () => [
  // Of the keys that are there, in the order asked for.
  [1, 'rows', KeyReport, 'repeated'],
  // How many of the keys asked for were looked at, from the first on: where not all had room in one
  // answer, ask for the others.
  [2, 'looked_at', 'int32'],
]);

export const KeyReport = new Message('KeyReport', () => [
  [1, 'key', 'string'],
  // Its last change.
  [2, 'revision', Revision],
  // Seconds since then; not set where it is longer ago than is remembered.
  [3, 'age_s', 'double', 'optional'],
  [4, 'tags', Tags],
  [5, 'tag_bytes', 'int64'],
  [6, 'fields', FieldReport, 'repeated'],
  // Whose row it is.
  [7, 'producer', ClientReport],
  // Of a prompt or a row of a group: uid, attempt, status, open, n, sessions.
  [8, 'group', MapValue],
  // Each task of the partition: `committed`, `claimed` or `not claimed`.
  [9, 'tasks', ['string', 'string']],
  [10, 'lost', 'bool'],
]);

// One field of one key. Where it lies is told to who may `operate` in every partition.
export const FieldReport = new Message('FieldReport', () => [
  [1, 'name', 'string'],
  [2, 'dtype', 'string'],
  [3, 'shape', 'int64', 'repeated'],
  [4, 'nbytes', 'int64'],
  [5, 'store', 'string'],
  [6, 'block', 'int64'],
  [7, 'segment', 'int64'],
  [8, 'offset', 'int64'],
]);

export const TallyRequest = new Message('TallyRequest', () => [
  [1, 'partition_id', 'string'],
  [2, 'where', Value],
  // Leave out rows that changed after it.
  [3, 'until', Revision],
]);

export const TallyResponse = new Message('TallyResponse', () => [
  // As `until` of a Clear it removes these rows, and none that changed since.
  [1, 'revision', Revision],
  [2, 'rows', 'int64'],
  [3, 'payload_bytes', 'int64'],
  [4, 'tag_bytes', 'int64'],
  // Most bytes first.
  [5, 'statuses', StatusReport, 'repeated'],
  // Groups that are open and have rows or their prompt among them.
  [6, 'groups_open', 'int64'],
  // The first keys.
  [7, 'sample', 'string', 'repeated'],
]);

export const StatusReport = new Message('StatusReport', () => [
  // The tag `status`; empty for rows without one.
  [1, 'status', 'string'],
  [2, 'rows', 'int64'],
  // Of a tally.
  [3, 'bytes', 'int64'],
]);

export const GetStatsRequest = new Message('GetStatsRequest', () => [
  [1, 'partition_id', 'string'],
  [2, 'client_id', 'string'],
]);

export const GetStatsResponse = new Message('GetStatsResponse', () => [
  [1, 'revision', Revision],
  [2, 'keys', 'int64'],
  [3, 'payload_bytes', 'int64'],
  // Of blocks, in whole pages.
  [4, 'extent_bytes', 'int64'],
  [5, 'tag_bytes', 'int64'],
  // Reserved for groups, and not used by them yet.
  [6, 'held_bytes', 'int64'],
  // Most bytes first.
  [7, 'fields', FieldStats, 'repeated'],
  // Most rows first.
  [8, 'statuses', StatusReport, 'repeated'],
  // Most bytes first. Those that are not named are counted together.
  [9, 'producers', ProducerStats, 'repeated'],
  [10, 'ages', AgeStats, 'repeated'],
  // By ragged field.
  [11, 'lengths', ['string', LengthReport]],
]);

export const FieldStats = new Message('FieldStats', () => [
  [1, 'name', 'string'],
  [2, 'rows', 'int64'],
  [3, 'bytes', 'int64'],
]);

export const ProducerStats = new Message('ProducerStats', () => [
  [1, 'client', ClientReport],
  [2, 'rows', 'int64'],
  [3, 'bytes', 'int64'],
]);

// Rows that were last changed so many seconds ago.
export const AgeStats = new Message('AgeStats', () => [
  [1, 'from_s', 'double'],
  // Not set: and longer.
  [2, 'to_s', 'double', 'optional'],
  [3, 'rows', 'int64'],
  [4, 'bytes', 'int64'],
]);

export const LengthReport = new Message('LengthReport', () => [
  [1, 'rows', 'int64'],
  [2, 'min', 'int64'],
  [3, 'max', 'int64'],
  [4, 'mean', 'double'],
  [5, 'p50', 'int64'],
  [6, 'p90', 'int64'],
  [7, 'p99', 'int64'],
  // Those without rows are left out.
  [8, 'histogram', LengthBin, 'repeated'],
]);

// Rows of these lengths, both included.
export const LengthBin = new Message('LengthBin', () => [
  [1, 'low', 'int64'],
  [2, 'high', 'int64'],
  [3, 'rows', 'int64'],
]);

export const ListClaimsRequest = new Message('ListClaimsRequest', () => [
  // All partitions that the caller may ask about, if it is empty.
  [1, 'partition_id', 'string'],
  [2, 'client_id', 'string'],
]);

export const ListClaimsResponse = new Message('ListClaimsResponse', () => [
  [1, 'tasks', TaskReport, 'repeated'],
  [2, 'claims', ClaimReport, 'repeated'],
]);

// Rows that a task has handed out. One with many keys comes in several, one after the other, each
// with the next of its keys.
export const ClaimReport = new Message('ClaimReport', () => [
  [1, 'partition_id', 'string'],
  [2, 'task', 'string'],
  [3, 'claim_id', 'int64'],
  [4, 'keys', 'string', 'repeated'],
  [5, 'holders', ClientReport, 'repeated'],
  [6, 'age_s', 'double'],
  [7, 'lease_s', 'double'],
  // Until its term is over; not set while one of its holders is there.
  [8, 'left_s', 'double', 'optional'],
]);

// How far a task has come.
export const TaskReport = new Message('TaskReport', () => [
  [1, 'partition_id', 'string'],
  [2, 'task', 'string'],
  [3, 'committed', 'int64'],
  [4, 'held', 'int64'],
  // Rows that it has not committed.
  [5, 'lag', 'int64'],
  // Claims of it that wait.
  [6, 'waiting', 'int64'],
]);

export const ListWaitersRequest = new Message('ListWaitersRequest', () => [
  [1, 'client_id', 'string'],
]);

export const ListWaitersResponse = new Message('ListWaitersResponse', () => [
  [1, 'waiters', WaiterReport, 'repeated'],
]);

// A request that waits.
export const WaiterReport = new Message('WaiterReport', () => [
  // `rows`, `changes`, `claim` or `room`.
  [1, 'kind', 'string'],
  [2, 'client', ClientReport],
  [3, 'partition_id', 'string'],
  [4, 'waited_s', 'double'],
  // Until its deadline, if it has one.
  [5, 'left_s', 'double', 'optional'],
  // Rows or groups that are wanted.
  [6, 'count', 'int64', 'optional'],
  // What they have to match, as JSON.
  [7, 'where', 'string'],
  [8, 'task', 'string'],
  [9, 'fields', 'string', 'repeated'],
  [10, 'grouped', 'bool'],
]);

export const ListHoldingsRequest = new Message('ListHoldingsRequest', () => [
  [1, 'client_id', 'string'],
]);

export const ListHoldingsResponse = new Message('ListHoldingsResponse', () => [
  // One with many orphans comes in several, one after the other, each with the next of them.
  [1, 'store', StoreReport],
]);

// What one value store has in use, and who holds it.
export const StoreReport = new Message('StoreReport', () => [
  [1, 'store_id', 'string'],
  [2, 'reachable', 'bool'],
  // Why it could not be asked.
  [3, 'error', 'string'],
  [4, 'pid', 'int64'],
  [5, 'capacity_bytes', 'int64'],
  [6, 'segment_bytes', 'int64'],
  [7, 'used_bytes', 'int64'],
  [8, 'held_bytes', 'int64'],
  [9, 'live_blocks', 'int64'],
  [10, 'dead_blocks', 'int64'],
  // Blocks that nothing refers to.
  [11, 'orphans', OrphanReport, 'repeated'],
  // Who reads.
  [12, 'pins', HoldingReport, 'repeated'],
  // Who writes.
  [13, 'reservations', HoldingReport, 'repeated'],
]);

export const OrphanReport = new Message('OrphanReport', () => [
  [1, 'block', 'int64'],
  [2, 'bytes', 'int64', 'optional'],
  [3, 'age_s', 'double', 'optional'],
]);

export const HoldingReport = new Message('HoldingReport', () => [
  [1, 'client', ClientReport],
  [2, 'blocks', 'int64'],
  [3, 'bytes', 'int64'],
  // Of blocks that only wait for it.
  [4, 'dead_bytes', 'int64', 'optional'],
  [5, 'age_s', 'double', 'optional'],
]);

export const FindRevisionRequest = new Message('FindRevisionRequest', () => [
  [1, 'age_s', 'double'],
]);

export const FindRevisionResponse = new Message('FindRevisionResponse', () => [
  // Not set if the plane remembers none.
  [1, 'revision', Revision],
]);

export const TraceRequest = new Message('TraceRequest', () => [
  // All partitions that the caller may ask about, if it is not set.
  [1, 'partition_id', 'string', 'optional'],
  // A uid or a key, or neither.
  [2, 'uid', 'string', 'optional'],
  [3, 'key', 'string', 'optional'],
  // `next` of an earlier trace, to go on from there.
  [4, 'since', 'int64'],
  // Rows at most; not set for as many as are told at once.
  [5, 'limit', 'int32', 'optional'],
  [6, 'client_id', 'string'],
]);

export const TraceResponse = new Message('TraceResponse', () => [
  // In the first answer.
  [1, 'summary', TraceSummary],
  // In the others, in order.
  [2, 'rows', TraceRow, 'repeated'],
]);

// What a trace comes to.
export const TraceSummary = new Message('TraceSummary', () => [
  [1, 'partition_id', 'string', 'optional'],
  [2, 'findings', Finding, 'repeated'],
  // Fields that nobody has read.
  [3, 'never_read', 'string', 'repeated'],
  // Fields that several clients have read of one key: how many at most.
  [4, 'read_by_several', ['string', 'int64']],
  // Keys that are there, though others of the group were cleared after it ended.
  [5, 'open_keys', 'string', 'repeated'],
  [6, 'present', 'string', 'repeated'],
  // The prompt's last status.
  [7, 'status', 'string', 'optional'],
  [8, 'sessions', 'int64'],
  // How many sessions there are to be, if that is known.
  [9, 'sessions_due', 'int64', 'optional'],
  // Requests that are not remembered any more: the oldest.
  [10, 'gone', 'int64'],
  // Rows may be older than what is remembered.
  [11, 'partial', 'bool'],
  // Where a later trace goes on: its `since`.
  [12, 'next', 'int64'],
  // What the plane keeps: `on`, `hashes` or `previews`.
  [13, 'detail', 'string'],
]);

// What one rule says of a trace.
export const Finding = new Message('Finding', () => [
  [1, 'rule', 'int32'],
  [2, 'name', 'string'],
  // `ok`, `failed` or `not judged`.
  [3, 'status', 'string'],
  [4, 'text', 'string'],
  // Numbers of the requests that disagree.
  [5, 'records', 'int64', 'repeated'],
]);

// One request, as far as it concerns one key and one field of it.
export const TraceRow = new Message('TraceRow', () => [
  [1, 'number', 'int64'],
  [2, 'n', 'int64'],
  // Seconds since 1970.
  [3, 'ts', 'double'],
  [4, 'stage', 'string'],
  [5, 'op', 'string'],
  [6, 'status', 'string'],
  [7, 'uid', 'string', 'optional'],
  [8, 'session_id', 'int64', 'optional'],
  [9, 'index', 'int64', 'optional'],
  [10, 'key', 'string'],
  [11, 'partition', 'string'],
  [12, 'field', 'string'],
  [13, 'producer', 'string'],
  [14, 'consumer', 'string'],
  // Not set where there is none.
  [15, 'shape', ShapeReport],
  [16, 'layout', 'string'],
  [17, 'dtype', 'string'],
  [18, 'device', 'string'],
  [19, 'len', 'int64', 'optional'],
  [20, 'valid_len', 'int64', 'optional'],
  [21, 'mask_sum', 'int64', 'optional'],
  [22, 'global_steps', 'int64', 'optional'],
  [23, 'min_global_steps', 'int64', 'optional'],
  [24, 'max_global_steps', 'int64', 'optional'],
  [25, 'is_padding', 'bool'],
  [26, 'gen', 'int64'],
  [27, 'bytes', 'int64', 'optional'],
  [28, 'ms', 'double', 'optional'],
  [29, 'hash', 'string'],
  [30, 'preview', 'string'],
  [31, 'client', 'string'],
  // What was written, of a row about tags.
  [32, 'tags', Tags],
  [33, 'detail', 'string'],
]);

export const ShapeReport = new Message('ShapeReport', () => [
  [1, 'sizes', 'int64', 'repeated'],
]);

export const GetRecordRequest = new Message('GetRecordRequest', () => [
  // Sizes over time, and nothing of groups and rows.
  [1, 'samples_only', 'bool'],
]);

export const GetRecordResponse = new Message('GetRecordResponse', () => [
  // The next piece of the document, which says in `format` and `format_version` what it is.
  [1, 'json', 'bytes'],
]);

export const EnterStageRequest = new Message('EnterStageRequest', () => [
  [1, 'client_id', 'string'],
  [2, 'plane_id', 'string'],
  // Empty for none.
  [3, 'stage', 'string'],
]);

export const EnterStageResponse = new Message('EnterStageResponse', () => []);

export const DataPlaneService = Object.freeze({
  // What this gateway serves: the plane, its present revision, the limits of requests, and who the
  // caller is. Changes nothing.
  Describe: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Describe',
    request: DescribeRequest,
    response: DescribeResponse,
  }),
  // Write rows: a header, then the bytes of their fields in chunks, in order. All rows, fields and
  // tags become visible at one revision when the stream has ended, or none of them. A stream that
  // breaks is resumed by another that repeats the header and goes on from `GetPutProgress`'s
  // offset; what is not resumed in time is dropped without an effect.
  // Errors: NOT_FOUND (`must_exist`), ALREADY_EXISTS (`if_absent`), ABORTED (late: a key was
  // cleared since, or the attempt is closed), FAILED_PRECONDITION (another dtype or rank than the
  // partition's), OUT_OF_RANGE (a chunk that does not follow the last).
  PutRows: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/PutRows',
    request: PutRowsRequest,
    response: PutRowsResponse,
  }),
  // How much of a put has been received by this gateway. Changes nothing. A stream that goes on at
  // the end of a put that is whole brings no chunk, and is answered like the first.
  GetPutProgress: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetPutProgress',
    request: GetPutProgressRequest,
    response: GetPutProgressResponse,
  }),
  // Write tags only, merged into what the rows have. Atomic like PutRows, and with its errors.
  PutTags: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/PutTags',
    request: PutTagsRequest,
    response: PutTagsResponse,
  }),
  // Write trajectories that are checked and laid out by the gateway: those that are right become
  // visible at one revision; each of the others goes, with the reason, to the quarantine partition.
  // Those that are right have the same optional parts (log-probs, spans, reward, messages, extra; a
  // failed one has none), since they become visible together; a mix is INVALID_ARGUMENT, and nothing
  // is changed. Errors: as PutRows.
  PutTrajectories: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/PutTrajectories',
    request: PutTrajectoriesRequest,
    response: PutTrajectoriesResponse,
  }),
  // Read fields of rows, all as of one revision: a header, then the bytes in chunks, in the order
  // of the keys asked for. Changes nothing.
  // Errors: NOT_FOUND names all keys and fields that are missing, DATA_LOSS those whose node died.
  GetRows: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetRows',
    request: GetRowsRequest,
    response: GetRowsResponse,
  }),
  // Keys and tags, in pages of one revision. With `since`, what has changed after it, cleared keys
  // too. Changes nothing. Errors: NOT_FOUND (partition), ABORTED (the page token is too old: begin
  // again).
  List: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/List',
    request: ListRequest,
    response: ListResponse,
  }),
  // Wait until so many rows, or whole groups, match; all that match then. Changes nothing.
  // Errors: DEADLINE_EXCEEDED says what is missing and on whom it waits.
  Wait: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Wait',
    request: WaitRequest,
    response: WaitResponse,
  }),
  // What changes after a revision, from there on until the caller's deadline. Changes nothing. To
  // go on later, watch since the last revision that was told. A change that is too large for one
  // answer comes in several, of which all but the last carry the revision before it.
  Watch: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Watch',
    request: WatchRequest,
    response: WatchResponse,
  }),
  // Take rows of a task under a lease: nobody else of the task is given them until they are
  // committed, released, or the lease ends. Its term runs while the client is away: it has no call
  // under way, no `Attend`, and has made none for the gateway's `absence`. Asked again under a new
  // number that abandons the old one, it gives back what the lost answer would have brought.
  Claim: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Claim',
    request: ClaimRequest,
    response: ClaimResponse,
  }),
  // Finish claimed rows, once. Errors: ABORTED names the keys that the claim does not hold any
  // more.
  Commit: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Commit',
    request: CommitRequest,
    response: CommitResponse,
  }),
  // Give claimed rows back; they are offered again at once. Errors: as Commit.
  Release: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Release',
    request: ReleaseRequest,
    response: ReleaseResponse,
  }),
  // Be here: as long as the stream is open the client's leases do not run. It beats now and then.
  Attend: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Attend',
    request: AttendRequest,
    response: AttendResponse,
  }),
  // Remove rows by key or by predicate, at one revision; how many there were.
  Clear: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Clear',
    request: ClearRequest,
    response: ClearResponse,
  }),
  // Open an attempt at a group: of the same uid, an older attempt is closed and its rows removed at
  // the same revision. Waits for room. Writes the status of the prompt's row.
  BeginGroup: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/BeginGroup',
    request: BeginGroupRequest,
    response: BeginGroupResponse,
  }),
  // Close an attempt with a status: its group is whole. Errors: ABORTED if it was closed.
  EndGroup: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/EndGroup',
    request: EndGroupRequest,
    response: EndGroupResponse,
  }),
  // Every partition that the caller may see. Of no single partition. Changes nothing.
  ListPartitions: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/ListPartitions',
    request: ListPartitionsRequest,
    response: ListPartitionsResponse,
  }),
  // Make a partition, or change the settings of one.
  CreatePartition: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/CreatePartition',
    request: CreatePartitionRequest,
    response: CreatePartitionResponse,
  }),
  // Refuse all further puts; consumers are told the end. Names the partitions, of those that the
  // caller may see, that were dropped because so many versions are kept.
  SealPartition: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/SealPartition',
    request: SealPartitionRequest,
    response: SealPartitionResponse,
  }),
  // Remove a partition with all that it holds.
  DropPartition: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/DropPartition',
    request: DropPartitionRequest,
    response: DropPartitionResponse,
  }),
  // Why something waits, in words and numbers. Changes nothing.
  Explain: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Explain',
    request: ExplainRequest,
    response: ExplainResponse,
  }),
  // What became of a numbered effect of the caller's own. One that had none never will have one.
  GetOutcome: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetOutcome',
    request: GetOutcomeRequest,
    response: GetOutcomeResponse,
  }),
  // What the plane says of itself: sizes, versions, who waits. Who may not `operate` in every
  // partition is told of the partitions that it may see, and nothing of stores and clients.
  // Changes nothing.
  GetStatus: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetStatus',
    request: GetStatusRequest,
    response: GetStatusResponse,
  }),
  // What is known of keys, without their values: tags, shapes, group, producer, tasks. Keys that
  // are not there are left out. Changes nothing.
  Inspect: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Inspect',
    request: InspectRequest,
    response: InspectResponse,
  }),
  // How many rows match and how large they are, of one moment: what a clear would remove. Changes
  // nothing.
  Tally: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Tally',
    request: TallyRequest,
    response: TallyResponse,
  }),
  // What a partition is made of: bytes by field, producer and age; lengths. Changes nothing.
  GetStats: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetStats',
    request: GetStatsRequest,
    response: GetStatsResponse,
  }),
  // What is claimed and by whom, and how far each task has come, in as many answers as it needs.
  // Changes nothing.
  ListClaims: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/ListClaims',
    request: ListClaimsRequest,
    response: ListClaimsResponse,
  }),
  // Every request that waits in a partition that the caller may ask about, the longest first, in as
  // many answers as it needs. Changes nothing.
  ListWaiters: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/ListWaiters',
    request: ListWaitersRequest,
    response: ListWaitersResponse,
  }),
  // What each value store has in use, who reads and writes there, and blocks that nothing refers
  // to; for who may `operate` in every partition. Changes nothing.
  ListHoldings: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/ListHoldings',
    request: ListHoldingsRequest,
    response: ListHoldingsResponse,
  }),
  // The last revision that is known to be of a certain age. Of no single partition. Changes
  // nothing.
  FindRevision: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/FindRevision',
    request: FindRevisionRequest,
    response: FindRevisionResponse,
  }),
  // What happened to a group, to a key, or to everything in a partition: who wrote, read, claimed
  // and cleared what, and whether that agrees with itself. The first answer says what was found in
  // all, the others bring the rows. Changes nothing.
  Trace: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/Trace',
    request: TraceRequest,
    response: TraceResponse,
  }),
  // What a report tells of the plane: sizes over time, lives of groups, lengths of rows; a JSON
  // document in as many pieces as it needs, for who may `operate` in every partition. Changes
  // nothing.
  GetRecord: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/GetRecord',
    request: GetRecordRequest,
    response: GetRecordResponse,
  }),
  // Say at which stage of training the client's requests are from now on; traces name it. Of no
  // single partition.
  EnterStage: Object.freeze({
    path: '/dataplane.v1.DataPlaneService/EnterStage',
    request: EnterStageRequest,
    response: EnterStageResponse,
  }),
});
