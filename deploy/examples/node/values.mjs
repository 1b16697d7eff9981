// JavaScript's values as `Value` messages, and back: what tags, predicates and objects are made of.

import { MalformedMessage } from './wire.mjs';

/** A float in so many words: 1 would be an integer. */
export class Float {
  constructor(value) {
    this.value = value;
  }
}

/** The message of null, true, 1, 1n, 0.5, 'text', bytes, arrays and plain objects. */
export function toValue(value) {
  if (value === null) return { null_value: true };
  if (value instanceof Float) return { float_value: value.value };
  if (value instanceof Uint8Array) return { bytes_value: value };
  if (Array.isArray(value)) return { list_value: { items: value.map(toValue) } };
  switch (typeof value) {
    case 'boolean':
      return { bool_value: value };
    case 'bigint':
      return { int_value: value };
    case 'number':
      return Number.isSafeInteger(value) ? { int_value: BigInt(value) } : { float_value: value };
    case 'string':
      return { string_value: value };
    case 'object':
      return { map_value: { entries: toValues(value) } };
    default:
      throw new MalformedMessage(`a ${typeof value} cannot travel`);
  }
}

/** The messages of an object's properties, by name: of `Tags`, or of a map. */
export function toValues(object) {
  return new Map(Object.entries(object).map(([name, value]) => [name, toValue(value)]));
}

/** What a message says. Integers that a number holds exactly are numbers, others are BigInt. */
export function fromValue(message) {
  if (message.list_value) return message.list_value.items.map(fromValue);
  if (message.map_value) return fromValues(message.map_value.entries);
  if (message.tensor_value) return message.tensor_value;
  const number = message.int_value;
  if (number !== undefined) {
    return Number.isSafeInteger(Number(number)) ? Number(number) : number;
  }
  return (
    message.bool_value ?? message.float_value ?? message.string_value ?? message.bytes_value ?? null
  );
}

/** The object of messages by name. */
export function fromValues(entries) {
  return Object.fromEntries([...entries].map(([name, value]) => [name, fromValue(value)]));
}
