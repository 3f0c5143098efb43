"""Chain seeds for the node's sidecars: a key that only goes on, and a seed of each step of it.

Pure. The agent keeps K(i). A sidecar that begins a chain is given

    seed   = HKDF-SHA256(K(i), salt = empty, "chain" || origin, 32)     id <agent id>n<i>
    K(i+1) = HKDF-SHA256(K(i), salt = empty, "next", 32)

and K(i) is gone before the seed is out: who takes the agent's keys later makes no seed that was
handed out before. The auditor has each seed by its escrow, a signed note that was on disk first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.audit import escrow
from proxy.audit.chain import hkdf

if TYPE_CHECKING:
    from collections.abc import Callable

ORIGIN_BYTES_MAX = 1024
_AGENT_ID = re.compile(r"[0-9a-f]{8}")
KEY_BYTES = 32


class RefusedError(Exception):
    """What was asked is not given; `status` is the answer's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class State:
    """K(i), and whose it is."""

    agent_id: str
    index: int
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not _AGENT_ID.fullmatch(self.agent_id) or self.index < 0 or len(self.key) != KEY_BYTES:
            raise ValueError("no state of chain seeds")


@dataclass(frozen=True, slots=True)
class Seed:
    """What a sidecar is given, and the text of its escrow before it is signed."""

    id: str
    value: bytes = field(repr=False)
    escrow_text: str


def first_state(random: Callable[[int], bytes]) -> State:
    """Return the state of an agent that never handed out a seed."""
    return State(random(4).hex(), 0, random(KEY_BYTES))


def check_origin(origin: object) -> str:
    """Return an origin as it may be asked for; raises `RefusedError`."""
    if (
        not isinstance(origin, str)
        or not 0 < len(origin.encode("utf-8", "replace")) <= ORIGIN_BYTES_MAX
        or any(c < " " or "\ud800" <= c <= "\udfff" for c in origin)
    ):
        raise RefusedError(400, f"expected an origin: one line of up to {ORIGIN_BYTES_MAX} bytes")
    return origin


def hand_out(
    state: State, origin: str, auditor_public: bytes, random: Callable[[int], bytes]
) -> tuple[Seed, State]:
    """Return the seed of a chain, and the state that must be kept before it is given."""
    seed_id = f"{state.agent_id}n{state.index}"
    value = hkdf(state.key, b"chain" + origin.encode(), KEY_BYTES)
    after = State(state.agent_id, state.index + 1, hkdf(state.key, b"next", KEY_BYTES))
    text = escrow.note_text(seed_id, origin, value, auditor_public, random(32))
    return Seed(seed_id, value, text), after
