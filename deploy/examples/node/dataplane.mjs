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
});
