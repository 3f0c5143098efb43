// The JavaScript client as a process of a test's: `vectors` opens and seals what stands on standard
// input, `calls KEYS` makes the calls that come there, a line of JSON each, and answers with lines.

import readline from "node:readline";
import { AnswerOpener, RequestSealer, createFetch, deriveKeys, readKeys } from "../../docs/clients/smx1.mjs";

const say = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

function openVector(rows, vector, cut) {
  const { request } = vector, row = rows.find((r) => r.kid === request.kid);
  const asked = { keys: deriveKeys(row), model: Buffer.from(request.model), mac: request.mac,
    nonce: Buffer.from(request.nonce, "hex") };
  const wire = vector.wire_text === undefined ? Buffer.from(vector.wire_hex, "hex")
    : Buffer.from(vector.wire_text);
  const headers = vector.headers;
  try {
    const opener = new AnswerOpener(asked, headers["Content-Type"], headers["Content-Encoding"]);
    const parts = [];
    for (let i = 0; i < wire.length; i += cut || wire.length) {
      parts.push(opener.feed(wire.subarray(i, cut ? i + cut : wire.length)));
    }
    parts.push(opener.finish());
    const { status, type } = opener.prelude;
    return { outcome: "ok", status, type, body: Buffer.concat(parts).toString("hex") };
  } catch (problem) {
    if (!problem.reason) throw problem;
    return { outcome: problem.reason };
  }
}

function sealVector(rows, { kid, flags, time_ms: nowMs, nonce, model, prelude, body }) {
  const [line, type, qos] = Buffer.from(prelude, "hex").toString("latin1").split("\n");
  const [method, target] = line.split(" ");
  const sealer = new RequestSealer(rows.find((r) => r.kid === kid), { method, target, type, qos,
    model, mac: Boolean(flags & 2), sign: Boolean(flags & 8), nonce: Buffer.from(nonce, "hex"), nowMs });
  return sealer.single(Buffer.from(body, "hex")).toString("hex");
}

async function text(stream) {
  const parts = [];
  for await (const piece of stream) parts.push(piece);
  return Buffer.concat(parts).toString();
}

async function call(fetch, { url, init, size, slowly, form }) {
  try {
    if (form) {
      init.body = new FormData();
      for (const [name, value] of Object.entries(form)) init.body.append(name, value);
    }
    if (size) init.body = "x".repeat(size);
    if (slowly) {
      init.body = (async function* pieces() { for (const piece of slowly) yield Buffer.from(piece); })();
    }
    const answer = await fetch(url, init);
    const head = { status: answer.status, type: answer.headers.get("content-type") };
    say(head);
    let seen = "";
    for await (const piece of answer.body ?? []) {
      const part = Buffer.from(piece).toString();
      seen += part;
      if (seen.length < 4096) say({ part });
    }
    say({ end: true, length: seen.length, body: seen.length < 4096 ? seen : undefined });
  } catch (problem) {
    say({ error: problem.reason ?? String(problem), status: problem.status, code: problem.code });
  }
}

const [, , mode, keys, options] = process.argv;
if (mode === "vectors") {
  const { rows, open, seal, cuts } = JSON.parse(await text(process.stdin));
  say({ opened: open.map((v) => cuts.map((cut) => openVector(rows, v, cut))),
    sealed: seal.map((v) => sealVector(rows, v)) });
} else {
  const fetch = createFetch(readKeys(keys), JSON.parse(options ?? "{}"));
  for await (const line of readline.createInterface({ input: process.stdin })) {
    await call(fetch, JSON.parse(line));
  }
}
