"""Records: the kinds and what each must hold.

The one table (`KINDS`) is enforced where records are written and where they are verified. Pure.
Upstream usage is cleaned here, strings where records are written (`canonical.fit`, `request`), so
that no client can make a record unwritable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.audit.canonical import INT_LIMIT


def _is_int(value: Any) -> bool:
    return type(value) is int and -INT_LIMIT < value < INT_LIMIT


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_map(value: Any) -> bool:
    return type(value) is dict


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_hash(value: Any) -> bool:
    return type(value) is str and len(value) == 64 and not value.strip("0123456789abcdef")


def _is_decimal(value: Any) -> bool:
    return (
        type(value) is str
        and value.isascii()
        and value.isdigit()
        and len(value) <= 20
        and (value == "0" or value[0] != "0")
    )


_Check = Callable[[Any], bool]

COMMON: dict[str, _Check] = {
    "v": _is_int,
    "kind": _is_text,
    "seq": _is_int,
    "origin": _is_text,
    "wall_ns": _is_decimal,
    "mono_ns": _is_decimal,
    "prev": _is_hash,
    "key_id": _is_text,
}

_LOAD: dict[str, _Check] = {"in_flight": _is_int, "started_total": _is_int}

KINDS: dict[str, dict[str, _Check]] = {
    "genesis": {
        "config_sha256": _is_text,
        "image": _is_text,
        "checkpoint_records": _is_int,
        "checkpoint_s": _is_int,
        "heartbeat_s": _is_int,
        "required_signers": _is_list,
        "clock_source": _is_text,
        "clock_bound_ms": _is_int,
        "prev_size": _is_int,
    },
    "request": {
        "trace_id": _is_text,
        "tenant": _is_text,
        "qos": _is_text,
        "status": _is_int,
        "outcome": _is_text,
        "phase": _is_text,
        "times_us": _is_map,
    },
    "open": {"trace_id": _is_text, "tenant": _is_text, "qos": _is_text},
    "checkpoint": {"note": _is_text, **_LOAD},
    "heartbeat": dict(_LOAD),
    "rotate": {"new_key_id": _is_text, "new_key_mac": _is_hash},
    "segment_end": {"ids_sha256": _is_hash},
    "segment_start": {"prev_file": _is_text},
    "recovered": {
        "of_origin": _is_text,
        "file": _is_text,
        "offset": _is_int,
        "length": _is_int,
        "sha256": _is_hash,
        "last_seq": _is_int,
        "last_mac": _is_hash,
    },
    "lost": {
        "from": _is_decimal,
        "to": _is_decimal,
        "count": _is_int,
        "reason": _is_text,
        "outcomes": _is_map,
    },
    "rejected": {"second": _is_int, "counts": _is_map},
    "pruned": {
        "upto": _is_int,
        "last_mac": _is_hash,
        "youngest_wall": _is_decimal,
        "note": _is_text,
        "frontier": _is_list,
    },
    "erased": {"key_ref": _is_text},
    "decision": {"what": _is_text},
    "alarm": {"what": _is_text},
    "closed": {"ids_sha256": _is_hash, **_LOAD},
}

REQUIRED: dict[str, frozenset[str]] = {kind: frozenset(table) for kind, table in KINDS.items()}

OUTCOMES = frozenset(
    {
        "ok",
        "client_gone",
        "client_stalled",
        "upstream_error",
        "truncated",
        "shed",
        "rejected",
        "timeout",
    }
)
PHASES = frozenset({"before_first_byte", "streaming", "done"})
_USAGE = ("prompt", "completion", "total", "cached", "reasoning")


def _common_holds(record: Mapping[str, Any]) -> bool:
    """Say at once that the common members are as nearly all are; False says nothing."""
    try:
        wall, mono, prev = record["wall_ns"], record["mono_ns"], record["prev"]
        return (
            type(record["v"]) is type(record["seq"]) is int
            and type(record["kind"]) is type(record["origin"]) is type(record["key_id"]) is str
            and type(wall) is type(mono) is type(prev) is str
            and len(prev) == 64
            and not prev.strip("0123456789abcdef")
            and wall.isascii() and wall.isdigit() and wall[0] != "0" and len(wall) <= 20
            and mono.isascii() and mono.isdigit() and mono[0] != "0" and len(mono) <= 20
        )  # fmt: skip
    except KeyError:
        return False


def problem_with(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the members of a version-1 record, or None."""
    if not _common_holds(record):
        for name, check in COMMON.items():
            if name not in record:
                return f"member {name} is missing"
            if not check(record[name]):
                return f"member {name} is not of its type"
    if record["seq"] < 0:
        return "seq is negative"
    kind = record["kind"]
    table = KINDS.get(kind)
    if table is None:
        return "unknown kind"
    for name, check in table.items():
        if name not in record:
            return f"{kind}: member {name} is missing"
        if not check(record[name]):
            return f"{kind}: member {name} is not of its type"
    if kind == "request" and (record["outcome"] not in OUTCOMES or record["phase"] not in PHASES):
        return "request: outcome or phase is not of the list"
    return None


def usage_members(
    prompt: object = None,
    completion: object = None,
    total: object = None,
    cached: object = None,
    reasoning: object = None,
) -> dict[str, int]:
    """Return usage as reported: an explicit 0 stays 0, what is no count is absent."""
    usage: dict[str, int] = {}
    if type(prompt) is int and 0 <= prompt < INT_LIMIT:
        usage["prompt"] = prompt
    if type(completion) is int and 0 <= completion < INT_LIMIT:
        usage["completion"] = completion
    if type(total) is int and 0 <= total < INT_LIMIT:
        usage["total"] = total
    if type(cached) is int and 0 <= cached < INT_LIMIT:
        usage["cached"] = cached
    if type(reasoning) is int and 0 <= reasoning < INT_LIMIT:
        usage["reasoning"] = reasoning
    return usage
