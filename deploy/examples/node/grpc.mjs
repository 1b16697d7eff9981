// Calls of gRPC over node:http2: one channel to one gateway, with TLS, a bearer token, deadlines,
// and the errors of the data plane. All four kinds of calls are one: requests in, responses out.

import http2 from 'node:http2';

import { Error as ErrorMessage } from './dataplane.mjs';
import { fromValue } from './values.mjs';

export const Code = Object.freeze({
  OK: 0, CANCELLED: 1, UNKNOWN: 2, INVALID_ARGUMENT: 3, DEADLINE_EXCEEDED: 4, NOT_FOUND: 5,
  ALREADY_EXISTS: 6, PERMISSION_DENIED: 7, RESOURCE_EXHAUSTED: 8, FAILED_PRECONDITION: 9,
  ABORTED: 10, OUT_OF_RANGE: 11, UNIMPLEMENTED: 12, INTERNAL: 13, UNAVAILABLE: 14, DATA_LOSS: 15,
  UNAUTHENTICATED: 16,
});

/** A call that did not end well. */
export class RpcError extends Error {
  name = 'RpcError';

  /**
   * `type` is the data plane's name of the error, such as `StaleWrite`, and `attributes` what
   * belongs to it; both are missing where the error is gRPC's own.
   */
  constructor(code, message, type, attributes = {}) {
    const name = Object.keys(Code).find((it) => Code[it] === code) ?? `code ${code}`;
    super(`${type ?? name}: ${message}`);
    this.code = code;
    this.type = type;
    this.attributes = attributes;
  }
}

const LONGEST_MS = 99_999_999;
const FRONT = 5; // of each message: whether it is compressed, and its length

export class Channel {
  #url;
  #options;
  #token;
  #maxBytes;
  #session;

  /**
   * `address` is grpcs://host:port, or grpc://host:port without TLS. `ca`, `cert` and `key` are
   * PEM; `token` is a function, asked at each call, so that a token may be renewed.
   */
  constructor(address, { ca, cert, key, token, maxMessageBytes = 64 << 20 } = {}) {
    const found = /^grpc(s?):\/\/([^/]+)$/.exec(address);
    if (!found) throw new TypeError(`an address is grpcs://host:port, not ${address}`);
    this.#url = `http${found[1]}://${found[2]}`;
    if (token && !found[1] && !isLoopback(new URL(this.#url).hostname)) {
      throw new TypeError('a token is not sent in plain text: use grpcs://');
    }
    this.#options = { ca, cert, key };
    this.#token = token;
    this.#maxBytes = maxMessageBytes;
  }

  /** The one response of a call. */
  async unary(method, request, options) {
    let answer;
    for await (const response of this.call(method, [request], options)) {
      if (answer) throw new RpcError(Code.INTERNAL, `${method.path} has several responses`);
      answer = response;
    }
    if (!answer) throw new RpcError(Code.INTERNAL, `${method.path} has no response`);
    return answer;
  }

  /** The responses of a call, as they come. Requests may be any iterable, asynchronous too. */
  async *call(method, requests, { timeoutMs = 30_000 } = {}) {
    const stream = this.#open(method.path, timeoutMs);
    const incoming = new Incoming(stream, this.#maxBytes);
    const timer = setTimeout(() => {
      incoming.end(new RpcError(Code.DEADLINE_EXCEEDED, `no answer after ${timeoutMs} ms`));
    }, timeoutMs);
    send(stream, method.request, requests).catch((error) => incoming.end(error));
    try {
      for await (const bytes of incoming.messages()) yield method.response.decode(bytes);
    } finally {
      clearTimeout(timer);
      if (!stream.closed) stream.close(http2.constants.NGHTTP2_CANCEL);
    }
  }

  /** Ends the connection once its calls have ended. */
  close() {
    this.#session?.close();
    this.#session = undefined;
  }

  #open(path, timeoutMs) {
    const headers = {
      ':method': 'POST',
      ':path': path,
      te: 'trailers',
      'content-type': 'application/grpc',
      'grpc-accept-encoding': 'identity',
      'grpc-timeout': `${Math.max(1, Math.min(LONGEST_MS, Math.ceil(timeoutMs)))}m`,
    };
    if (this.#token) headers.authorization = `Bearer ${this.#token()}`;
    return this.#connected().request(headers);
  }

  /** The connection; another one where the last has ended or takes no more calls. */
  #connected() {
    if (!this.#session || this.#session.closed || this.#session.destroyed) {
      const session = http2.connect(this.#url, this.#options);
      const leave = () => {
        if (this.#session === session) this.#session = undefined;
      };
      session.on('error', leave); // its streams say why
      session.on('goaway', leave);
      session.on('close', leave);
      this.#session = session;
    }
    return this.#session;
  }
}

function isLoopback(host) {
  return host === 'localhost' || host === '[::1]' || /^127\.\d+\.\d+\.\d+$/.test(host);
}

/** Writes requests, never more than the other side takes. */
async function send(stream, type, requests) {
  for await (const request of requests) {
    const body = type.encode(request);
    const frame = Buffer.alloc(FRONT + body.length);
    frame.writeUInt32BE(body.length, 1);
    frame.set(body, FRONT);
    if (stream.destroyed) return;
    if (!stream.write(frame)) {
      await new Promise((resolve) => {
        stream.once('drain', resolve);
        stream.once('close', resolve);
      });
    }
  }
  stream.end();
}

/** What comes in on a stream: messages, then how the call ended. */
class Incoming {
  #stream;
  #maxBytes;
  #parts = [];
  #size = 0; // bytes of the parts
  #headers = {};
  #end; // undefined as long as more may come; null for a good end, or what went wrong
  #wake = () => {};

  constructor(stream, maxBytes) {
    this.#stream = stream;
    this.#maxBytes = maxBytes;
    stream.on('response', (headers) => this.#read(headers));
    stream.on('trailers', (headers) => this.#read(headers));
    stream.on('data', (part) => {
      this.#parts.push(part);
      this.#size += part.length;
      if (this.#size > maxBytes) stream.pause();
      this.#wake();
    });
    stream.on('error', (error) => {
      if (this.#headers['grpc-status'] !== undefined) this.end(errorOf(this.#headers));
      const why = error.cause?.message ?? error.message;
      this.end(new RpcError(Code.UNAVAILABLE, `the connection broke (${why})`));
    });
    stream.on('close', () => this.end(errorOf(this.#headers)));
  }

  /** Nothing more comes. The first reason counts. */
  end(error) {
    if (this.#end === undefined) this.#end = error ?? null;
    this.#wake();
  }

  async *messages() {
    for (;;) {
      const bytes = this.#next();
      if (bytes) yield bytes;
      else if (this.#end) throw this.#end;
      else if (this.#end === null && !this.#size) return;
      else if (this.#end === null) throw new RpcError(Code.INTERNAL, 'a response is cut off');
      else await new Promise((resolve) => (this.#wake = resolve));
    }
  }

  /** The next whole message; undefined if it is not here yet. */
  #next() {
    if (this.#size < FRONT) return undefined;
    const front = this.#joined();
    const size = front.readUInt32BE(1);
    if (front[0]) throw new RpcError(Code.INTERNAL, 'a response is compressed');
    if (size > this.#maxBytes) {
      const said = `a response of ${size} bytes; at most ${this.#maxBytes} are taken`;
      throw new RpcError(Code.RESOURCE_EXHAUSTED, said);
    }
    if (this.#size < FRONT + size) {
      this.#stream.resume();
      return undefined;
    }
    const all = this.#joined(FRONT + size);
    this.#parts[0] = all.subarray(FRONT + size);
    this.#size -= FRONT + size;
    if (this.#size <= this.#maxBytes) this.#stream.resume();
    return all.subarray(FRONT, FRONT + size);
  }

  /** The first part, which has so many bytes then. */
  #joined(count = FRONT) {
    if (this.#parts[0].length < count) this.#parts = [Buffer.concat(this.#parts)];
    return this.#parts[0];
  }

  #read(headers) {
    const status = headers[':status'];
    if (status !== undefined && status !== 200 && headers['grpc-status'] === undefined) {
      this.end(new RpcError(CODE_OF_HTTP[status] ?? Code.UNKNOWN, `HTTP status ${status}`));
    }
    Object.assign(this.#headers, headers);
  }
}

const CODE_OF_HTTP = {
  400: Code.INTERNAL, 401: Code.UNAUTHENTICATED, 403: Code.PERMISSION_DENIED,
  404: Code.UNIMPLEMENTED, 429: Code.UNAVAILABLE, 502: Code.UNAVAILABLE, 503: Code.UNAVAILABLE,
  504: Code.UNAVAILABLE,
};

/** The error that headers and trailers speak of; null if all is well. */
function errorOf(headers) {
  const said = headers['grpc-status'];
  if (said === undefined) return new RpcError(Code.UNAVAILABLE, 'the call broke off');
  const code = Number(said);
  if (code === Code.OK) return null;
  const detail = headers['dataplane-error-bin'];
  if (detail !== undefined) {
    try {
      const { type, message, attributes } = ErrorMessage.decode(Buffer.from(detail, 'base64'));
      const told = [...attributes].map(([name, value]) => [name, fromValue(value)]);
      return new RpcError(code, message, type, Object.fromEntries(told));
    } catch {
      // The status itself still says something.
    }
  }
  return new RpcError(code, unescaped(headers['grpc-message'] ?? 'no reason is given'));
}

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
