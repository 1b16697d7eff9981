// Decodes and encodes messages for test_node_codec.py: cases in, as JSON, and what became of them.
//
// Values that JSON lacks travel as `{"$": kind, v: text}`: numbers as `n` (BigInt in decimal) or
// `f` (the bits of a double), bytes as `b` (hexadecimal), maps as `m` (pairs).

import { readFileSync } from 'node:fs';

const messages = await import(process.argv[2]);

function told(value) {
  if (typeof value === 'bigint') return { $: 'n', v: String(value) };
  if (typeof value === 'number') {
    const bits = Buffer.alloc(8);
    bits.writeDoubleBE(value);
    return { $: 'f', v: bits.toString('hex') };
  }
  if (value instanceof Uint8Array) return { $: 'b', v: Buffer.from(value).toString('hex') };
  if (value instanceof Map) return { $: 'm', v: [...value].map((pair) => pair.map(told)) };
  if (Array.isArray(value)) return value.map(told);
  if (typeof value !== 'object') return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, told(item)]));
}

function meant(value) {
  if (Array.isArray(value)) return value.map(meant);
  if (typeof value !== 'object' || value === null) return value;
  if (value.$ === 'n') return BigInt(value.v);
  if (value.$ === 'f') return Buffer.from(value.v, 'hex').readDoubleBE();
  if (value.$ === 'b') return new Uint8Array(Buffer.from(value.v, 'hex'));
  if (value.$ === 'm') return new Map(value.v.map((pair) => pair.map(meant)));
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, meant(item)]));
}

function outcome({ type, bytes, object }) {
  try {
    if (bytes !== undefined) return { object: told(messages[type].decode(Buffer.from(bytes, 'hex'))) };
    return { bytes: Buffer.from(messages[type].encode(meant(object))).toString('hex') };
  } catch (error) {
    return { error: `${error.name}: ${error.message}` };
  }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map(outcome)));
