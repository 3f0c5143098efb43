"""The text of a `request` record, as canonical JSON, without a table in between.

One such record is made for each request, so it is written as it will lie in the file: members in
the order of RFC 8785, which is known beforehand, in five pieces around those that only the chain
knows (`chain.Chain.request_line`). Pure. Strings that come from outside are capped and cleaned
here, so no client can make a record unwritable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from proxy.audit.canonical import TEXT_BYTES, clean_text
from proxy.audit.record import OUTCOMES, PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of any length as a type, or mypyc would take it apart and make a new one for each reader.
Pieces = tuple[str, ...]

_QUOTED_MAX = 1024
_quoted_before: dict[str, str] = {}


class RequestText:
    """Five pieces, each empty or ending with a comma, and the outcome for the count of losses.

    `head` comes before the chain's `key_id` and `kind`, `model` before `mono_ns` and `origin`,
    `middle` before `prev`, `prompt` before `seq`, `tail` before `v` and `wall_ns`. `bytes_most`:
    they have no more, as UTF-8.
    """

    __slots__ = ("bytes_most", "outcome", "pieces")

    def __init__(
        self, outcome: str, head: str, model: str, middle: str, prompt: str, tail: str
    ) -> None:
        self.outcome = outcome
        self.pieces: Pieces = (head, model, middle, prompt, tail)
        size = len(head) + len(model) + len(middle) + len(prompt) + len(tail)
        plain = (
            head.isascii()
            and model.isascii()
            and middle.isascii()
            and prompt.isascii()
            and tail.isascii()
        )
        self.bytes_most = size if plain else 4 * size

    def with_ids(
        self,
        count: int,
        commit: str | None = None,
        at: int | None = None,
        ids: Sequence[int] | None = None,
    ) -> RequestText:
        """Return the text of the same record with its members about token ids."""
        members = ""
        if ids is not None:
            members += f'"ids":[{",".join(map(str, ids))}],'
        if at is not None:
            members += f'"ids_at":{at},'
        if commit is not None:
            members += f'"ids_commit":"{commit}",'
        head, model, middle, prompt, tail = self.pieces
        head = f'{head}{members}"ids_n":{count},'
        return RequestText(self.outcome, head, model, middle, prompt, tail)


def quoted(text: str) -> str:
    """Return a string from outside as it stands in a record: cleaned, capped, escaped."""
    known = _quoted_before.get(text)
    if known is not None:
        return known
    plain = text if len(text) <= TEXT_BYTES and text.isascii() else clean_text(text)
    made = orjson.dumps(plain).decode()
    if len(text) <= TEXT_BYTES:
        if len(_quoted_before) >= _QUOTED_MAX:
            _quoted_before.clear()
        _quoted_before[text] = made
    return made


def request_text(
    *,
    trace_id: str,
    tenant: str,
    qos: str,
    status: int,
    outcome: str,
    phase: str,
    queue_us: int | None = None,
    first_byte_us: int | None = None,
    total_us: int | None = None,
    traceparent: str | None = None,
    model: str | None = None,
    served_model: str | None = None,
    pool: str | None = None,
    envelope: tuple[str, int, bool, bool] | None = None,
    prompt_hash: str | None = None,
    params_hash: str | None = None,
    body_hash: str | None = None,
    output_hash: str | None = None,
    output_len: int | None = None,
    usage: dict[str, int] | None = None,
    qos_asked: str | None = None,
    tunnelled: tuple[int, int] | None = None,
) -> RequestText:
    """Return the text of a `request` record; None means unknown and is absent.

    `status` is what the client was sent (0: nothing); times are microseconds from the accepted
    head; `usage` is of `usage_members`; `qos_asked` is set where a class was capped; `tunnelled` is
    what went from and to the client of an upgraded connection; `envelope` is (kid, suite, whether
    it was signed, whether it had a MAC). `trace_id`, `qos`, `pool` and the
    hashes are ours and plain. The token ids go to the writer beside it.
    """
    assert outcome in OUTCOMES
    assert phase in PHASES
    head = "" if body_hash is None else f'"body_hash":"{body_hash}",'
    if envelope is not None:
        kid, suite, signature, mac = envelope
        head += (
            f'"envelope":{{"kid":{quoted(kid)},"mac":{_bool(mac)},'
            f'"signature":{_bool(signature)},"suite":{suite}}},'
        )
    middle = f'"outcome":"{outcome}",'
    if output_hash is not None:
        middle += f'"output_hash":"{output_hash}",'
    if output_len is not None:
        middle += f'"output_len":{output_len},'
    if params_hash is not None:
        middle += f'"params_hash":"{params_hash}",'
    middle += f'"phase":"{phase}",' if pool is None else f'"phase":"{phase}","pool":"{pool}",'
    prompt = f'"qos":"{qos}",'
    if prompt_hash is not None:
        prompt = f'"prompt_hash":"{prompt_hash}",{prompt}'
    if qos_asked is not None:
        prompt += f'"qos_asked":{quoted(qos_asked)},'
    tail = "" if served_model is None else f'"served_model":{quoted(served_model)},'
    tail += (
        f'"status":{status},"tenant":{quoted(tenant)},'
        f'"times_us":{_times(queue_us, first_byte_us, total_us)},"trace_id":"{trace_id}",'
    )
    if traceparent is not None:
        tail += f'"traceparent":{quoted(traceparent)},'
    if tunnelled is not None:
        tail += f'"tunnel":{{"received":{tunnelled[1]},"sent":{tunnelled[0]}}},'
    if usage:
        tail += f'"usage":{_usage(usage)},'
    return RequestText(
        outcome, head, "" if model is None else f'"model":{quoted(model)},', middle, prompt, tail
    )


def _bool(value: bool) -> str:  # noqa: FBT001 - a value, not a switch
    return "true" if value else "false"


def _times(queue_us: int | None, first_byte_us: int | None, total_us: int | None) -> str:
    if queue_us is not None and first_byte_us is not None and total_us is not None:
        return f'{{"first_byte":{first_byte_us},"queue":{queue_us},"total":{total_us}}}'
    times = (("first_byte", first_byte_us), ("queue", queue_us), ("total", total_us))
    return _table([(name, us) for name, us in times if us is not None])


def _usage(usage: dict[str, int]) -> str:
    return _table(sorted(usage.items()))


def _table(counts: list[tuple[str, int]]) -> str:
    return "{" + ",".join([f'"{name}":{count}' for name, count in counts]) + "}"
