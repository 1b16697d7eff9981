// Messages of protobuf as plain objects: encoding and decoding, driven by tables of fields.
//
// Integers of 64 bits are BigInt (a safe integer is taken too), bytes are Uint8Array, repeated
// fields are arrays, maps are Map (a plain object is taken too). Fields that know whether they are
// set (messages, members of a oneof, `optional` ones) are absent where they are not; all others
// have their default.

import { SCALARS } from './scalars.mjs';
import { BYTES, MalformedMessage, Reader, Writer, checkDepth } from './wire.mjs';

/**
 * One message type. Each field is `[number, name, type, label]`. A type is the name of a scalar,
 * another Message, or `[key type, value type]` of a map; enums are 'int32'. A label is 'repeated',
 * 'optional', `{ oneof: name }`, or nothing.
 */
export class Message {
  wireType = BYTES;
  #describe;
  #table;

  constructor(name, describe) {
    this.name = name;
    this.#describe = describe; // types name each other, so the table is made when it is needed
  }

  /** The bytes of an object. Properties that are no field and values that do not fit are refused. */
  encode(object) {
    const writer = new Writer();
    this.#encode(writer, object, 0);
    return writer.finish();
  }

  /** The object of bytes. Fields that are not in the table are skipped. */
  decode(bytes) {
    return this.#decode(new Reader(bytes), 0);
  }

  // As the type of a field: the length comes first.

  write(writer, object, depth) {
    const inner = new Writer();
    this.#encode(inner, object, depth);
    writer.bytes(inner.finish());
  }

  read(reader, depth, before) {
    return this.#decode(reader.part(), depth, before);
  }

  zero() {
    return this.decode(new Uint8Array());
  }

  get #fields() {
    this.#table ??= new Map(this.#describe().map((entry) => [entry[0], fieldOf(...entry)]));
    return this.#table;
  }

  #encode(writer, object, depth) {
    checkDepth(depth);
    if (object === null || typeof object !== 'object') {
      throw new MalformedMessage(`${this.name}: an object is due, not ${typeof object}`);
    }
    const left = new Set(Object.keys(object));
    const chosen = new Set();
    for (const field of this.#fields.values()) {
      left.delete(field.name);
      const value = object[field.name];
      if (value === undefined || value === null) continue;
      if (field.oneof && chosen.has(field.oneof)) {
        throw new MalformedMessage(`${this.name}: one of ${field.oneof.join(', ')}, not several`);
      }
      chosen.add(field.oneof);
      try {
        field.write(writer, value, depth + 1);
      } catch (error) {
        if (!(error instanceof MalformedMessage) || error.place) throw error;
        error.place = `${this.name}.${field.name}`;
        error.message = `${error.place}: ${error.message}`;
        throw error;
      }
    }
    for (const name of left) {
      if (object[name] !== undefined) throw new MalformedMessage(`${this.name} has no field ${name}`);
    }
  }

  #decode(reader, depth, before) {
    checkDepth(depth);
    const fields = this.#fields;
    const object = before ?? {};
    if (!before) for (const field of fields.values()) field.begin(object);
    while (!reader.isAtEnd) {
      const [number, wireType] = reader.tag();
      const field = fields.get(number);
      if (field?.takes(wireType)) field.read(reader, wireType, object, depth + 1);
      else reader.skip(number, wireType);
    }
    return object;
  }
}

// ---- Fields -------------------------------------------------------------------------------------

function fieldOf(number, name, type, label) {
  if (Array.isArray(type)) return new MapField(number, name, ...type.map(typeOf));
  if (label === 'repeated') return new RepeatedField(number, name, typeOf(type));
  const isSet = type instanceof Message || label !== undefined;
  return new SingleField(number, name, typeOf(type), isSet, label?.oneof);
}

function typeOf(type) {
  return type instanceof Message ? type : SCALARS[type];
}

class SingleField {
  constructor(number, name, type, knowsIfSet, oneof) {
    Object.assign(this, { number, name, type, knowsIfSet, oneof });
  }

  begin(object) {
    if (!this.knowsIfSet) object[this.name] = this.type.zero();
  }

  takes(wireType) {
    return wireType === this.type.wireType;
  }

  write(writer, value, depth) {
    if (!this.knowsIfSet && isDefault(value)) return;
    writer.tag(this.number, this.type.wireType);
    this.type.write(writer, value, depth);
  }

  read(reader, wireType, object, depth) {
    const before = object[this.name]; // a message that comes twice is merged
    if (this.oneof && before === undefined) this.#endRivals(object);
    object[this.name] = this.type.read(reader, depth, before);
  }

  #endRivals(object) {
    for (const name of this.oneof) delete object[name];
  }
}

class RepeatedField {
  constructor(number, name, type) {
    Object.assign(this, { number, name, type, isPacked: type.wireType !== BYTES });
  }

  begin(object) {
    object[this.name] = [];
  }

  takes(wireType) {
    return wireType === this.type.wireType || (this.isPacked && wireType === BYTES);
  }

  write(writer, values, depth) {
    if (!this.isPacked) {
      for (const value of values) {
        writer.tag(this.number, BYTES);
        this.type.write(writer, value, depth);
      }
    } else if (values.length) {
      const packed = new Writer();
      for (const value of values) this.type.write(packed, value);
      writer.tag(this.number, BYTES);
      writer.bytes(packed.finish());
    }
  }

  read(reader, wireType, object, depth) {
    const values = object[this.name];
    if (wireType === this.type.wireType) {
      values.push(this.type.read(reader, depth));
    } else {
      const packed = reader.part();
      while (!packed.isAtEnd) values.push(this.type.read(packed));
    }
  }
}

class MapField {
  constructor(number, name, key, item) {
    Object.assign(this, { number, name, key, item });
  }

  begin(object) {
    object[this.name] = new Map();
  }

  takes(wireType) {
    return wireType === BYTES;
  }

  write(writer, map, depth) {
    checkDepth(depth);
    for (const [key, item] of map instanceof Map ? map : Object.entries(map)) {
      const entry = new Writer();
      entry.tag(1, this.key.wireType);
      this.key.write(entry, key);
      entry.tag(2, this.item.wireType);
      this.item.write(entry, item, depth + 1);
      writer.tag(this.number, BYTES);
      writer.bytes(entry.finish());
    }
  }

  read(reader, wireType, object, depth) {
    const entry = reader.part();
    let key = this.key.zero();
    let item;
    while (!entry.isAtEnd) {
      const [number, type] = entry.tag();
      if (number === 1 && type === this.key.wireType) key = this.key.read(entry);
      else if (number === 2 && type === this.item.wireType) {
        item = this.item.read(entry, depth + 1, item);
      } else entry.skip(number, type);
    }
    object[this.name].set(key, item ?? this.item.zero());
  }
}

/** Whether proto3 leaves it out. A negative zero is not the default. */
function isDefault(value) {
  return Object.is(value, 0) || value === 0n || value === false || value.length === 0;
}
