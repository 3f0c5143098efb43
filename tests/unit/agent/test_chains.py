"""Chain seeds and trace-id leases: the pure rules, the disk under them, and the HTTP in front."""

from __future__ import annotations

import hmac
import json
import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from agent import seed_store as seed_store_module
from agent.chains import Chains
from agent.lease_store import LeaseStore
from agent.leases import BLOCK, BLOCKS, QUIET_S, TTL_S, Lease, grant
from agent.seed_store import ESCROW_NAME, STATE_NAME, ChainsError, SeedStore
from agent.seeds import RefusedError, check_origin, first_state, hand_out
from proxy.audit import escrow, wrap
from proxy.audit.agent_call import AgentAddress, AgentError, chain_seed, trace_lease
from proxy.audit.note import Keyset, parse_keys
from proxy.audit.trace_id import SEQUENCES, TraceIds
from proxy.leasing import Leasing

TOKEN = b"0123456789abcdef0123"
BELIEVED = {"authorization": f"Bearer {TOKEN.decode()}"}
PRIVATE = b"\x07" * 32
PUBLIC = X25519PrivateKey.from_private_bytes(PRIVATE).public_key().public_bytes_raw()
SM2_PUBLIC = wrap.public_of(PRIVATE, wrap.SM2_BYTES)


def hkdf(ikm, info):
    prk = hmac.digest(bytes(32), ikm, "sha256")
    return hmac.digest(prk, info + b"\1", "sha256")


# Seeds.


def test_a_seed_is_of_its_step_and_its_origin_and_the_key_goes_on():
    state = first_state(lambda size: bytes(range(size)))
    seed, after = hand_out(state, "c/ns/pod/uid/1", PUBLIC, secrets.token_bytes)
    assert seed.value == hkdf(state.key, b"chainc/ns/pod/uid/1")
    assert after.key == hkdf(state.key, b"next")
    assert (seed.id, after.index) == ("00010203n0", 1)
    other, _ = hand_out(after, "c/ns/pod/uid/1", PUBLIC, secrets.token_bytes)
    assert (other.id, other.value == seed.value) == ("00010203n1", False)


@pytest.mark.parametrize("origin", ["", "a\nb", "x" * 1025, None, 7, "\ud800", "\x00"])
def test_what_is_no_origin_gets_no_seed(origin):
    with pytest.raises(RefusedError):
        check_origin(origin)


@pytest.mark.parametrize("public", [PUBLIC, SM2_PUBLIC])
def test_the_escrow_is_on_disk_before_the_seed_is_out(tmp_path, public):
    store = SeedStore(tmp_path, public)
    seed, note = store.hand_out("o")
    assert store.escrows() == note.encode() + b"\n"
    known = escrow.makers(Keyset(parse_keys(store.key_line)))
    opened = escrow.open_note(note, PRIVATE, known)
    assert (opened.seed_id, opened.origin, opened.seed) == (seed.id, "o", seed.value)
    for name in (STATE_NAME, "seeds.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_an_escrow_counts_only_if_a_known_agent_signed_it(tmp_path):
    store, other = SeedStore(tmp_path / "a", PUBLIC), SeedStore(tmp_path / "b", PUBLIC)
    seed, note = store.hand_out("o")
    known = Keyset(parse_keys(store.key_line))
    assert escrow.open_all([("x", note)], PRIVATE, known) == ({seed.id: seed.value}, [])
    cases = [
        (note, PRIVATE, Keyset(), "not signed by an agent"),
        (note, PRIVATE, Keyset(parse_keys(other.key_line)), "not signed by an agent"),
        (note.replace("\no\n", "\np\n"), PRIVATE, known, "not signed by an agent"),
        (note, b"\x09" * 32, known, "another auditor"),
        ("", PRIVATE, known, "no escrow"),
        ("a\nb\n\n\u2014 c ZGVmZ2g=\n", PRIVATE, known, "no escrow"),
    ]
    for text, private, keys, why in cases:
        seeds, (problem,) = escrow.open_all([("x", text)], private, keys)
        assert (seeds, why in problem) == ({}, True), problem


def test_a_restarted_agent_goes_on_behind_the_last_seed(tmp_path):
    store = SeedStore(tmp_path, PUBLIC)
    ids = [store.hand_out("o")[0].id for _ in range(3)]
    again = SeedStore(tmp_path, PUBLIC)
    assert (again.index, again.key_line) == (3, store.key_line)
    assert again.hand_out("o")[0].id not in ids
    assert again.escrows().count(b"tongguan chain seed escrow v1") == 4


@pytest.mark.parametrize("step", ["state", "escrow"])
def test_a_crash_while_a_seed_is_made_gives_it_to_nobody(tmp_path, monkeypatch, step):
    """Wherever it ends, no later seed is one that somebody may have seen."""
    store = SeedStore(tmp_path, PUBLIC)
    given = store.hand_out("o")[0]
    real = seed_store_module.replace

    def fails(path, data):
        if step == "escrow":
            real(path, data)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(seed_store_module, "replace", fails)
        with pytest.raises(OSError, match="Input"):
            store.hand_out("o")
    later = SeedStore(tmp_path, PUBLIC)
    next_seed = later.hand_out("o")[0]
    assert later.index == (2 if step == "state" else 3)
    assert next_seed.value != given.value


def test_the_key_of_a_step_is_gone_from_the_file(tmp_path):
    store = SeedStore(tmp_path, PUBLIC)
    before = json.loads((tmp_path / STATE_NAME).read_text())["key"]
    kept = (tmp_path / STATE_NAME).open("rb")  # the old inode, by its descriptor
    store.hand_out("o")
    with kept:
        assert not kept.read().strip(b"\0")
    assert before not in (tmp_path / STATE_NAME).read_text()


def test_a_directory_that_cannot_be_trusted_is_refused(tmp_path):
    SeedStore(tmp_path, PUBLIC)
    (tmp_path / STATE_NAME).chmod(0o640)
    with pytest.raises(ChainsError, match="chmod 600"):
        SeedStore(tmp_path, PUBLIC)
    (tmp_path / STATE_NAME).chmod(0o600)
    (tmp_path / STATE_NAME).write_text("{}")
    with pytest.raises(ChainsError, match="damaged"):
        SeedStore(tmp_path, PUBLIC)


def test_a_full_escrow_gives_no_more_seeds(tmp_path, monkeypatch):
    store = SeedStore(tmp_path, PUBLIC)
    store.hand_out("o")
    monkeypatch.setattr(seed_store_module, "ESCROW_BYTES_MAX", 10)
    with pytest.raises(RefusedError, match="move it to the auditor"):
        store.hand_out("o")
    (tmp_path / ESCROW_NAME).unlink()
    store.hand_out("o")


# Leases.


def test_no_two_leases_share_a_sequence():
    leases: dict[int, Lease] = {}
    for number in range(BLOCKS):
        lease = grant(leases, "", f"id{number}", 1000)
        leases[lease.block] = lease
    taken = [s for lease in leases.values() for s in range(lease.first, lease.first + BLOCK)]
    assert sorted(taken) == list(range(SEQUENCES))
    with pytest.raises(RefusedError, match="leases are out"):
        grant(leases, "", "one more", 1000)
    assert grant(leases, "id7", "x", 1000 + TTL_S - 1).block == leases[7].block
    # Over, and not given again before everybody has stopped.
    with pytest.raises(RefusedError):
        grant(leases, "id7", "x", 1000 + TTL_S + QUIET_S - 1)
    late = grant(leases, "id7", "x", 1000 + TTL_S + QUIET_S)
    assert (late.id, late.block) == ("x", 0)


def test_a_restarted_agent_keeps_to_its_leases(tmp_path):
    store = LeaseStore(tmp_path, 7)
    one, two = store.grant("", 1000), store.grant("", 1000)
    again = LeaseStore(tmp_path, 7)
    assert again.grant(two.id, 2000).block == two.block
    assert again.grant("", 2000).block not in {one.block, two.block}
    again.release(one.id, 2000)
    assert LeaseStore(tmp_path, 7).grant("", 2000 + QUIET_S).block == one.block
    (tmp_path / "leases").write_text("[{]")
    with pytest.raises(ChainsError, match="damaged"):
        LeaseStore(tmp_path, 7)


def test_trace_ids_stay_in_their_block_and_in_order():
    ids = TraceIds(3)
    texts = [ids.next(1000) for _ in range(3)]
    ids.move(7, 150, 50)
    texts += [ids.next(1000) for _ in range(120)]
    assert texts == sorted(texts)
    assert len(set(texts)) == len(texts)
    assert {text.split("-")[1] for text in texts[3:]} == {"00007"}
    assert {int(text.split("-")[2]) for text in texts[3:]} == set(range(150, 200))
    for bad in ((100_000, 0, 1), (1, -1, 5), (1, 9_990, 11), (1, 0, 0)):
        with pytest.raises(ValueError, match="out of range"):
            ids.move(*bad)


# Over HTTP.


@pytest.fixture
def served(start, tmp_path):
    chains = Chains(
        None, LeaseStore(tmp_path / "chains", 42), SeedStore(tmp_path / "chains", PUBLIC)
    )
    made = start(token=TOKEN, chains=chains)
    made.seeds = chains.seeds
    return made


def address(served, token=TOKEN):
    return AgentAddress(("127.0.0.1", served.port), b"Bearer " + token)


def test_a_believed_sidecar_is_given_a_seed_and_its_escrow(served):
    seed = chain_seed(address(served), "c/ns/pod/uid/1")
    keys = parse_keys(served.client.get("/chains/keys", headers=BELIEVED).text)
    notes = served.client.get("/chains/escrow", headers=BELIEVED).text
    assert notes == seed.escrow + "\n"
    opened = escrow.open_note(seed.escrow, PRIVATE, escrow.makers(Keyset(keys)))
    assert opened.seed == seed.value
    assert served.metric("tongguan_agent_chain_seeds_total") == 1


def test_nobody_else_is(served):
    with pytest.raises(AgentError, match="401") as refused:
        chain_seed(address(served, b"x" * 20), "o")
    assert refused.value.refused
    for path in ("/chains/keys", "/chains/escrow"):
        assert served.client.get(path).status_code == 401
    post = served.client.post
    assert post("/chains/seed", headers=BELIEVED, content=b"[]").status_code == 400
    assert post("/chains/seed", headers=BELIEVED, content=b"{").status_code == 400
    assert post("/chains/seed", headers=BELIEVED, content=b"x" * 9000).status_code == 413
    assert served.seeds.index == 0


def test_without_an_auditors_key_there_are_leases_alone(start, tmp_path):
    served = start(token=TOKEN, chains=Chains(None, LeaseStore(tmp_path, 42)))
    with pytest.raises(AgentError, match="auditor_public") as refused:
        chain_seed(address(served), "o")
    assert refused.value.refused
    assert served.client.get("/chains/keys", headers=BELIEVED).status_code == 404
    assert trace_lease(address(served), "", 0.0, 5.0).machine == 42


class Loop:
    """Runs at once what is handed to it."""

    def call_soon_threadsafe(self, call):
        call()


def test_two_processes_of_a_node_never_meet(served):
    sources = [TraceIds(1), TraceIds(1)]
    leases = [Leasing(address(served), ids, Loop(), lambda: None) for ids in sources]
    for lease in leases:
        lease.start()
        assert lease.held
    made = [{ids.next(1000 + n // 50) for n in range(500)} for ids in sources]
    assert not made[0] & made[1]
    assert served.metric("tongguan_agent_trace_leases") == 2
    leases[0].stop()
    assert served.metric("tongguan_agent_trace_leases") == 1
    leases[1].stop()


def test_a_lease_that_cannot_be_renewed_runs_out(served):
    now = [0.0]
    ids, without = TraceIds(1), []
    lease = Leasing(address(served), ids, Loop(), lambda: without.append(1), lambda: now[0])
    lease._renew(2.0)
    assert ids.next(1).split("-")[1] == "00042"
    served.stop()
    now[0] = TTL_S - 1.0
    lease._renew(0.2)
    assert (lease.held, without) == (True, [])
    now[0] = TTL_S
    lease._renew(0.2)
    assert (lease.held, without) == (False, [1])


def test_an_agent_that_is_not_there_is_said_so_soon():
    agent = AgentAddress(("127.0.0.1", 1))
    with pytest.raises(AgentError) as failed:
        chain_seed(agent, "o")
    assert not failed.value.refused
    lease = Leasing(agent, TraceIds(1), Loop(), lambda: None)
    lease.start()
    assert not lease.held
    lease.stop()
