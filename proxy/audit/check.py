"""One chain under verification: lines in, findings out.

Pure; constant memory. The machine keeps the range of seqs that may come next (`_low` to `_high`:
one number, but for a while after lines it could not trust) and the MACs the next record may point
at. A finding's consequences are listed after it, never before; a line that cannot be trusted moves
nothing but that range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.audit import canonical
from proxy.audit.chain import ZERO_MAC, follows
from proxy.audit.findings import INFORMATION, NO_EVIDENCE, Evidence, Finding, Place, hashed
from proxy.audit.ids import IDS_LIMIT, entry_bytes
from proxy.audit.note import Keyset
from proxy.audit.opens import Opens
from proxy.audit.plain import Before, Taken, take
from proxy.audit.reader import Fault, Line, parse_line
from proxy.audit.signed import Expected, SignedCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.audit.ahead import Run
    from proxy.audit.epochs import MacKeys
    from proxy.audit.pruned import Kept

HEARTBEAT_TOLERANCE = 1.5
# Key ids of which it is said that they are not known, each once.
_UNKNOWN_KEPT = 16
_QUIET_MAX_NS = (1 << 63) - 1


def quiet_ns(heartbeat_ns: int) -> int:
    """Return the longest silence between two records that is none to report; 0: any."""
    return min(int(heartbeat_ns * HEARTBEAT_TOLERANCE), _QUIET_MAX_NS)


@dataclass(slots=True)
class Ids:
    """What a segment's records say of its side file."""

    end: int = 0
    last_seq: int = 0
    sha256: str | None = None
    sha256_seq: int = 0


# Plain attributes of a check that outlive a segment.
_STATE = (
    "origin", "records", "closed", "started_at", "genesis", "last_wall_ns",
    "heartbeat_ns", "flawed", "_low", "_high", "_last_mac", "_last_mono_ns", "_key_id",
    "_segment_ended", "_segments",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outside:
    """What is known of chains from outside their own files.

    `pinned` are the public keys given; `expected` what a witness or an earlier checkpoint says, by
    origin; `frontiers` what `pruned` records keep, by (origin, first seq kept).
    """

    pinned: Keyset = field(default_factory=Keyset)
    expected: Mapping[str, Sequence[Expected]] = field(default_factory=dict)
    frontiers: Mapping[tuple[str, int], Kept] = field(default_factory=dict)


class ChainCheck:
    """The state of one chain."""

    def __init__(
        self,
        keys: MacKeys | None,
        chain: int,
        report: Callable[[Finding], None],
        outside: Outside | None = None,
    ) -> None:
        self.origin = ""
        self.records = 0
        self.closed = False
        self.started_at: int | None = None
        self.start_place = Place("", 0)
        self.pruned: list[tuple[str, int]] = []
        self.genesis: dict[str, Any] = {}
        self.last_wall_ns = 0
        self.ids = Ids()
        self.opens = Opens()
        self.heartbeat_ns = 0
        self.flawed = False
        self._outside = outside or Outside()
        self.signed = SignedCheck(self._outside.pinned, self.find)
        self._keys = keys
        self._chain = chain
        self._report = report
        self._low = self._high = 0
        self._macs: set[str] | None = {ZERO_MAC}
        self._last_mac = ZERO_MAC
        self._last_mono_ns = 0
        self._key_id = ""
        self._unknown_keys: set[str] = set()
        self._segment_ended = False
        self._segment_lines = 0
        self._segment_first = 0
        self._segments = 0

    @property
    def next_seq(self) -> int:
        """The seq that should come next."""
        return self._high

    @property
    def last_mac(self) -> str:
        """The MAC of the last record taken."""
        return self._last_mac

    def state(self) -> dict[str, Any]:
        """Return all that is known behind a whole segment, as JSON can hold it."""
        macs = None if self._macs is None else sorted(self._macs)
        more: dict[str, Any] = {
            "macs": macs,
            "unknown": sorted(self._unknown_keys),
            "place": list(self.start_place),
            "pruned": self.pruned[:],
            "opens": self.opens.state(),
        }
        return {name: getattr(self, name) for name in _STATE} | more

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind what `state` was made of."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.pruned = [(origin, upto) for origin, upto in state["pruned"]]
        self._macs = None if state["macs"] is None else set(state["macs"])
        self._unknown_keys = set(state["unknown"])
        self.start_place = Place(*state["place"])
        self.opens.restore(state.get("opens", [0, []]))

    def find(
        self, cls: str, seq: int, place: Place, note: str, evidence: Evidence = NO_EVIDENCE
    ) -> None:
        """Report a finding of this chain."""
        self.flawed = self.flawed or cls not in INFORMATION
        proved_to = self.signed.signed_to
        self._report(Finding(cls, self.origin, seq, place, note, self._chain, evidence, proved_to))

    def begin_at(self, first_seq: int) -> None:
        """Take the next record at its word: what lies before it is not looked at."""
        self._low = self._high = first_seq
        self._macs = None
        self.started_at = first_seq
        self.signed.skip_to(first_seq, None)

    def start_segment(self, first_seq: int) -> None:
        """A segment file begins; its name says `first_seq`."""
        self._segment_lines = 0
        self._segment_first = first_seq
        self._segments += 1
        self.ids = Ids()

    def feed(self, raw: bytes, place: Place) -> None:
        """Take one stored line."""
        line = parse_line(raw)
        self._segment_lines += 1
        if isinstance(line, Fault):
            last = self._high + line.records - 1
            self.find(line.cls, self._high, place, line.note, Evidence(last, None, hashed(raw)))
            self._distrust(line.records, line.mac)
        else:
            self._take(line, place)
        self.signed.add(raw[:-1] if raw.endswith(b"\n") else raw)

    def feed_plain(self, data: bytes, start: int, stop: int) -> int:
        """Take lines of `data` as long as there is nothing to say of them; returns where that ends.

        What `feed` would do with each of them, many at a time.
        """
        before = self._plain_before()
        if before is None:
            return start
        mac = None if self._keys is None else self._keys.hmac(before.key_id, before.origin)
        if self._keys is not None and mac is None and before.key_id not in self._unknown_keys:
            return start
        taken = take(data, start, stop, mac, before)
        if taken.records:
            self._went_on(taken)
            self.signed.add_leaves(taken.leaves)
            if self.opens:
                self.opens.take_requests(data, start, taken.end)
        return taken.end

    def feed_run(self, run: Run) -> bool:
        """Take what another process made of these lines, if that is what they are from here on."""
        before = self._plain_before()
        if before is None or before != run.before or self.opens:
            return False
        mac = None if self._keys is None else self._keys.hmac(before.key_id, before.origin)
        if self._keys is not None and mac is None and before.key_id not in self._unknown_keys:
            return False
        if run.mac_checked != (mac is not None) or not self.signed.join(run.nodes()):
            return False
        self._went_on(run.taken)
        return True

    def _plain_before(self) -> Before | None:
        """Return what the next line has to continue, or None where it is not a plain case."""
        macs = self._macs
        if macs is None or len(macs) != 1 or self._low != self._high or not self.records:
            return None
        if not self._segment_lines or self._segment_ended or self.closed or not self._key_id:
            return None
        (prev,) = macs
        return Before(
            self.origin,
            self._key_id,
            prev,
            self._high,
            self.last_wall_ns,
            self._last_mono_ns,
            quiet_ns(self.heartbeat_ns),
        )

    def _went_on(self, taken: Taken) -> None:
        """Move on as behind the last of some plain lines."""
        self._segment_lines += taken.records
        self.records += taken.records
        self._low = self._high = self._high + taken.records
        self._last_mac = taken.prev.decode()
        self._macs = {self._last_mac}
        self.last_wall_ns, self._last_mono_ns = taken.wall_ns, taken.mono_ns
        self.signed.saw("request", taken.first_mono_ns)
        self.signed.saw("request", taken.mono_ns)
        if taken.ids_end > self.ids.end:
            self.ids.end, self.ids.last_seq = taken.ids_end, taken.ids_seq

    def _distrust(self, records: int, mac: str | None) -> None:
        self._high += records
        if mac is None:
            self._macs = None
        elif self._macs is not None:
            self._macs.add(mac)

    def _take(self, line: Line, place: Place) -> None:
        record = line.record
        if not self._content_holds(line, place):
            self._distrust(1, line.mac)
            return
        if not self.origin:
            self.origin = record["origin"]
            self.signed.expect(self._outside.expected.get(self.origin, ()))
        seq: int = record["seq"]
        if record["v"] != 1:
            self.find("version_unknown", seq, place, f"version {record['v']}")
        # The name of the file is judged before what the record's place in the chain is.
        if self._segment_lines == 1 and seq != self._segment_first and seq == self._high:
            self.find("malformed", seq, place, f"the file's name says {self._segment_first}")
        if seq < self._low:
            self._take_again(line, place)
            return
        gap = seq > self._high
        if gap:
            self._find_gap(seq, place)
        if self._macs is not None and record["prev"] not in self._macs:
            self._find_link(record, seq, place)
        if record["origin"] != self.origin:
            evidence = Evidence(None, hashed(self.origin), hashed(record["origin"]))
            self.find("link_mismatch", seq, place, "the record is of another chain", evidence)
        if record["v"] == 1:
            self._check_times(record, seq, place, after_gap=gap)
            self._check_kind(line, seq, place)
        self._low = self._high = seq + 1
        self._macs = {line.mac}
        self._last_mac = line.mac
        self.records += 1

    def _find_gap(self, seq: int, place: Place) -> None:
        missing = f"{self._high} to {seq - 1} missing" if seq - 1 > self._high else "one missing"
        if self.records == 0 and self._high == 0:
            # Pruning may explain it; the directory knows at its end.
            self.started_at, self.start_place = seq, place
            kept = self._outside.frontiers.get((self.origin, seq))
            self._macs = None if kept is None else {kept.last_mac}
            self.signed.skip_to(seq, None if kept is None else kept.frontier)
            if kept is not None and kept.promise:
                self.signed.genesis(kept.promise, place)
                self.heartbeat_ns = max(0, kept.promise["heartbeat_s"]) * 10**9
            return
        self.find("gap", self._high, place, missing, Evidence(seq - 1))

    def _find_link(self, record: dict[str, Any], seq: int, place: Place) -> None:
        evidence = Evidence(None, hashed(self._last_mac), hashed(record["prev"]))
        note = "prev is not the MAC of the record before"
        self.find("link_mismatch", seq, place, note, evidence)

    def _take_again(self, line: Line, place: Place) -> None:
        seq = line.record["seq"]
        if seq == self._low - 1 and line.mac != self._last_mac:
            evidence = Evidence(None, hashed(self._last_mac), hashed(line.mac))
            self.find("fork", seq, place, "two different records with this seq", evidence)
            return
        evidence = Evidence(None, None, hashed(line.mac))
        self.find("duplicate_seq", seq, place, f"where {self._high} should be", evidence)
        if self._macs is not None and line.record["prev"] not in self._macs:
            self._find_link(line.record, seq, place)

    def _content_holds(self, line: Line, place: Place) -> bool:
        if self._keys is None:
            return True
        record = line.record
        key_id = record["key_id"]
        hmac = self._keys.hmac(key_id, record["origin"])
        if hmac is None:
            if key_id not in self._unknown_keys:
                if len(self._unknown_keys) < _UNKNOWN_KEPT:
                    self._unknown_keys.add(key_id)
                seq = record["seq"] if self._low <= record["seq"] else self._high
                self.find("key_unknown", seq, place, f"no key {canonical.clean_text(key_id, 80)}")
            return True
        right = hmac.hex(bytes.fromhex(record["prev"]) + line.data)
        if right == line.mac:
            return True
        evidence = Evidence(None, hashed(right), hashed(line.mac))
        self.find(
            "content_mismatch", self._high, place, "the MAC does not fit the record", evidence
        )
        return False

    def _check_times(
        self, record: dict[str, Any], seq: int, place: Place, *, after_gap: bool
    ) -> None:
        wall_ns, mono_ns = int(record["wall_ns"]), int(record["mono_ns"])
        if self.records:
            if wall_ns < self.last_wall_ns or mono_ns < self._last_mono_ns:
                which = "wall" if wall_ns < self.last_wall_ns else "monotonic"
                self.find("clock_backwards", seq, place, f"the {which} clock went back")
            quiet_ns = mono_ns - self._last_mono_ns
            limit_ns = self.heartbeat_ns * HEARTBEAT_TOLERANCE
            # A `lost` record says itself why nothing could be written before it.
            if limit_ns and quiet_ns > limit_ns and not after_gap and record["kind"] != "lost":
                self.find("heartbeat_missing", seq, place, f"nothing for {quiet_ns // 10**9} s")
        self.last_wall_ns, self._last_mono_ns = wall_ns, mono_ns

    def _check_kind(self, line: Line, seq: int, place: Place) -> None:
        record, kind = line.record, line.record["kind"]
        first = self._segment_lines == 1
        if self.closed and kind != "checkpoint":
            self.find("malformed", seq, place, "a record behind closed")
        if (kind == "genesis") != (seq == 0):
            self.find("malformed", seq, place, "genesis is seq 0, and seq 0 is genesis")
        if (kind == "segment_start") != (first and seq != 0):
            self.find("malformed", seq, place, "a segment begins with segment_start, once")
        if self._segment_ended and not first:
            self.find("malformed", seq, place, "a record behind segment_end")
        if first and self._segments > 1 and not (self._segment_ended or "sealed" in record):
            self.find("malformed", seq, place, "the segment before has no segment_end")
        self._segment_ended = kind == "segment_end"
        if self._key_id and record["key_id"] != self._key_id:
            self.find("content_mismatch", seq, place, "key_id changed without rotate")
        self._key_id = record["key_id"]
        self.signed.saw(kind, self._last_mono_ns)
        if kind == "checkpoint":
            self.signed.checkpoint(record, seq, place)
        elif kind == "genesis":
            self.genesis = record
            self.signed.genesis(record, place)
            self.heartbeat_ns = max(0, record["heartbeat_s"]) * 10**9
        elif kind == "rotate":
            self._check_rotate(line, seq, place)
        elif kind in ("open", "request"):
            self.opens.take(record, seq, place)
        elif kind == "pruned":
            self.pruned.append((str(record.get("of_origin", self.origin)), record["upto"]))
        if kind in ("segment_end", "closed"):
            self.ids.sha256, self.ids.sha256_seq = record["ids_sha256"], seq
        self.closed = self.closed or kind == "closed"
        at, count = record.get("ids_at"), record.get("ids_n")
        if type(at) is int and type(count) is int:
            end = at + entry_bytes(min(max(count, 0), IDS_LIMIT))
            if end > self.ids.end:
                self.ids.end, self.ids.last_seq = end, seq

    def _check_rotate(self, line: Line, seq: int, place: Place) -> None:
        record = line.record
        self._key_id = record["new_key_id"]
        if not follows(self._key_id, record["key_id"]):
            self.find("malformed", seq, place, "rotate leads to no key that may follow")
        if self._keys is None:
            return
        hmac = self._keys.hmac(self._key_id, record["origin"])
        if hmac is None:
            return  # the next record says key_unknown
        rest = {name: value for name, value in record.items() if name != "new_key_mac"}
        message = bytes.fromhex(record["prev"]) + canonical.encode(rest)
        if hmac.hex(message) != record["new_key_mac"]:
            self.find("content_mismatch", seq, place, "new_key_mac does not fit")
