#!/usr/bin/env python3
# fmt: off
"""Check a tongguan audit log, or a bundle of one, with Python's standard library alone.
    env -i python3 -I -S verify.py DIR [--keys FILE]...
DIR holds chains (`<start ns>-<8 hex>/<first seq>.log`) or is an extracted bundle. FILE is
auditor.json (MACs are checked too) or public keys, one a line; without it the log's own keys are
taken: it proves to be of one piece, not whose it is. A line is `canonical JSON, TAB, MAC`: prev is
the MAC of the record before, seq its place; a `checkpoint` holds a signed note of the RFC 6962 tree
over all lines before it (only Ed25519 signatures are checked)."""
from __future__ import annotations
import base64, hashlib, hmac, json, re, sys
from functools import reduce
from pathlib import Path
from typing import Any
CLASSES = ("truncated gap duplicate_seq content_mismatch link_mismatch unsigned_range key_unknown "
           "malformed half_line two_records_one_line version_unknown checkpoint_mismatch fork "
           "heartbeat_missing").split()
CODES = {"ok": 0, "ok_public": 0, "io_error": 3} | {c: 10 + n for n, c in enumerate(CLASSES)}
LINE_MAX, sha256, decode64 = 1 << 20, hashlib.sha256, base64.b64decode
# --- Ed25519: RFC 8032, 5.1. A point is (X, Y, Z, T): x = X/Z, y = Y/Z, xy = T/Z.
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int, int, int]
def add(a: Point, b: Point) -> Point:
    e, f = (a[1] - a[0]) * (b[1] - b[0]), (a[1] + a[0]) * (b[1] + b[0])
    g, h = 2 * a[3] * b[3] * D, 2 * a[2] * b[2]
    i, j, k, m = f - e, h - g, h + g, f + e
    return (i * j % P, k * m % P, j * k % P, i * m % P)
def times(n: int, point: Point) -> Point:
    total = (0, 1, 1, 0)
    while n:
        total, point, n = add(total, point) if n & 1 else total, add(point, point), n >> 1
    return total
def decompress(data: bytes) -> Point:
    sign, y = divmod(int.from_bytes(data, "little"), 1 << 255)
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if (x * x - square) % P == 0 else x * pow(2, (P - 1) // 4, P) % P
    if y >= P or (x * x - square) % P or (x == 0 and sign):
        raise ValueError("no point of the curve")
    x = x if x & 1 == sign else P - x
    return (x, y, 1, x * y % P)
BASE = decompress(bytes([0x58]) + bytes([0x66]) * 31)
def ed25519_holds(public: bytes, signature: bytes, message: bytes) -> bool:
    s = int.from_bytes(signature[32:], "little")
    k = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % L
    try:
        left, right = times(s, BASE), add(decompress(signature[:32]), times(k, decompress(public)))
    except ValueError: return False
    same = all((left[i] * right[2] - right[i] * left[2]) % P == 0 for i in (0, 1))
    return same and s < L and len(signature) == 64
# --- Signed notes: text, empty line, lines of U+2014, key name, base64 of key id || signature.
Key = tuple[str, bytes, int, bytes]  # name, key id, type (1: a log's, 4: a witness's), public key
def read_key(line: str) -> Key:
    name, key_id, packed = line.strip().split("+", 2)
    data = decode64(packed, validate=True)
    if sha256(name.encode() + b"\n" + data).hexdigest()[:8] != key_id:
        raise ValueError("the key id is of another key")
    return name, bytes.fromhex(key_id), data[0], data[1:]
def read_note(note: str, keys: list[Key]) -> tuple[str, int, bytes, set[Key]]:
    """Return origin, size, root and the keys whose signature on it holds; raises ValueError."""
    (text, _, tail), good = note.rpartition("\n\n"), set()
    origin, size, root = text.split("\n")
    for line in tail.removesuffix("\n").split("\n"):
        mark, name, packed = line.split(" ")
        data = decode64(packed, validate=True)
        if mark != "\u2014" or base64.b64encode(data).decode() != packed or tail[-1:] != "\n":
            raise ValueError("not a signature line")
        for key in [key for key in keys if key[:2] == (name, data[:4])]:
            message, signature = text.encode() + b"\n", data[4:]
            if key[2] == 4:  # a witness signs a time, too
                seconds, signature = int.from_bytes(signature[:8], "big"), signature[8:]
                message = f"cosignature/v1\ntime {seconds}\n".encode() + message
            good |= {key} if ed25519_holds(key[3], signature, message) else set()
    if str(int(size)) != size: raise ValueError("not a size")
    return origin, int(size), decode64(root, validate=True), good
# --- The tree: RFC 6962, 2.1 (a path in it: RFC 9162, 2.1.3.2). `peaks`: roots of whole subtrees.
def node(left: bytes, right: bytes) -> bytes: return sha256(b"\1" + left + right).digest()
def append(peaks: list[bytes], size: int, line: bytes) -> None:
    one = sha256(b"\0" + line).digest()
    while size & 1:
        one, size = node(peaks.pop(), one), size >> 1
    peaks.append(one)
def root_of_path(line: bytes, index: int, size: int, path: list[bytes]) -> bytes | None:
    one, last = sha256(b"\0" + line).digest(), size - 1
    for other in path:
        right = index & 1 or index == last
        one = node(other, one) if right else node(one, other)
        while right and index and not index & 1: index, last = index >> 1, last >> 1
        index, last = index >> 1, last >> 1
    return one if last == index == 0 else None
# --- One line: canonical JSON (RFC 8785; integers and short strings only), TAB, MAC.
HEX64, KEY = re.compile("[0-9a-f]{64}"), re.compile(r"(.+)\.(s256|sm3)\.(0|[1-9][0-9]{0,5})")
TYPES: dict[str, Any] = {
    "": lambda v: type(v) is str, "m": lambda v: type(v) is dict, "l": lambda v: type(v) is list,
    "i": lambda v: type(v) is int and abs(v) < 2**53,
    "h": lambda v: type(v) is str and HEX64.fullmatch(v),
    "t": lambda v: type(v) is str and re.fullmatch("0|[1-9][0-9]{0,19}", v)}
COMMON = " v:i kind seq:i origin wall_ns:t mono_ns:t prev:h key_id"
KINDS: dict[str, str] = dict(row.split(" ", 1) for row in (  # kind and its mandatory members
    "genesis config_sha256 image checkpoint_records:i checkpoint_s:i heartbeat_s:i prev_size:i "
    "required_signers:l clock_source clock_bound_ms:i;open trace_id tenant qos;decision what;"
    "request trace_id tenant qos status:i outcome phase times_us:m;alarm what;erased key_ref;"
    "checkpoint note in_flight:i started_total:i;heartbeat in_flight:i started_total:i;"
    "rotate new_key_id new_key_mac:h;segment_end ids_sha256:h;segment_start prev_file;"
    "recovered of_origin file offset:i length:i sha256:h last_seq:i last_mac:h;"
    "lost from:t to:t count:i reason outcomes:m;rejected second:i counts:m;"
    "pruned upto:i last_mac:h youngest_wall:t note frontier:l;"
    "closed in_flight:i started_total:i ids_sha256:h").split(";"))
WORDS = ("ok client_gone client_stalled upstream_error truncated shed rejected timeout "
         "before_first_byte streaming done").split()  # eight outcomes, then three phases
def has(record: dict[str, Any], members: str) -> bool:
    pairs = [member.partition(":") for member in members.split()]
    return all(name in record and TYPES[kind](record[name]) for name, _, kind in pairs)
def fits(value: Any, depth: int) -> bool:
    if type(value) in (dict, list):
        items = value.values() if type(value) is dict else value
        return depth <= 16 and all(fits(item, depth + 1) for item in items)
    return type(value) in (str, bool) or bool(TYPES["i"](value))
def write(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
def parse(raw: bytes) -> tuple[Any, Any, Any]:
    """Return (record, JSON, MAC) of a stored line, or (class, how many records, MAC if any)."""
    data, tab, mac = raw.removesuffix(b"\n").partition(b"\t")
    end = (HEX64.fullmatch(raw[-65:-1].decode("latin-1")) or [None])[0]
    joined = len(re.findall(rb"\t[0-9a-f]{64}(?=\{)", raw))
    if len(raw) > LINE_MAX + 1 or not raw.endswith(b"\n"):
        return "malformed" if len(raw) > LINE_MAX + 1 else "half_line", 1, None
    if joined: return "two_records_one_line", joined + 1, end
    if not tab:
        return "half_line" if data[:1] == b"{" and data[-1:] != b"\r" else "malformed", 1, None
    if not re.fullmatch(rb"[0-9a-f]{64}", mac):
        return "half_line" if re.fullmatch(rb"[0-9a-f]{0,63}", mac) else "malformed", 1, end
    try:  # what stands twice, or is spelled otherwise, gives other bytes when written again
        record = json.loads(data.decode())
        canonical = type(record) is dict and write(record) == data and fits(record, 0)
    except (ValueError, RecursionError): canonical = False
    if not canonical:
        cut = data[:1] == b"{" and not data.rstrip(b" \r\0").endswith(b"}")
        return "half_line" if cut else "malformed", 1, end
    first_version = type(record.get("v")) is int and record["v"] == 1
    members = KINDS.get(str(record.get("kind")), "?") + COMMON
    good = has(record, members if first_version else "v:i seq:i origin prev:h key_id")
    if good and first_version and record["kind"] == "request":
        good = record["outcome"] in WORDS[:8] and record["phase"] in WORDS[8:]
    return (record, data, end) if good and record["seq"] >= 0 else ("malformed", 1, end)
# --- MACs: HMAC(epoch key, raw prev || JSON); a chain's keys come from its seed by HKDF-SHA256.
ALGS, KEYS = {"s256": "sha256", "sm3": "sm3"}, dict[Any, tuple[int, bytes]]()  # KEYS: last epoch
def key_of(seed: bytes, alg: str, epoch: int, origin: str) -> bytes:
    info = b"\0".join((b"tongguan audit v1", alg.encode(), origin.encode()))
    at, key = KEYS.get((seed, alg, origin), (-1, seed))
    at, key = (at, key) if at <= epoch else (-1, seed)  # keys go one way
    for number in range(at + 1, epoch + 1):
        prk = hmac.digest(bytes(32), key, "sha256")
        key = hmac.digest(prk, (b"audit epoch" if number else info) + b"\1", "sha256")
    KEYS[seed, alg, origin] = epoch, key
    return key
def key_parts(key_id: str) -> tuple[str, str, int]:
    return (m[1], m[2], int(m[3])) if (m := KEY.fullmatch(key_id)) else ("", "", -1)
def mac_of(seeds: dict[str, bytes], record: dict[str, Any], key_id: str, data: bytes) -> str | None:
    name, alg, epoch = key_parts(key_id)
    if name not in seeds: return None  # it was not given
    key = key_of(seeds[name], alg, epoch, record["origin"])
    return hmac.new(key, bytes.fromhex(record["prev"]) + data, ALGS[alg]).hexdigest()
# --- One chain: lines in, findings out.
class Chain:
    known, closed, ended, records, wall, mono, beat = True, False, False, 0, 0, 0, 0
    mac: Any = None  # these five are of what came before; None: not yet seen
    key_id, first_ns, ids, last_note = mac, mac, mac, mac
    def __init__(self, log: Log, number: int, name: str, part: dict[str, Any]) -> None:
        first: int = part.get("first", 0)  # a bundle may begin behind a chain's first records
        self.log, self.number, self.name, self.part, self.origin = log, number, name, part, ""
        self.low = self.high = self.size = self.begin = first  # low..high: seqs that may come next
        self.prevs: set[str] | None = {part.get("prev", "0" * 64)}  # what prev may be; None: any
        self.peaks = [bytes.fromhex(peak) for peak in part.get("frontier", [])]
        self.signers = [read_key(line) for line in part.get("signers", [])]
        self.signed, self.point, self.witnessed = first - 1, first - 1, -1
        self.genesis, self.roots = dict[str, Any](), dict[int, bytes]()
        self.unknown, self.opens = set[str](), dict[str, int]()  # opens: begun, by trace id
    def find(self, cls: str, seq: int, note: str) -> None:
        self.log.find(cls, self.origin, seq, note, self.number)
    def feed(self, raw: bytes, first_of: int | None) -> None:
        one, two, mac = parse(raw)
        if type(one) is str: self.find(one, self.high, "")
        if type(one) is str or not self.take(one, two, mac, first_of):
            self.high += two if type(one) is str else 1  # so many records may have been there
            self.prevs = None if mac is None or self.prevs is None else self.prevs | {mac}
        append(self.peaks, self.size, raw.removesuffix(b"\n"))
        self.size += 1
    def take(self, record: dict[str, Any], data: bytes, mac: Any, first_of: int | None) -> bool:
        seq, key_id = record["seq"], record["key_id"]
        if self.log.seeds:
            right = mac_of(self.log.seeds, record, key_id, data)
            self.log.mac_checked |= right is not None
            if right is None and key_id not in self.unknown:
                self.unknown.add(key_id)
                self.find("key_unknown", seq if seq >= self.low else self.high, key_id)
            elif right not in (None, mac):
                self.find("content_mismatch", self.high, "the MAC does not fit")
                return False  # it cannot be trusted
        self.origin = self.origin or record["origin"]
        linked, gap = self.prevs is None or record["prev"] in self.prevs, seq > self.high
        twin, at_start = seq == self.low - 1 and mac != self.mac, self.records == self.high == 0
        if record["v"] != 1: self.find("version_unknown", seq, f"version {record['v']}")
        if first_of not in (None, seq) and seq == self.high: self.find("malformed", seq, "name")
        if seq < self.low: self.find("fork" if twin else "duplicate_seq", seq, f"at {self.high}")
        elif gap and at_start:  # pruned, perhaps: the directory knows
            self.begin, self.known, linked = seq, False, True
        elif gap: self.find("gap", self.high, f"{self.high} to {seq - 1} are missing")
        linked = (linked or twin) and record["origin"] == self.origin
        if not linked: self.find("link_mismatch", seq, "prev or origin is not of the record before")
        if seq >= self.low:
            if record["v"] == 1: self.check(record, record["kind"], seq, gap, first_of is not None)
            self.low = self.high = seq + 1
            self.prevs, self.mac, self.records = {mac}, mac, self.records + 1
        return True
    def check(self, record: dict[str, Any], kind: str, seq: int, gap: bool, first: bool) -> None:
        wall, mono, before = int(record["wall_ns"]), int(record["mono_ns"]), self.records > 0
        silent = before and not gap and kind != "lost" and 2 * (mono - self.mono) > 3 * self.beat
        misplaced = ((self.closed and kind != "checkpoint") or (kind == "genesis") != (seq == 0)
            or (kind == "segment_start") != (first and seq != 0) or (self.ended and not first)
            or (first and before and not (self.ended or "sealed" in record)))
        if misplaced: self.find("malformed", seq, f"{kind} cannot stand here")
        if self.key_id not in (None, record["key_id"]): self.find("content_mismatch", seq, "key_id")
        if before and (wall < self.wall or mono < self.mono): self.find("clock_backwards", seq, "")
        if self.beat and silent: self.find("heartbeat_missing", seq, f"for {mono - self.mono} ns")
        self.wall, self.mono, self.ended = wall, mono, kind == "segment_end"
        self.key_id = record["new_key_id" if kind == "rotate" else "key_id"]
        self.first_ns = mono if self.first_ns is None and kind != "checkpoint" else self.first_ns
        if kind == "genesis":
            self.genesis, self.beat = record, record["heartbeat_s"] * 10**9
            try:
                self.signers = [k for k in map(read_key, record["required_signers"]) if k[2] == 1]
            except (ValueError, AttributeError): self.find("malformed", seq, "required_signers")
            if self.log.pinned and not set(self.signers) <= set(self.log.pinned):
                self.find("key_unknown", seq, "no public key given for a signer")
        elif kind == "checkpoint":
            self.last_note = sha256(record["note"].encode()).hexdigest(), seq
            problem = self.problem_of(record, seq) if self.signers and self.known else ""
            self.known = self.known and not problem  # none that follows fits: it is said once
            if problem: self.find("checkpoint_mismatch", seq, problem)
        elif kind == "rotate":
            new, (name, alg, epoch) = key_parts(self.key_id), key_parts(record["key_id"])
            if new != (name, alg, epoch + 1) and (new[0] == name or new[1:] != (alg, 0)):
                self.find("malformed", seq, "rotate leads to no key that may follow")
            rest = write({name: record[name] for name in record if name != "new_key_mac"})
            mac = mac_of(self.log.seeds, record, self.key_id, rest)
            if mac not in (None, record["new_key_mac"]): self.find("content_mismatch", seq, "new")
        elif kind == "pruned":
            self.log.pruned.add((record.get("of_origin", self.origin), record["upto"]))
        elif kind == "open" and len(self.opens) < 8192: self.opens[record["trace_id"]] = seq
        elif kind == "request": self.opens.pop(record["trace_id"], None)
        elif kind in ("segment_end", "closed"):
            self.ids, self.closed = (record["ids_sha256"], seq), kind == "closed"
    def problem_of(self, record: dict[str, Any], seq: int) -> str:
        try:
            origin, size, root, good = read_note(record["note"], self.signers)
            if (origin, size) != (self.origin, seq) or not set(self.signers) <= good:
                return "of another chain or size, or not signed by all"
            whole = reduce(lambda right, left: node(left, right), self.peaks[::-1])
            if self.size != seq or root != whole: return "not the root of the records before it"
            self.signed, self.point, self.first_ns, self.roots[seq] = seq - 1, seq, None, root
            if type(record.get("cosigned")) is str:
                _, size, root, good = read_note(record["cosigned"], self.log.keys)
                if self.roots.get(size, root) != root: return "cosigned: another root of that size"
                if size in self.roots and any(key[2] == 4 for key in good):
                    self.witnessed = max(self.witnessed, size - 1)
        except ValueError as problem: return f"not a signed note: {problem}"
        return ""
    def finish(self, tail: Any, last_file: str) -> None:
        quiet = self.mono - self.first_ns if self.first_ns is not None else 0
        unsigned = self.high - self.signed - 1 > self.genesis.get("checkpoint_records", 1000) + 256
        unsigned = unsigned or quiet > 3 * self.genesis.get("checkpoint_s", 10) * 10**9
        if self.known and (self.signers or self.log.pinned) and unsigned:
            self.find("unsigned_range", max(self.signed, self.point) + 1, "too much unsigned")
        if not (self.closed or self.part.get("continues")):
            if not tail or self.high <= tail["last_seq"]: self.find("truncated", self.high, "end")
            elif last_file != tail["file"]: self.find("fork", tail["last_seq"] + 1, "longer")
# --- The directory: chains in order of their start, then what one says of another.
def stored(path: Path, end: int | None = None) -> Any:
    with path.open("rb") as file:
        while (end is None or file.tell() < end) and (raw := file.readline(LINE_MAX + 2)):
            yield raw if end is None or file.tell() <= end else raw[: end - file.tell()]
class Log:
    mac_checked, from_ns = False, 0
    def __init__(self, path: Path, seeds: dict[str, bytes], keys: list[Key]) -> None:
        self.path, self.seeds, self.keys = path, seeds, keys
        self.pinned = [key for key in keys if key[2] == 1]
        self.findings, self.chains, self.pruned = list[Any](), list[Chain](), set[Any]()
    def find(self, cls: str, origin: str, seq: int, note: str, at: int) -> None:
        self.findings.append((cls == "truncated", at, seq, len(self.findings), cls, origin, note))
    def check(self, parts: dict[str, Any]) -> None:
        paths = sorted(self.path.glob("[0-9]*-*"), key=lambda p: int(p.name.split("-")[0]))
        names, tails = {path.name for path in paths}, dict[str, dict[str, Any]]()
        for file in [min(path.glob("*.log"), default=None) for path in paths]:
            for raw in stored(file) if file else ():
                record = parse(raw)[0]
                if type(record) is str or record.get("kind") not in ("genesis", "recovered"): break
                if record["kind"] == "recovered":  # what this start saw of an earlier chain's end
                    tails[record["file"].partition("/")[0]] = record
        for number, path in enumerate(paths):
            self.chains.append(Chain(self, number, path.name, parts.get(path.name, {})))
            try:
                self.check_chain(self.chains[-1], path, tails.get(path.name))
            except OSError as problem: self.find("io_error", path.name, 0, str(problem), number)
        if not paths: self.find("truncated", "", 0, "no chain here", 0)
        gone = {} if parts else {
            tails[n]["of_origin"]: tails[n]["last_seq"] + 1 for n in tails.keys() - names}
        self.check_across(gone | dict.fromkeys(parts.keys() - names, 0))
    def check_chain(self, chain: Chain, path: Path, tail: dict[str, Any] | None) -> None:
        name = ""
        for file in sorted(path.glob("*.log"), key=lambda f: (len(f.name) == 24, f.name)):
            if not re.fullmatch(r"\d{20}", file.stem):
                record = parse(next(stored(file), b""))[0]
                chain.find("malformed", 0 if type(record) is str else record["seq"], file.name)
                continue
            name, chain.ids = f"{path.name}/{file.name}", None
            mine = tail if tail and tail["file"] == name and not chain.closed else None
            for number, raw in enumerate(stored(file, mine["offset"] if mine else None)):
                chain.feed(raw, None if number else int(file.stem))
            if mine:
                with file.open("rb") as lines:
                    lines.seek(mine["offset"])
                    rest = lines.read(mine["length"] + 1)
                if (sha256(rest).hexdigest(), chain.mac) != (mine["sha256"], mine["last_mac"]):
                    cls = "fork" if len(rest) > mine["length"] else "content_mismatch"
                    chain.find(cls, mine["last_seq"] + 1, "not the end its successor declared")
            side = file.with_suffix(".ids")
            found = sha256(side.read_bytes() if side.exists() else b"").hexdigest()
            ids, seq = chain.ids or (found, 0)
            if ids != found: chain.find("content_mismatch", seq, "the side file of token ids")
        chain.finish(tail, name)
    def check_across(self, missing: dict[str, int]) -> None:  # by origin, known sizes
        origins: dict[str, Chain] = {}
        for chain in self.chains:
            known = chain.begin in (0, chain.part.get("first"))
            known = known or (chain.origin, chain.begin) in self.pruned
            if not known: chain.find("gap", 0, f"0 to {chain.begin - 1} are missing")
            twin = origins.setdefault(chain.origin, chain)
            if twin is not chain and chain.origin:
                same = twin.high == chain.high and twin.mac == chain.mac
                chain.find("duplicate_seq" if same else "fork", 0, f"the origin of {twin.name}")
        for chain, first in [(c, c.genesis) for c in self.chains if "prev_origin" in c.genesis]:
            origin, size, since = first["prev_origin"], first["prev_size"], int(first["wall_ns"])
            before, note = origins.get(origin), first.get("prev_note_sha256")
            if before is None:  # of a bundle, what ended before its time is not asked for
                missing[origin] = max(missing.get(origin, -1), size if since > self.from_ns else -1)
            elif before.high < size:
                before.find("truncated", before.high, f"{chain.name} saw more of it")
            elif before.last_note and note not in (None, before.last_note[0]) and not any(
                    finding[1] == before.number for finding in self.findings):
                before.find("checkpoint_mismatch", before.last_note[1], f"{chain.name} saw another")
        for origin in [o for o in missing
                       if max((n for of, n in self.pruned if of == o), default=-1) < missing[o]]:
            self.find("truncated", origin, 0, "this chain is missing", len(self.chains))
    def check_proof(self, text: str, number: int) -> None:
        try:  # a line that came alone, with its path to a signed root
            proof = json.loads(text)
            line, path = decode64(proof["line_b64"]), [bytes.fromhex(one) for one in proof["path"]]
            record = parse(line + b"\n")[0]
            origin, size, root, good = read_note(proof["note"], self.keys)
            right = root_of_path(line, record["seq"], size, path) == root and bool(good)
            right = right and (record["seq"], record["origin"]) == (proof["index"], origin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError): right = False
        if not right: self.find("checkpoint_mismatch", "", number, "no proof that holds", 0)
def main(arguments: list[str]) -> int:
    keys, seeds, paths, rest = list[Key](), dict[str, bytes](), list[Path](), iter(arguments)
    for argument in rest:
        paths += [] if argument == "--keys" else [Path(argument)]
        text = Path(next(rest, "")).read_text("utf-8").lstrip() if argument == "--keys" else ""
        given: Any = json.loads(text) if text[:1] == "{" else {"verify_keys": text.split("\n")}
        seeds |= {row["id"]: bytes.fromhex(row["seed"]) for row in given.get("chain_seeds", [])}
        keys += [read_key(line) for line in given.get("verify_keys", []) if line and line[0] != "#"]
    if len(paths) != 1 or not paths[0].is_dir(): sys.exit(__doc__)
    manifest, proofs = paths[0] / "bundle.json", paths[0] / "proofs.jsonl"
    bundle = json.loads(manifest.read_bytes()) if manifest.exists() else {}
    own = keys or [read_key(line) for line in bundle.get("keys", [])]
    log = Log(paths[0] / "audit" if bundle else paths[0], seeds, own)
    rows = proofs.read_text(encoding="utf-8").splitlines() if proofs.exists() else []
    log.from_ns = bundle.get("from_ns", 0)
    for number, row in enumerate(rows, 1): log.check_proof(row, number)
    if not rows: log.check(bundle.get("chains", {}))
    first = min((f for f in log.findings if f[4] != "clock_backwards"), default=None)
    verdict = first[4] if first else "ok" if log.mac_checked else "ok_public"
    sys.stdout.write(json.dumps({
        "verdict": verdict, "origin": first and first[5], "seq": first and first[2],
        "mac_checked": log.mac_checked, "keys": "given" if keys else "its own", "proofs": len(rows),
        "findings": [dict(zip(("seq", "_", "class", "origin", "note"), f[2:], strict=True))
                     for f in sorted(log.findings)],
        "chains": [{"dir": c.name, "origin": c.origin, "records": c.records, "closed": c.closed,
                    "signed_to": c.signed, "witnessed_to": c.witnessed,
                    "unfinished": [*c.opens.values()]} for c in log.chains]},
        indent=1) + "\n")
    return CODES[verdict]
if __name__ == "__main__":
    try: sys.exit(main(sys.argv[1:]))
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError) as what:
        verdict = "io_error" if isinstance(what, OSError) else "malformed"
        sys.stdout.write(json.dumps({"verdict": verdict, "note": repr(what)[:256]}) + "\n")
        sys.exit(CODES[verdict])
