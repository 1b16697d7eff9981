// The bytes of protobuf: numbers, lengths and tags, written and read one after the other.

const MAX_DEPTH = 100;

export const VARINT = 0;
export const FIXED64 = 1;
export const BYTES = 2;
export const GROUP = 3;
export const GROUP_END = 4;
export const FIXED32 = 5;

/** What is wrong with bytes that should be a message, or with an object that should become one. */
export class MalformedMessage extends Error {
  name = 'MalformedMessage';
}

export function checkDepth(depth) {
  if (depth > MAX_DEPTH) throw new MalformedMessage(`more than ${MAX_DEPTH} messages deep`);
}

export class Writer {
  #data = new Uint8Array(64);
  #view = new DataView(this.#data.buffer);
  #size = 0;

  finish() {
    return this.#data.subarray(0, this.#size);
  }

  tag(number, wireType) {
    this.varint(number * 8 + wireType);
  }

  /** A whole number from 0 up to the largest safe one. */
  varint(value) {
    const at = this.#grow(8);
    let end = at;
    while (value > 127) {
      this.#data[end++] = (value % 128) | 128;
      value = Math.floor(value / 128);
    }
    this.#data[end++] = value;
    this.#size = end;
  }

  /** An int32: a negative one has ten bytes. */
  signed(value) {
    if (value < 0) this.bigVarint(BigInt.asUintN(64, BigInt(value)));
    else this.varint(value);
  }

  bigVarint(value) {
    if (value <= 0x1fffffffffffffn) {
      this.varint(Number(value));
      return;
    }
    let end = this.#grow(10);
    while (value > 127n) {
      this.#data[end++] = Number(value & 127n) | 128;
      value >>= 7n;
    }
    this.#data[end++] = Number(value);
    this.#size = end;
  }

  float(value) {
    const at = this.#grow(4);
    this.#view.setFloat32(at, value, true);
    this.#size = at + 4;
  }

  double(value) {
    const at = this.#grow(8);
    this.#view.setFloat64(at, value, true);
    this.#size = at + 8;
  }

  /** A length and as many bytes. */
  bytes(value) {
    this.varint(value.length);
    const at = this.#grow(value.length);
    this.#data.set(value, at);
    this.#size = at + value.length;
  }

  /** Room for so many bytes more; where they begin. */
  #grow(count) {
    const due = this.#size + count;
    if (due > this.#data.length) {
      const larger = new Uint8Array(Math.max(due, 2 * this.#data.length));
      larger.set(this.finish());
      this.#data = larger;
      this.#view = new DataView(larger.buffer);
    }
    return this.#size;
  }
}

export class Reader {
  #data;
  #view;
  #at = 0;

  constructor(data) {
    this.#data = data;
    this.#view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  get isAtEnd() {
    return this.#at === this.#data.length;
  }

  rest() {
    return this.#data.subarray(this.#at);
  }

  tag() {
    const value = this.varint();
    const number = Number(value >> 3n);
    if (number === 0 || number > 0x1fffffff) throw new MalformedMessage('a field of no number');
    return [number, Number(value & 7n)];
  }

  varint() {
    let low = 0; // 28 bits as a number, which most values have; the rest as a BigInt
    for (let shift = 0; shift < 28; shift += 7) {
      const byte = this.#data[this.#take(1)];
      low |= (byte & 127) << shift;
      if (byte < 128) return BigInt(low);
    }
    let value = BigInt(low);
    for (let shift = 28n; shift < 70n; shift += 7n) {
      const byte = this.#data[this.#take(1)];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asUintN(64, value);
    }
    throw new MalformedMessage('a number of more than ten bytes');
  }

  /** The lower 32 bits of a number. */
  low32() {
    let value = 0;
    for (let shift = 0; shift < 70; shift += 7) {
      const byte = this.#data[this.#take(1)];
      if (shift < 32) value |= (byte & 127) << shift;
      if (byte < 128) return value >>> 0;
    }
    throw new MalformedMessage('a number of more than ten bytes');
  }

  float() {
    return this.#view.getFloat32(this.#take(4), true);
  }

  double() {
    return this.#view.getFloat64(this.#take(8), true);
  }

  /** What a length announces, as a reader of its own. */
  part() {
    const begin = this.#take(Number(this.varint()));
    return new Reader(this.#data.subarray(begin, this.#at));
  }

  skip(number, wireType, depth = 0) {
    checkDepth(depth);
    if (wireType === VARINT) this.varint();
    else if (wireType === FIXED64) this.#take(8);
    else if (wireType === BYTES) this.part();
    else if (wireType === FIXED32) this.#take(4);
    else if (wireType === GROUP) {
      for (;;) {
        const [inner, type] = this.tag();
        if (type === GROUP_END && inner === number) return;
        this.skip(inner, type, depth + 1);
      }
    } else throw new MalformedMessage(`wire type ${wireType} of field ${number}`);
  }

  #take(count) {
    const begin = this.#at;
    if (begin + count > this.#data.length) throw new MalformedMessage('it is cut off');
    this.#at += count;
    return begin;
  }
}
