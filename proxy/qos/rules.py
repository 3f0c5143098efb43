"""Classification rules: which class a request has that names none. Data, first match wins.

A rule's conditions are on the tenant, the tenant's SLA, the model and the length of the prompt; all
that are set must hold. Tenant and SLA are known with the head, so a tenant's list is cut down once:
what cannot match is left out, and so is all that follows a rule without further conditions. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.config import Rule as Row
    from proxy.http.peek import Glimpse
    from proxy.qos.classes import QosClass

BYTES_A_TOKEN = 4  # of UTF-8 text, roughly; counts only as an estimate


class Rule:
    """What is left of a rule once the tenant is known. `number` counts from 1 in the settings."""

    __slots__ = ("bytes_max", "bytes_min", "model", "number", "qos")

    def __init__(
        self,
        number: int,
        qos: QosClass,
        model: re.Pattern[str] | None,
        bytes_min: int,
        bytes_max: int,
    ) -> None:
        self.number: Final = number
        self.qos: Final = qos
        self.model: Final = model
        self.bytes_min: Final = bytes_min
        self.bytes_max: Final = bytes_max

    @property
    def plain(self) -> bool:
        """Say whether it holds for every request of the tenant."""
        return self.model is None and not self.bytes_min and not self.bytes_max

    def holds(self, seen: Glimpse) -> bool:
        """Say whether a body meets the conditions."""
        if self.model is not None and (not seen.model or not self.model.match(seen.model)):
            return False
        size = seen.prompt_bytes
        return size >= self.bytes_min and (not self.bytes_max or size <= self.bytes_max)


def tokens(size: int) -> int:
    """Return how many tokens so many bytes of prompt may be."""
    return -(-size // BYTES_A_TOKEN)


def rules_of(rows: Sequence[Row], tenant: str, sla: str) -> tuple[Rule, ...]:
    """Return the rules that can hold for a tenant, in order."""
    found: list[Rule] = []
    for number, row in enumerate(rows, 1):
        if (row.tenant and row.tenant != tenant) or (row.sla and row.sla != sla):
            continue
        rule = Rule(
            number,
            row.qos,  # type: ignore[arg-type] # settings refuse any other
            _pattern(row.model) if row.model else None,
            max(row.prompt_bytes_min, (row.prompt_tokens_min - 1) * BYTES_A_TOKEN + 1)
            if row.prompt_tokens_min
            else row.prompt_bytes_min,
            _least(row.prompt_bytes_max, row.prompt_tokens_max * BYTES_A_TOKEN),
        )
        found.append(rule)
        if rule.plain:
            break
    return tuple(found)


def _pattern(model: str) -> re.Pattern[str]:
    import fnmatch  # noqa: PLC0415 - only where there are such rules

    return re.compile(fnmatch.translate(model))


def _least(one: int, other: int) -> int:
    """Return the smaller of two upper bounds, 0 being none."""
    return min(one, other) if one and other else one or other


def choose(rules: tuple[Rule, ...], seen: Glimpse) -> Rule | None:
    """Return the first rule that holds; None: the default class."""
    if not seen.readable:
        return None
    for rule in rules:
        if rule.holds(seen):
            return rule
    return None
