"""What the observer reads of one event's JSON, and how it is decoded.

Lenient: members of another type than the usual one are kept as they are and judged by the reader.
A file of its own, since these types are built by msgspec at run time and cannot be compiled.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct):
    """What a choice adds."""

    content: Any = None


class Choice(msgspec.Struct):
    """One choice of an event."""

    index: Any = 0
    delta: Delta | None = None
    text: Any = None
    finish_reason: Any = None
    token_ids: Any = msgspec.UNSET
    prompt_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Event(msgspec.Struct):
    """One event's data."""

    choices: list[Choice] | None = None
    usage: Any = None
    model: Any = None
    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


decode = msgspec.json.Decoder(Event).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
