"""Canonical JSON of audit records: RFC 8785 under the limits of docs/audit.md.

Integers only, |n| < 2^53; no floats, no null; strings of at most 256 bytes of UTF-8 but for the
members in `LONG`; objects and arrays nested at most `DEPTH` deep; no member twice.

Pure. `encode` writes what `fit` made fit; `decode` takes bytes only if they are exactly what
`encode` would write: a verifier works on stored bytes, never on what they could also have been.
orjson's escapes are those of RFC 8785, 3.2.2.2; its order of ASCII names is that of 3.2.3. Names
that are not ASCII are read (a later version may have them), by a slower path, never written.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

TEXT_BYTES = 256
DEPTH = 16
INT_LIMIT = 1 << 53
# Members of the record itself that may hold longer strings.
LONG = frozenset({"note", "origin", "cosigned"})

_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class NotCanonical(ValueError):  # noqa: N818 - a verdict on bytes, not a failure of ours
    """The bytes are not canonical JSON of a record; the text says why."""


def clean_text(text: str, limit: int = TEXT_BYTES) -> str:
    """Return `text` with unpaired surrogates as U+FFFD, cut to `limit` bytes at a character."""
    if text.isascii():
        return text[:limit]
    text = _SURROGATES.sub("\ufffd", text)
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode("utf-8", "ignore")


def _fits(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is str:
        # A character is at most 4 bytes; whether it has a lone surrogate only encoding can tell.
        return len(value) <= TEXT_BYTES and (value.isascii() or clean_text(value) == value)
    if kind is int:
        return bool(-INT_LIMIT < value < INT_LIMIT)
    if kind is bool:
        return True
    if depth >= DEPTH:
        return False
    if kind is dict:
        for name, item in value.items():
            if type(name) is not str or not name.isascii() or not _fits(item, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        return all(_fits(item, depth + 1) for item in value)
    return False


def _plain(table: dict[str, Any], depth: int) -> bool:
    """Say at once that a table fits, if it is as ordinary as nearly all are; False says nothing."""
    for value in table.values():
        kind = type(value)
        if kind is str:
            if len(value) > TEXT_BYTES or not value.isascii():
                return False
        elif kind is int:
            if not -INT_LIMIT < value < INT_LIMIT:
                return False
        elif kind is dict:
            if depth == DEPTH or not _plain(value, depth + 1):
                return False
        elif kind is not bool:
            return False
    try:
        return "".join(table).isascii()
    except TypeError:  # a name that is no string
        return False


def fit(members: dict[str, Any]) -> dict[str, Any]:
    """Return `members` as they may be written: itself if all fits, else a mended copy.

    Strings are cleaned and cut; members that are None, or nested too deep, are left out; a float or
    an integer out of range becomes a string, so that no client can make a record unwritable.
    """
    if _plain(members, 1):  # this runs once a request
        return members
    for name, value in members.items():
        if type(value) is str and name in LONG:
            fits = value.isascii()
        else:
            fits = type(name) is str and name.isascii() and _fits(value, 1)
        if not fits:
            return _mended(members, LONG, 0)
    return members


def _mended(members: dict[Any, Any], long: frozenset[str], depth: int) -> dict[str, Any]:
    out = {}
    for name, value in members.items():
        kept = _mend(value, depth + 1, 1 << 16 if name in long else TEXT_BYTES)
        if kept is not None:
            out[clean_text(str(name)).encode("ascii", "replace").decode()] = kept
    return out


def _mend(value: Any, depth: int, limit: int) -> Any:
    if isinstance(value, str):
        return clean_text(value, limit)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int) and -INT_LIMIT < value < INT_LIMIT:
        return int(value)
    if isinstance(value, (dict, list, tuple)):
        if depth >= DEPTH:
            return None
        if isinstance(value, dict):
            return _mended(value, frozenset(), depth)
        items = (_mend(item, depth + 1, TEXT_BYTES) for item in value)
        return [item for item in items if item is not None]
    # str() of a huge integer may refuse (its digits are limited); hex() never does.
    return clean_text(hex(value) if isinstance(value, int) else repr(value))


def encode(record: dict[str, Any]) -> bytes:
    """Return canonical bytes of a record that fits; raises TypeError for what does not."""
    return orjson.dumps(record, option=_OPTIONS)


def decode(data: bytes) -> dict[str, Any]:
    """Return the record that canonical `data` holds; raises `NotCanonical`."""
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise NotCanonical(f"not JSON: {problem}") from None
    if type(record) is not dict:
        raise NotCanonical("not an object")
    ascii_names = _plain(record, 1) or _check_object(record, 0)
    try:
        again = encode(record) if ascii_names else _encode_slowly(record)
    except TypeError as problem:
        raise NotCanonical(str(problem)) from None
    if again != data:
        raise NotCanonical("not in canonical form (RFC 8785)")
    return record


def _check_object(value: dict[str, Any], depth: int) -> bool:
    ascii_names = True
    for name, item in value.items():
        ascii_names &= name.isascii()
        if depth == 0 and type(item) is str and name in LONG:
            continue
        ascii_names &= _check(item, depth + 1)
    return ascii_names


def _check(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is str:
        if len(value) > TEXT_BYTES or (not value.isascii() and len(value.encode()) > TEXT_BYTES):
            raise NotCanonical(f"a string of more than {TEXT_BYTES} bytes")
        return True
    if kind is int:
        if not -INT_LIMIT < value < INT_LIMIT:
            raise NotCanonical("an integer out of range")
        return True
    if kind is bool:
        return True
    if value is None or kind is float:
        raise NotCanonical("null" if value is None else "a number that is no integer")
    if depth >= DEPTH:
        raise NotCanonical(f"nested more than {DEPTH} deep")
    if kind is dict:
        return _check_object(value, depth)
    # A list, not a generator: every item must be looked at, also behind a False.
    return all([_check(item, depth + 1) for item in value])  # noqa: C419


def _encode_slowly(record: dict[str, Any]) -> bytes:
    """Encode with names in the order of UTF-16 code units (RFC 8785, 3.2.3)."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            names = sorted(value, key=lambda name: name.encode("utf-16-be"))
            return {name: ordered(value[name]) for name in names}
        return [ordered(item) for item in value] if isinstance(value, list) else value

    return json.dumps(ordered(record), ensure_ascii=False, separators=(",", ":")).encode()
