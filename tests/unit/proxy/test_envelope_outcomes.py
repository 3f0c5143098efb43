"""The vectors of every outcome class: opened in any cuts, each to its outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.sm4 import sm2
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import REASONS, EnvelopeError
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache
from proxy.sm4.sealer import RequestSealer
from tests.unit.proxy import envelope_cases
from tests.unit.proxy.envelope_cases import FOLDER, RECIPES
from tests.unit.proxy.sm4_kit import finished, pieces

KEYS, VECTORS = envelope_cases.stored()
CUTS = (0, 1, 7, 41)
STEP_7 = {"bad_prelude", "model_mismatch", "tenant_mismatch"}


def outer(vector: dict[str, Any], name: str) -> tuple[str | None, bool]:
    value = vector["headers"].get(name)
    if isinstance(value, list):
        return value[0], len(value) > 1
    return value, False


def open_request(vector: dict[str, Any], keys: list[EnvelopeKey], cut: int) -> tuple[bytes, bytes]:
    policy = vector.get("policy", {})
    replay = ReplayCache(
        limit_per_kid=policy.get("limit_kid", 1 << 18), limit=policy.get("limit", 1 << 20)
    )
    for kid, nonce in vector.get("seen", ()):
        replay.insert(bytes.fromhex(kid), bytes.fromhex(nonce), vector["now_ms"])
    receiver = Receiver(
        Keyring(keys),
        replay,
        start_ms=vector.get("start_ms", 0),
        fence_ms=10_000,
        max_body_bytes=32 << 20,
    )
    model, repeated = outer(vector, "X-Model-Id")
    opener = receiver.begin(
        outer(vector, "Content-Type")[0],
        outer(vector, "Content-Encoding")[0],
        model,
        repeated,
        outer(vector, "X-Tenant-Id")[0],
    )
    for piece in pieces(bytes.fromhex(vector["wire_hex"]), cut):
        opener.feed(piece, vector["now_ms"])
    opened = finished(opener, vector.get("at_tag_ms", vector["now_ms"]))
    prelude = f"{opened.method} {opened.target}\n{opened.content_type}\n{opened.qos}\n"
    return prelude.encode(), opened.body


def open_answer(vector: dict[str, Any], keys: list[EnvelopeKey], cut: int) -> tuple[bytes, bytes]:
    asked = vector["request"]
    derived = Keyring(keys).get(bytes.fromhex(asked["kid"]))
    assert derived is not None
    request = RequestSealer(
        derived,
        model=asked["model"],
        mac=asked["mac"],
        nonce=bytes.fromhex(asked["nonce"]),
        now_ms=vector["now_ms"],
    )
    opener = AnswerOpener(
        request, outer(vector, "Content-Type")[0], outer(vector, "Content-Encoding")[0]
    )
    wire = (
        vector["wire_text"].encode() if "wire_text" in vector else bytes.fromhex(vector["wire_hex"])
    )
    body = b"".join(b"".join(opener.feed(piece)) for piece in pieces(wire, cut))
    body += opener.finish()
    assert opener.complete
    assert opener.prelude is not None
    return opener.prelude.encode()[2:], body


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in VECTORS])
def test_a_vector_opens_to_its_outcome_in_any_cuts(vector: dict[str, Any]) -> None:
    if "SM2" in vector["title"] and not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    opening = open_request if vector["direction"] == "request" else open_answer
    for cut in CUTS:
        if vector["outcome"] == "ok":
            prelude, body = opening(vector, KEYS, cut)
            assert (prelude.hex(), body.hex()) == (vector["prelude_hex"], vector["body_hex"])
            continue
        with pytest.raises(EnvelopeError) as caught:
            opening(vector, KEYS, cut)
        assert caught.value.reason in {vector["outcome"], *vector.get("also", ())}
        clear = vector["direction"] == "response" or told_badly(vector)
        sealed = vector["outcome"] in STEP_7 and not clear
        assert (caught.value.sealer is not None) is sealed


def told_badly(vector: dict[str, Any]) -> bool:
    """Say whether X-Model-Id itself is refused: then there is no AAD, so nothing is sealed."""
    value, repeated = outer(vector, "X-Model-Id")
    return repeated or (value is not None and (" " in value or len(value) > 255))


def test_every_class_has_vectors_and_most_of_them_refuse() -> None:
    classes = {vector["outcome"] for vector in VECTORS}

    assert classes == {"ok", *REASONS} - {"busy", "store_lost"}
    assert len({vector["id"] for vector in VECTORS}) == len(VECTORS)
    assert sum(vector["outcome"] == "ok" for vector in VECTORS) * 4 < len(VECTORS)


def test_the_files_are_what_their_recipes_make() -> None:
    pytest.importorskip("gmssl", reason="capability: gmssl, which signs with a given k")
    if not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    made = envelope_cases.files()

    assert {path.stem for path in FOLDER.glob("*.json")} == {"keys", *RECIPES}
    for name, content in made.items():
        assert json.loads((FOLDER / f"{name}.json").read_text()) == json.loads(
            envelope_cases.text(content)
        ), f"{name}.json; run: python -m tests.unit.proxy.envelope_cases"
