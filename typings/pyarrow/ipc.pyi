"""Arrow's files and messages, as far as this repository uses them."""

from typing import Any

from pyarrow import Buffer, OSFile, RecordBatch, Schema

class Message:
    type: str
    metadata: Buffer
    body: Buffer | None

class RecordBatchFileWriter:
    def __init__(self, sink: Any, schema: Schema) -> None: ...
    def write_batch(self, batch: RecordBatch) -> None: ...
    def close(self) -> None: ...

class RecordBatchFileReader:
    schema: Schema
    num_record_batches: int

def open_file(source: OSFile | Buffer) -> RecordBatchFileReader: ...
def read_message(source: Buffer) -> Message: ...
def read_schema(obj: Message) -> Schema: ...
def read_record_batch(obj: Message, schema: Schema) -> RecordBatch: ...
