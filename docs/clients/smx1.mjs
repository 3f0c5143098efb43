// SMX1 (docs/envelope.md) for Node 18 or newer: seals requests, opens answers, both as streams too.
//
//   import { createFetch, readKeys } from "./smx1.mjs";
//   const fetch = createFetch(readKeys("client.json"));
//   const answer = await fetch("http://127.0.0.1:14081/v1/chat/completions", {
//     method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(chat) });
//
// `createFetch` returns a function of fetch's form (method, headers, body, signal), so a library that
// takes one, as the OpenAI SDK does, speaks SMX1. A body that is an async iterable goes out frame by
// frame as it comes; it needs `model` in the options where its type has one. Nothing of a request but
// path, model and trace fields goes out in clear, and nothing but an envelope is taken for an answer.
//
// SM4-GCM is OpenSSL's where Node has it (`sm4-gcm`), else the package sm-crypto-v2 does it (npm ci).
// SM3, HKDF's HMAC, AES and Ed25519 are Node's own. SM2 signatures need the package.

import crypto from "node:crypto";
import fs from "node:fs";
import http from "node:http";
import https from "node:https";

export const MEDIA_TYPE = "application/x-sm4-envelope";
const EVENT_STREAM = "text/event-stream";
const STREAM = 1, MAC = 2, RESPONSE = 4, SIGNATURE = 8;
const HEADER_BYTES = 40, TAG_BYTES = 16, SINGLE_BYTES_MAX = 1 << 20;
const FRAME_SEALED_MAX = 65552, SSE_SEALED_MAX = 32768;
const LAST = 0x80000000;
const TRACE_FIELDS = ["traceparent", "tracestate", "x-request-id"];
const NATIVE_SM4 = crypto.getCiphers().includes("sm4-gcm");
const sm = await import("sm-crypto-v2").catch(() => null);

// `reason` is an outcome class of docs/envelope.md, or "unsealed" with `status` and perhaps `code`.
export class EnvelopeError extends Error {
  constructor(reason, detail = {}) {
    super(`the envelope is refused: ${reason}`);
    this.name = "EnvelopeError";
    Object.assign(this, { reason, ...detail });
  }
}

// Return the envelope keys of a client.json.
export function readKeys(path) {
  return JSON.parse(fs.readFileSync(path, "utf8")).envelope_keys;
}

// ---- ciphers and keys

const hex = (text) => Buffer.from(text, "hex");
const u16 = (n) => { const b = Buffer.alloc(2); b.writeUInt16BE(n); return b; };
const u32 = (n) => { const b = Buffer.alloc(4); b.writeUInt32BE(n >>> 0); return b; };
const hmacSm3 = (key, ...parts) => {
  const mac = crypto.createHmac("sm3", key);
  for (const part of parts) mac.update(part);
  return mac.digest();
};

function hkdfExpand(prk, info, size) {
  let out = Buffer.alloc(0), block = Buffer.alloc(0);
  for (let i = 1; out.length < size; i++) {
    block = hmacSm3(prk, block, info, Buffer.from([i]));
    out = Buffer.concat([out, block]);
  }
  return out.subarray(0, size);
}

function gcmSeal(suite, key, nonce, data, aad) {
  if (suite === 1 && !NATIVE_SM4) {
    if (!sm) throw new Error("no SM4-GCM here: npm install sm-crypto-v2");
    const made = sm.sm4.encrypt(data, key,
      { mode: "gcm", iv: nonce, associatedData: aad, output: "array", outputTag: true });
    return Buffer.concat([made.output, made.tag]);
  }
  const cipher = crypto.createCipheriv(suite === 1 ? "sm4-gcm" : "aes-256-gcm", key, nonce);
  cipher.setAAD(aad);
  return Buffer.concat([cipher.update(data), cipher.final(), cipher.getAuthTag()]);
}

// Nothing comes out before the tag was checked.
function gcmOpen(suite, key, nonce, sealed, aad) {
  const data = sealed.subarray(0, -TAG_BYTES), tag = sealed.subarray(-TAG_BYTES);
  try {
    if (suite === 1 && !NATIVE_SM4) {
      if (!sm) throw new Error("no SM4-GCM here: npm install sm-crypto-v2");
      return Buffer.from(sm.sm4.decrypt(data, key,
        { mode: "gcm", iv: nonce, associatedData: aad, tag, output: "array" }));
    }
    const name = suite === 1 ? "sm4-gcm" : "aes-256-gcm";
    const decipher = crypto.createDecipheriv(name, key, nonce, { authTagLength: TAG_BYTES });
    decipher.setAAD(aad);
    decipher.setAuthTag(tag);
    return Buffer.concat([decipher.update(data), decipher.final()]);
  } catch (problem) {
    if (/npm install/.test(problem.message)) throw problem;
    throw new EnvelopeError("bad_tag");
  }
}

// Return everything that is derived from one row of a key file.
export function deriveKeys(row) {
  const kid = hex(row.kid), client = Buffer.from(row.client), audience = Buffer.from(row.audience);
  const prk = hmacSm3(kid, hex(row.root));
  const info = (label) => Buffer.concat([Buffer.from(label), Buffer.from([0, row.suite]),
    u16(client.length), client, u16(audience.length), audience]);
  const size = row.suite === 1 ? 16 : 32;
  return {
    row, kid, audience, pad: row.pad ?? 128,
    request: hkdfExpand(prk, info("smx1 req"), size),
    response: hkdfExpand(prk, info("smx1 resp"), size),
    requestStreams: hkdfExpand(prk, info("smx1 req stream"), 32),
    responseStreams: hkdfExpand(prk, info("smx1 resp stream"), 32),
    mac: hkdfExpand(prk, info("smx1 mac"), 32),
    digest: () => crypto.createHash(row.digest ?? "sha256"),
  };
}

// Return the row to seal with at this time: in time, the one that began last.
export function sealingKey(rows, nowMs) {
  const valid = rows.filter((row) => row.not_before_ms <= nowMs && nowMs <= row.not_after_ms);
  if (!valid.length) throw new Error("no envelope key is valid now");
  return valid.reduce((a, b) => (b.not_before_ms > a.not_before_ms ? b : a));
}

// ---- the parts of an envelope

function encodeHeader({ suite, flags, kid, timeMs, nonce, length }) {
  const raw = Buffer.alloc(HEADER_BYTES);
  raw.write("SMX1", 0, "latin1");
  raw[4] = suite;
  raw[5] = flags;
  kid.copy(raw, 8);
  raw.writeBigUInt64BE(BigInt(timeMs), 16);
  nonce.copy(raw, 24);
  raw.writeUInt32BE(length, 36);
  return raw;
}

function decodeAnswerHeader(raw) {
  const flags = raw[5], length = raw.readUInt32BE(36);
  if (raw.toString("latin1", 0, 4) !== "SMX1") throw new EnvelopeError("bad_magic");
  if (raw[4] !== 1 && raw[4] !== 2) throw new EnvelopeError("bad_suite");
  if (flags & ~15 || !(flags & RESPONSE) || flags & SIGNATURE) throw new EnvelopeError("bad_flags");
  if (raw.readUInt16BE(6)) throw new EnvelopeError("bad_reserved");
  const single = length >= TAG_BYTES && HEADER_BYTES + length <= SINGLE_BYTES_MAX;
  if (flags & STREAM ? length !== 0 : !single) throw new EnvelopeError("bad_length");
  return { suite: raw[4], flags, kid: raw.subarray(8, 16), nonce: raw.subarray(24, 36), length };
}

const associated = (header, model, audience, requestNonce) => Buffer.concat([
  header, u16(model.length), model, u16(audience.length), audience, requestNonce]);

function pad(data, unit) {
  const out = Buffer.alloc(Math.ceil((data.length + 1) / unit) * unit);
  data.copy(out);
  out[data.length] = 0x80;
  return out;
}

function unpad(padded) {
  let end = padded.length - 1;
  while (end >= 0 && padded[end] === 0) end--;
  if (end < 0 || padded[end] !== 0x80) throw new EnvelopeError("bad_padding");
  return padded.subarray(0, end);
}

function encodePrelude({ method, target, type, qos }) {
  const text = `${method} ${target}\n${type}\n${qos}\n`;
  if (!/^[A-Z]+ \/[!-~]*\n[ -~]*\n[ -~]*\n$/.test(text) || text.length > 65535) {
    throw new Error("a field of the request cannot stand in an envelope");
  }
  return Buffer.concat([u16(text.length), Buffer.from(text, "latin1")]);
}

function splitAnswerPrelude(data) {
  const size = data.length >= 2 ? 2 + data.readUInt16BE(0) : 2;
  if (data.length < size) throw new EnvelopeError("bad_prelude");
  const found = /^([0-9]{3})\n([ -~]*)\n$/.exec(data.toString("latin1", 2, size));
  if (!found) throw new EnvelopeError("bad_prelude");
  return { prelude: { status: Number(found[1]), type: found[2] }, body: data.subarray(size) };
}

// The nonces and key of one stream's frames, in order.
class FrameCipher {
  constructor(base, suite, aad, nonce, requestNonce) {
    const tail = [nonce, requestNonce], size = suite === 1 ? 16 : 32;
    const block = (i) => hmacSm3(base, "smx1 stream", Buffer.from([i]), ...tail);
    const blocks = Buffer.concat([block(1), block(2)]);
    this.suite = suite;
    this.key = blocks.subarray(0, size);
    this.mask = blocks.subarray(size, size + 12);
    this.aad = aad;
    this.counter = 0;
  }

  next(last) {
    if (this.counter > 0xffffffff) throw new EnvelopeError("bad_tag");
    const plain = Buffer.concat([Buffer.alloc(7), u32(this.counter), Buffer.from([last ? 1 : 0])]);
    const aad = this.counter ? Buffer.alloc(0) : this.aad;
    this.counter += 1;
    return [plain.map((byte, i) => byte ^ this.mask[i]), aad];
  }

  seal(data, unit, last) {
    const [nonce, aad] = this.next(last);
    const sealed = gcmSeal(this.suite, this.key, nonce, pad(data, unit), aad);
    return Buffer.concat([u32(sealed.length + (last ? LAST : 0)), sealed]);
  }

  open(sealed, last) {
    const [nonce, aad] = this.next(last);
    return unpad(gcmOpen(this.suite, this.key, nonce, sealed, aad));
  }
}

// ---- sealing a request

// One request: `single(body)`, or `head()`, any `data(body)`, `last(body)`. `options`: method,
// target, type, qos, model, mac, sign; nonce and nowMs are for known answers only.
export class RequestSealer {
  constructor(row, options) {
    const { method = "POST", target = "/", type = "", qos = "", model = "", sign = true } = options;
    if (!/^[!-~]{0,255}$/.test(model)) throw new Error("the model's name cannot stand in an envelope");
    this.keys = deriveKeys(row);
    this.model = Buffer.from(model);
    this.mac = Boolean(options.mac || row.require_mac);
    this.nonce = options.nonce ?? crypto.randomBytes(12);
    this.signs = Boolean(sign && row.sign_private);
    if (row.require_signature && !this.signs) throw new Error("this kid demands a signature");
    this.flags = (this.mac ? MAC : 0) | (this.signs ? SIGNATURE : 0);
    this.timeMs = options.nowMs ?? Date.now();
    this.prelude = encodePrelude({ method, target, type, qos });
    this.digest = this.keys.digest().update(this.prelude);
    this.trailerBytes = (this.signs ? 64 : 0) + (this.mac ? 32 : 0);
  }

  #header(flags, length) {
    const { row, kid } = this.keys;
    return encodeHeader({ suite: row.suite, flags: this.flags | flags, kid, timeMs: this.timeMs,
      nonce: this.nonce, length });
  }

  #trailer(aad) {
    const digest = this.digest.digest(), parts = [];
    if (this.signs) parts.push(sign(this.keys.row, aad, digest));
    if (this.mac) parts.push(hmacSm3(this.keys.mac, aad, digest));
    return Buffer.concat(parts);
  }

  // Whether a body of that size fits in a single envelope.
  fits(size) {
    const inner = this.prelude.length + size + this.trailerBytes;
    const padded = Math.ceil((inner + 1) / this.keys.pad) * this.keys.pad;
    return HEADER_BYTES + padded + TAG_BYTES <= SINGLE_BYTES_MAX;
  }

  single(body) {
    const { row, audience, request, pad: unit } = this.keys;
    const inner = this.prelude.length + body.length + this.trailerBytes;
    const header = this.#header(0, Math.ceil((inner + 1) / unit) * unit + TAG_BYTES);
    const aad = associated(header, this.model, audience, Buffer.alloc(0));
    this.digest.update(body);
    const padded = pad(Buffer.concat([this.prelude, body, this.#trailer(aad)]), unit);
    return Buffer.concat([header, gcmSeal(row.suite, request, this.nonce, padded, aad)]);
  }

  head() {
    const { row, audience, requestStreams, pad: unit } = this.keys;
    const header = this.#header(STREAM, 0);
    this.aad = associated(header, this.model, audience, Buffer.alloc(0));
    this.cipher = new FrameCipher(requestStreams, row.suite, this.aad, this.nonce, Buffer.alloc(0));
    this.dataMax = Math.floor((FRAME_SEALED_MAX - TAG_BYTES) / unit) * unit - 1;
    this.first = this.prelude;
    if (this.first.length > this.dataMax - this.trailerBytes) {
      throw new Error("the prelude does not fit in the first frame");
    }
    return header;
  }

  #cut(whole, room) {
    const frames = [];
    while (whole.length > this.dataMax - room) {
      frames.push(this.cipher.seal(whole.subarray(0, this.dataMax), this.keys.pad, false));
      whole = whole.subarray(this.dataMax);
    }
    return [frames, whole];
  }

  data(body) {
    this.digest.update(body);
    const [frames, rest] = this.#cut(Buffer.concat([this.first, body]), 0);
    this.first = Buffer.alloc(0);
    if (rest.length) frames.push(this.cipher.seal(rest, this.keys.pad, false));
    return Buffer.concat(frames);
  }

  // The trailer lies wholly in the last frame.
  last(body = Buffer.alloc(0)) {
    this.digest.update(body);
    const trailer = this.#trailer(this.aad);
    const [frames, rest] = this.#cut(Buffer.concat([this.first, body]), trailer.length);
    frames.push(this.cipher.seal(Buffer.concat([rest, trailer]), this.keys.pad, true));
    return Buffer.concat(frames);
  }
}

function sign(row, aad, digest) {
  const message = Buffer.concat([Buffer.from("SMX1 signature\0"), aad, digest]);
  if (row.scheme === "ed25519") {
    const der = Buffer.concat([hex("302e020100300506032b657004220420"), hex(row.sign_private)]);
    return crypto.sign(null, message, crypto.createPrivateKey({ key: der, format: "der", type: "pkcs8" }));
  }
  if (!sm) throw new Error("SM2 signatures need a package: npm install sm-crypto-v2");
  return hex(sm.sm2.doSignature(message, row.sign_private,
    { hash: true, publicKey: `04${row.sign_public}`, userId: "1234567812345678" }));
}

// ---- opening an answer

// Opens one answer, given its outer Content-Type and Content-Encoding. `feed` returns the body bytes
// that are released: each frame's after its tag, the last one's after the MAC, a single's by `finish`.
export class AnswerOpener {
  constructor(request, contentType, contentEncoding) {
    const kind = (contentType ?? "").split(";")[0].trim().toLowerCase();
    if (contentEncoding != null || ![MEDIA_TYPE, EVENT_STREAM].includes(kind)) {
      throw new EnvelopeError("bad_carrier");
    }
    this.request = request;
    this.sse = kind === EVENT_STREAM;
    this.buffer = Buffer.alloc(0);
    this.digest = request.mac ? request.keys.digest() : null;
    this.complete = this.failed = false;
  }

  feed(data) { return this.#guard(() => (this.sse ? this.#events(data) : this.#raw(data))); }
  finish() { return this.#guard(() => this.#finish()); }

  #guard(work) {
    if (this.failed) throw new EnvelopeError("bad_carrier");
    this.failed = true; // until it returns
    const out = work();
    this.failed = false;
    return out;
  }

  #header(raw) {
    const { request } = this, header = decodeAnswerHeader(raw), { keys } = request;
    const hasMac = Boolean(header.flags & MAC);
    if (hasMac !== request.mac) throw new EnvelopeError(hasMac ? "bad_flags" : "missing_mac");
    if (!header.kid.equals(keys.kid)) throw new EnvelopeError("unknown_kid");
    if (header.suite !== keys.row.suite) throw new EnvelopeError("bad_suite");
    this.aad = associated(raw, request.model, keys.audience, request.nonce);
    if (header.flags & STREAM) {
      this.cipher = new FrameCipher(keys.responseStreams, header.suite, this.aad, header.nonce,
        request.nonce);
    }
    this.header = header;
  }

  #raw(data) {
    const out = [];
    this.buffer = this.buffer.length ? Buffer.concat([this.buffer, data]) : Buffer.from(data);
    if (!this.header) {
      if (this.buffer.length < HEADER_BYTES) return Buffer.alloc(0);
      this.#header(Buffer.from(this.buffer.subarray(0, HEADER_BYTES)));
      this.buffer = this.buffer.subarray(HEADER_BYTES);
    }
    if (!this.cipher) {
      if (this.buffer.length > this.header.length) throw new EnvelopeError("trailing_data");
      return Buffer.alloc(0);
    }
    for (;;) {
      if (this.complete && this.buffer.length) throw new EnvelopeError("trailing_data");
      if (this.complete || this.buffer.length < 4) break;
      const [size, last] = frameSize(this.buffer);
      if (this.buffer.length < 4 + size) break;
      out.push(this.#frame(this.buffer.subarray(4, 4 + size), last));
      this.buffer = this.buffer.subarray(4 + size);
    }
    return Buffer.concat(out);
  }

  #events(data) {
    const out = [], longest = 6 + 4 * Math.ceil((4 + FRAME_SEALED_MAX) / 3);
    this.buffer = Buffer.concat([this.buffer, data]);
    for (let end; (end = this.buffer.indexOf(10)) >= 0;) {
      let line = this.buffer.toString("latin1", 0, end);
      this.buffer = this.buffer.subarray(end + 1);
      if (line.endsWith("\r")) line = line.slice(0, -1);
      if (line.length > longest) throw new EnvelopeError("bad_carrier");
      if (line.startsWith(":")) continue;
      if (line) this.#line(line);
      else if (this.pending) {
        const payload = this.pending;
        this.pending = null;
        if (this.header) out.push(this.#event(payload));
        else this.#firstEvent(payload);
      }
    }
    if (this.buffer.length > longest + 1) throw new EnvelopeError("bad_carrier");
    return Buffer.concat(out);
  }

  #line(line) {
    if (this.complete) throw new EnvelopeError("trailing_data");
    const text = /^data: ?([A-Za-z0-9_-]+)$/.exec(line)?.[1];
    const payload = text && Buffer.from(text, "base64url");
    // One encoding of everything: no loose bits at the end.
    if (this.pending || !text || payload.toString("base64url") !== text) {
      throw new EnvelopeError("bad_carrier");
    }
    this.pending = payload;
  }

  #firstEvent(payload) {
    if (payload.length !== HEADER_BYTES) throw new EnvelopeError("bad_carrier");
    this.#header(payload);
    if (!this.cipher) throw new EnvelopeError("bad_carrier");
  }

  #event(payload) {
    if (payload.length < 4) throw new EnvelopeError("bad_carrier");
    const [size, last] = frameSize(payload);
    if (size > SSE_SEALED_MAX) throw new EnvelopeError("frame_too_large");
    if (payload.length !== 4 + size) throw new EnvelopeError("bad_carrier");
    return this.#frame(payload.subarray(4), last);
  }

  #frame(sealed, last) {
    const body = this.#take(this.cipher.open(sealed, last), last);
    this.complete = last;
    return body;
  }

  // Prelude, trailer and MAC of one frame's data, or of a single's.
  #take(data, last) {
    if (last && this.digest) {
      if (data.length < 32) throw new EnvelopeError("missing_mac");
      const trailer = data.subarray(-32);
      data = data.subarray(0, -32);
      this.digest.update(data);
      const mac = hmacSm3(this.request.keys.mac, this.aad, this.digest.digest());
      if (!crypto.timingSafeEqual(mac, trailer)) throw new EnvelopeError("bad_mac");
    } else this.digest?.update(data);
    if (this.prelude) return data;
    const { prelude, body } = splitAnswerPrelude(data);
    this.prelude = prelude;
    return body;
  }

  #finish() {
    const { header, buffer } = this;
    if (!header) throw new EnvelopeError("truncated");
    if (this.cipher) {
      if (!this.complete) throw new EnvelopeError("truncated");
      if (this.sse && !/^(:|\r*$)/.test(buffer.toString("latin1"))) {
        throw new EnvelopeError("trailing_data");
      }
      return Buffer.alloc(0);
    }
    if (buffer.length < header.length) throw new EnvelopeError("truncated");
    const { response } = this.request.keys;
    const data = unpad(gcmOpen(header.suite, response, header.nonce, buffer, this.aad));
    const body = this.#take(data, true);
    this.complete = true;
    return body;
  }
}

function frameSize(prefix) {
  const word = prefix.readUInt32BE(0), last = word >= LAST, size = last ? word - LAST : word;
  if (size > FRAME_SEALED_MAX) throw new EnvelopeError("frame_too_large");
  if (size < TAG_BYTES + 1) throw new EnvelopeError("bad_length");
  return [size, last];
}

// ---- over HTTP

const isJson = (type) => /^application\/([^;]*\+)?json\s*(;|$)/i.test(type);

function modelOf(type, body) {
  if (!isJson(type) || !body.length) return "";
  const { model = "" } = JSON.parse(body.toString("utf8")) ?? {};
  if (typeof model !== "string") throw new Error("the body's model is not a string");
  return model;
}

// Return a function of fetch's form over these keys. `options`: mac, sign, qos, agent.
export function createFetch(rows, options = {}) {
  return async function sealedFetch(input, init = {}) {
    const url = new URL(input), given = new Headers(init.headers);
    const streamed = Boolean(init.body?.[Symbol.asyncIterator]) && !Buffer.isBuffer(init.body);
    // What fetch makes of strings, bytes, forms and blobs, with the type that goes with it.
    const encoded = new Response(streamed ? null : init.body ?? null);
    const body = streamed ? null : Buffer.from(await encoded.arrayBuffer());
    const type = init.body == null ? ""
      : given.get("content-type") ?? encoded.headers.get("content-type") ?? "";
    const named = init.body instanceof FormData ? String(init.body.get("model") ?? "") : null;
    const model = init.model ?? named ?? (streamed ? "" : modelOf(type, body));
    const sealer = new RequestSealer(sealingKey(rows, Date.now()), {
      method: (init.method ?? "GET").toUpperCase(), target: url.pathname + url.search, type, model,
      qos: given.get("x-qos-class") ?? options.qos ?? "", mac: options.mac, sign: options.sign });
    const wantsStream = /event-stream/.test(given.get("accept") ?? "")
      || (body && isJson(type) && body.length && JSON.parse(body.toString("utf8"))?.stream === true);
    const headers = { "Content-Type": MEDIA_TYPE,
      Accept: wantsStream ? `${MEDIA_TYPE}, ${EVENT_STREAM}` : MEDIA_TYPE };
    if (model) headers["X-Model-Id"] = model;
    for (const name of TRACE_FIELDS) if (given.has(name)) headers[name] = given.get(name);
    let wire = null;
    if (!streamed) {
      wire = sealer.fits(body.length) ? sealer.single(body)
        : Buffer.concat([sealer.head(), sealer.last(body)]);
      headers["Content-Length"] = wire.length;
    }
    const outer = await post(url, headers, wire, streamed ? [sealer, init.body] : null, {
      signal: init.signal, agent: options.agent });
    return opened(sealer, outer);
  };
}

// Send an envelope; the query stays inside. Resolves with the answer's head and body.
function post(url, headers, wire, source, { signal, agent }) {
  const { request } = url.protocol === "https:" ? https : http;
  return new Promise((resolve, reject) => {
    const sent = request({ protocol: url.protocol, hostname: url.hostname, port: url.port,
      path: url.pathname, method: "POST", headers, signal, agent }, resolve);
    sent.on("error", reject);
    if (!source) sent.end(wire);
    else writeFrames(sent, ...source).catch((problem) => sent.destroy(problem));
  });
}

async function writeFrames(sent, sealer, body) {
  const write = (data) => sent.write(data) || new Promise((go) => sent.once("drain", go));
  await write(sealer.head());
  for await (const piece of body) await write(sealer.data(Buffer.from(piece)));
  sent.end(sealer.last());
}

async function opened(sealer, outer) {
  const kind = (outer.headers["content-type"] ?? "").split(";")[0].trim().toLowerCase();
  if (kind !== MEDIA_TYPE && !(kind === EVENT_STREAM && outer.statusCode === 200)) {
    throw await unsealed(outer);
  }
  const opener = new AnswerOpener(sealer, outer.headers["content-type"],
    outer.headers["content-encoding"]);
  const bodies = release(opener, outer);
  const first = await bodies.next(); // the prelude is known after it
  const { status, type } = opener.prelude;
  const bodiless = status === 204 || status === 205 || status === 304;
  const stream = new ReadableStream({
    start(to) { if (first.done) to.close(); else to.enqueue(first.value); },
    async pull(to) {
      try {
        const { value, done } = await bodies.next();
        if (done) to.close(); else to.enqueue(value);
      } catch (problem) { to.error(problem); }
    },
    cancel() { outer.destroy(); },
  }, { highWaterMark: 0 });
  return new Response(bodiless ? null : stream, { status, headers: type ? { "content-type": type } : {} });
}

async function* release(opener, outer) {
  try {
    for await (const piece of outer) {
      const body = opener.feed(piece);
      if (body.length) yield body;
    }
  } catch (problem) {
    // A connection that breaks off is an answer without its end.
    throw problem instanceof EnvelopeError ? problem : new EnvelopeError("truncated");
  }
  const rest = opener.finish();
  if (rest.length) yield rest;
}

// What came is no envelope: its status, and a code of ours if it names one; never its text.
async function unsealed(outer) {
  let text = "";
  for await (const piece of outer) {
    text += piece.toString("latin1");
    if (text.length > 16384) break;
  }
  outer.destroy();
  const code = /"code":\s*"([a-z_]{1,40})"/.exec(text)?.[1];
  return new EnvelopeError("unsealed", { status: outer.statusCode, code });
}
