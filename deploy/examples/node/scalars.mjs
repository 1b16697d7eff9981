// The scalar types of protobuf: which values of JavaScript each has, and how they are written.

import { BYTES, FIXED32, FIXED64, MalformedMessage, VARINT } from './wire.mjs';

function scalar(wireType, zero, write, read) {
  return { wireType, zero: () => zero, write, read };
}

function int32(value) {
  if (!Number.isInteger(value) || value !== (value | 0)) throw unfit(value, 'an integer of 32 bits');
  return value;
}

function uint32(value) {
  if (!Number.isInteger(value) || value !== value >>> 0) {
    throw unfit(value, 'an integer from 0 of 32 bits');
  }
  return value;
}

function int64(value) {
  const found = big(value);
  if (BigInt.asIntN(64, found) !== found) throw unfit(value, 'an integer of 64 bits');
  return found;
}

function uint64(value) {
  const found = big(value);
  if (BigInt.asUintN(64, found) !== found) throw unfit(value, 'an integer from 0 of 64 bits');
  return found;
}

function big(value) {
  if (typeof value !== 'bigint' && !Number.isSafeInteger(value)) {
    throw unfit(value, 'a BigInt or a safe integer');
  }
  return BigInt(value);
}

function real(value) {
  if (typeof value !== 'number') throw unfit(value, 'a number');
  return value;
}

function bool(value) {
  if (typeof value !== 'boolean') throw unfit(value, 'true or false');
  return value;
}

function encoded(value) {
  if (typeof value !== 'string') throw unfit(value, 'a string');
  if (/\p{Surrogate}/u.test(value)) throw new MalformedMessage('half a surrogate pair is no text');
  return new TextEncoder().encode(value);
}

function decoded(bytes) {
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new MalformedMessage('a string is not UTF-8');
  }
}

function binary(value) {
  if (!(value instanceof Uint8Array)) throw unfit(value, 'a Uint8Array');
  return value;
}

function unfit(value, due) {
  return new MalformedMessage(`${due} is due, not ${typeof value} ${String(value).slice(0, 40)}`);
}

const low64 = (value) => BigInt.asUintN(64, value);
const zigzag64 = (value) => low64((value << 1n) ^ (value >> 63n));
const unzigzag64 = (value) => (value >> 1n) ^ -(value & 1n);

export const SCALARS = {
  int32: scalar(VARINT, 0, (w, v) => w.signed(int32(v)), (r) => r.low32() | 0),
  uint32: scalar(VARINT, 0, (w, v) => w.varint(uint32(v)), (r) => r.low32()),
  sint32: scalar(
    VARINT,
    0,
    (w, v) => w.varint(((int32(v) << 1) ^ (v >> 31)) >>> 0),
    (r) => {
      const value = r.low32();
      return (value >>> 1) ^ -(value & 1);
    },
  ),
  int64: scalar(VARINT, 0n, (w, v) => w.bigVarint(low64(int64(v))), (r) => BigInt.asIntN(64, r.varint())),
  uint64: scalar(VARINT, 0n, (w, v) => w.bigVarint(uint64(v)), (r) => r.varint()),
  sint64: scalar(VARINT, 0n, (w, v) => w.bigVarint(zigzag64(int64(v))), (r) => unzigzag64(r.varint())),
  bool: scalar(VARINT, false, (w, v) => w.varint(bool(v) ? 1 : 0), (r) => r.varint() !== 0n),
  float: scalar(FIXED32, 0, (w, v) => w.float(real(v)), (r) => r.float()),
  double: scalar(FIXED64, 0, (w, v) => w.double(real(v)), (r) => r.double()),
  string: scalar(BYTES, '', (w, v) => w.bytes(encoded(v)), (r) => decoded(r.part().rest())),
  bytes: scalar(BYTES, new Uint8Array(), (w, v) => w.bytes(binary(v)), (r) => r.part().rest().slice()),
};
