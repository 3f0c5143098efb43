"""The witness over HTTP, and the sidecar's chain against it: the real ones on both sides."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from agent.chains import Chains
from agent.witness_store import WitnessStore
from proxy.audit.checkpoint import Submission
from proxy.audit.given import read_checkpoints
from proxy.audit.note import ED25519, Keyset, parse_keys
from proxy.audit.signing import Cosigner, NoteSigner
from proxy.audit.witness import WitnessClient
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.agent.test_witness import LOG, leaves, submission
from tests.unit.proxy.audit_chains import KEYS, START_MS, config, request, verify

TOKEN = b"0123456789abcdef0123"
BELIEVED = {"authorization": f"Bearer {TOKEN.decode()}"}
OFFER = {**BELIEVED, "tongguan-log-key": LOG.key.line()}
PATH = "/witness/add-checkpoint"


@pytest.fixture
def store(tmp_path):
    return WitnessStore(tmp_path / "witness")


@pytest.fixture
def witness(start, store):
    return start(token=TOKEN, chains=Chains(store))


def post(witness, body, headers=OFFER):
    return witness.client.post(PATH, content=body, headers=headers)


def test_a_checkpoint_is_kept_and_cosigned(witness, store):
    answer = post(witness, submission(0, 5))
    assert answer.status_code == 200
    assert answer.text.startswith(f"\u2014 {store.cosigner.key.name} ")
    assert store.heads["o"].size == 5
    assert WitnessStore(store._dir).heads["o"].size == 5
    assert witness.metric("tongguan_agent_witness_cosigned_total") == 1
    assert witness.metric("tongguan_agent_witness_origins") == 1


def test_statuses_are_those_of_the_protocol(witness):
    assert post(witness, submission(0, 5), BELIEVED).status_code == 404
    assert post(witness, submission(0, 5)).status_code == 200
    answer = post(witness, submission(0, 9))
    assert (answer.status_code, answer.text) == (409, "5\n")
    assert answer.headers["content-type"].startswith("text/x.tlog.size")
    assert post(witness, submission(5, 9, fork_at=1)).status_code == 422
    assert post(witness, submission(5, 9), {}).status_code == 401
    assert post(witness, "nonsense").status_code == 400
    assert post(witness, "x" * 70_000).status_code == 413
    assert witness.client.get(PATH, headers=BELIEVED).status_code == 405
    assert witness.metric("tongguan_agent_witness_refused_total", reason="fork") == 1
    assert post(witness, submission(5, 9)).status_code == 200


def test_another_nodes_token_opens_the_witness_and_nothing_else(start, store):
    theirs = {"authorization": "Bearer another-nodes-token", "tongguan-log-key": LOG.key.line()}
    chains = Chains(store, witness_token=b"another-nodes-token")
    witness = start(token=TOKEN, chains=chains)
    assert post(witness, submission(0, 5), theirs).status_code == 200
    assert witness.client.get("/witness/keys", headers=theirs).status_code == 200
    assert witness.client.get("/witness/heads", headers=theirs).status_code == 401
    wrong = theirs | {"authorization": "Bearer another-nodes-tokem"}
    assert post(witness, submission(5, 9), wrong).status_code == 401
    assert "another" not in repr(chains)


def test_without_a_directory_there_is_no_witness(start):
    assert start(token=TOKEN).client.post(PATH, headers=BELIEVED).status_code == 404


def test_two_heads_shown_at_once_one_is_cosigned(witness):
    post(witness, submission(0, 5))
    bodies = [submission(5, 9), submission(5, 9, fork_at=6)]
    statuses = []

    def show(body):
        with httpx.Client(base_url=f"http://127.0.0.1:{witness.port}") as client:
            statuses.append(client.post(PATH, content=body, headers=OFFER).status_code)

    threads = [threading.Thread(target=show, args=(body,)) for body in bodies * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(200) == 1
    assert set(statuses) <= {200, 409}


def test_the_list_holds_every_head_and_verifies(witness, store, tmp_path):
    assert witness.client.get("/witness/heads", headers=BELIEVED).text == ""
    for origin in ("b", "a"):
        post(witness, submission(0, 5, origin=origin))
    assert witness.client.get("/witness/heads").status_code == 401
    text = witness.client.get("/witness/heads", headers=BELIEVED).text
    (tmp_path / "heads").write_text(text)
    keys = parse_keys(witness.client.get("/witness/keys", headers=BELIEVED).text)
    assert keys == [store.cosigner.key]
    found = read_checkpoints(tmp_path / "heads", Keyset(keys))
    assert [(row.origin, row.size) for row in found] == [("a", 5), ("b", 5)]


# The sidecar's client.

SIGNER = NoteSigner("sidecar", ED25519, b"\5" * 32)


def client(witness, *, port=None, **changes):
    values = {"authorization": b"Bearer " + TOKEN, "late_s": 60, "retry_s": 0.01, **changes}
    return WitnessClient(("127.0.0.1", port or witness.port), [SIGNER.key.line()], **values)


def chain(tmp_path, asked, number=1, records=100):
    async def scene():
        values = config(
            tmp_path / "audit",
            origin=f"chain/{number}",
            signers=(SIGNER,),
            checkpoint_records=10,
            witnesses=asked,
        )
        clock = ManualClock(START_MS + number * 3_600_000)
        writer = AuditWriter.start(values, clock, asyncio.get_running_loop())
        for record in range(records):
            ticket = writer.append_request(request(record))
            if record % 5 == 0:
                await writer.durable(ticket)
        await writer.close()
        return writer.dir

    return asyncio.run(scene())


def test_a_chain_is_witnessed_to_its_end(witness, store, tmp_path):
    asked = client(witness)
    directory = chain(tmp_path, (asked,))
    (log,) = directory.glob("*.log")
    length = len(log.read_bytes().splitlines())
    head = store.heads["chain/1"]
    assert (head.size, head.closed) == (length, True)
    result = verify(tmp_path / "audit", KEYS, pinned=Keyset([SIGNER.key, store.cosigner.key]))
    assert result.verdict == "ok"
    assert result.public()["witnessed_to"] > 10
    assert (asked.trouble, asked.refusal, asked.failures) == ("", "", 0)


def test_what_is_removed_behind_the_witness_is_found_by_its_list(witness, store, tmp_path):
    directory = chain(tmp_path, (client(witness),))
    text = witness.client.get("/witness/heads", headers=BELIEVED).text
    (tmp_path / "heads").write_text(text)
    public = Keyset([SIGNER.key, store.cosigner.key])
    expected = read_checkpoints(tmp_path / "heads", public)
    whole = verify(tmp_path / "audit", KEYS, pinned=public, expected=expected)
    assert whole.verdict == "ok"
    (log,) = directory.glob("*.log")
    lines = log.read_bytes().splitlines(keepends=True)
    # The end with its closed record goes, and a whole chain: nothing that is left says so.
    last = max(n for n, line in enumerate(lines[:-3]) if b'"kind":"checkpoint"' in line)
    log.write_bytes(b"".join(lines[: last + 1]))
    assert verify(tmp_path / "audit", KEYS, pinned=public, expected=expected).verdict == "truncated"
    log.unlink()
    directory.rmdir() if not any(directory.iterdir()) else None
    assert verify(tmp_path / "audit", KEYS, pinned=public, expected=expected).verdict == "truncated"


def submitted(old, size):
    body = submission(old, size, signers=(SIGNER,))
    head, _, note = body.partition("\n\n")
    del head
    from proxy.audit.tree import Range, consistency

    before, after = Range(), Range(old)
    before.extend(leaves(size)[:old])
    after.extend(leaves(size)[old:])
    return Submission(note, old, size, tuple(consistency(before, after)))


def test_an_answer_that_was_lost_is_found_again(witness):
    asked = client(witness)
    asked.submit(submitted(0, 5))
    assert asked.wait(10).cosigned
    # The witness holds 9, and the sidecar never heard of it.
    assert post(witness, submission(5, 9, signers=(SIGNER,))).status_code == 200
    asked.submit(submitted(5, 9))
    answer = asked.wait(10)
    assert (answer.known, answer.cosigned) == (9, "")
    asked.submit(submitted(9, 12))
    assert asked.wait(10).cosigned
    asked.stop()


def test_a_witness_that_forgot_is_told_everything(witness, store):
    asked = client(witness)
    asked.submit(submitted(0, 5))
    assert asked.wait(10).known == 5
    store.heads.clear()
    asked.submit(submitted(5, 9))
    assert asked.wait(10).known == 0
    asked.submit(submitted(0, 9))
    assert asked.wait(10).cosigned
    asked.stop()


def test_a_fork_is_an_alarm_that_is_raised_once(witness):
    asked = client(witness)
    asked.submit(submitted(0, 5))
    asked.wait(10)
    other = submission(5, 9, fork_at=1, signers=(SIGNER,)).partition("\n\n")[2]
    asked.submit(Submission(other, 5, 9, ()))
    assert asked.wait(10).known == -1
    assert asked.trouble == "witness_refused"
    assert asked.alarm().startswith(f"witness_refused: 127.0.0.1:{witness.port}: 422")
    assert asked.alarm() == ""
    asked.submit(submitted(5, 9))
    assert asked.wait(10).cosigned
    assert asked.trouble == ""
    asked.stop()


def test_a_cosignature_of_no_trusted_key_is_not_taken(witness, store):
    asked = client(witness, trusted=Keyset([Cosigner("another", b"\6" * 32).key]))
    asked.submit(submitted(0, 5))
    answer = asked.wait(10)
    assert (answer.known, answer.cosigned, asked.cosigned) == (5, "", 0)
    assert asked.alarm().endswith(": its cosignature is by no key of audit.witness_keys")
    asked.stop()
    asked = client(witness, trusted=Keyset([store.cosigner.key]))
    asked.submit(submitted(5, 9))
    assert asked.wait(10).cosigned
    asked.stop()


def test_an_unreachable_witness_is_an_alarm_after_the_time_that_is_set(start, store):
    now = [100.0]
    served = start(token=TOKEN, chains=Chains(store))
    port = served.port
    served.stop()
    asked = client(served, port=port, late_s=60, clock=lambda: now[0])
    asked.submit(submitted(0, 5))
    while asked.failures < 2:
        pass
    assert (asked.trouble, asked.alarm()) == ("", "")
    now[0] += 61
    assert (asked.trouble, asked.alarm()) == (
        "witness_unreachable",
        f"witness_unreachable: 127.0.0.1:{port}",
    )
    asked.stop()


def test_an_alarm_becomes_a_record(tmp_path, start, store):
    now = [100.0]
    served = start(token=TOKEN, chains=Chains(store))
    port = served.port
    served.stop()
    asked = client(served, port=port, late_s=60, clock=lambda: now[0])

    async def scene():
        values = config(
            tmp_path / "audit", signers=(SIGNER,), checkpoint_records=5, witnesses=(asked,)
        )
        writer = AuditWriter.start(values, ManualClock(START_MS), asyncio.get_running_loop())
        for record in range(20):
            await writer.durable(writer.append_request(request(record)))
        writer.watch()
        now[0] += 61
        writer.watch()
        writer.watch()
        assert [w.trouble for w in writer.witnesses] == ["witness_unreachable"]
        await writer.close()
        return writer.dir

    (log,) = asyncio.run(scene()).glob("*.log")
    records = [json.loads(line.split(b"\t")[0]) for line in log.read_bytes().splitlines()]
    alarms = [record["what"] for record in records if record["kind"] == "alarm"]
    assert alarms == [f"witness_unreachable: 127.0.0.1:{port}"]
    assert verify(tmp_path / "audit", KEYS, pinned=Keyset([SIGNER.key])).verdict == "ok"
