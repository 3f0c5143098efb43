"""Settings of the audit chain."""

from typing import Literal

from proxy.config_address import split_endpoint
from proxy.settings import Section, setting

# An auditor derives each key from the one before, and a chain has at most 999 999 of them.
ROTATE_RECORDS_MIN = 1000
# A thread and a signature line each; `audit.checkpoint` counts on it.
WITNESSES_MAX = 4


Sync = Literal["group", "request"]


class AuditSync(Section):
    """Which classes' requests wait for the disk: the audit policy `audit_sync`."""

    p0: Sync = setting("group", "request: sent on once its open record is on disk")
    p1: Sync = setting("group", "the same, for P1")
    p2: Sync = setting("group", "the same, for P2")
    wait_s: float = setting(
        1.0, "longest wait for that; then audit.on_failure decides", ge=0.001, le=60
    )

    @property
    def opens(self) -> tuple[str, ...]:
        """The classes that wait."""
        rows = (("P0", self.p0), ("P1", self.p1), ("P2", self.p2))
        return tuple(qos for qos, sync in rows if sync == "request")


class Audit(Section):
    """The audit chain."""

    enabled: bool = setting(True, "write an audit chain")
    dir: str = setting("", "directory of the chains; empty: no audit (shown in readyz)")
    token_ids: Literal["", "sealed", "commit", "plain", "off"] = setting(
        "", "token ids in records; empty: sealed, which needs the auditor's key"
    )
    on_failure: Literal["block", "degrade"] = setting("degrade", "when a record cannot be written")
    flush_ms: int = setting(5, "group interval", ge=1, le=1000)
    flush_records: int = setting(256, "group size", ge=1, le=4096)
    heartbeat_s: int = setting(30, "record after so long without one", ge=1)
    segment_bytes: int = setting(64 << 20, "segment size", ge=1 << 16, le=64 << 20)
    witness: tuple[str, ...] = setting(
        (),
        "who cosigns checkpoints, at most 4: http://host:port or unix:/path of this node's agent "
        "and of peers; empty: nobody",
        lone=True,
    )
    witness_authorization_file: tuple[str, ...] = setting(
        (),
        "files whose content becomes the Authorization header to the witness of the same place in "
        "the list; none behind the list's end, and for -",
        lone=True,
    )
    witness_keys: tuple[str, ...] = setting(
        (),
        "public key lines of witnesses: only their cosignatures are taken; empty: any",
        lone=True,
    )
    witness_late_s: int = setting(
        300,
        "a witness that decides nothing for so long is an alarm; if all are so, with block, not "
        "ready",
        ge=1,
    )
    agent: str = setting(
        "", "the node's agent, for trace-id leases and seeds: http://host:port or unix:/path"
    )
    agent_authorization_file: str = setting(
        "", "file whose content becomes the Authorization header to the agent"
    )
    seeds: Literal["keys", "agent"] = setting(
        "keys", "who gives the chain's seed: the provider of keys, or audit.agent"
    )
    retention_days: int = setting(
        183, "records older than this are removed, whole segments at a time; 0: never", ge=0
    )
    rotate_s: int = setting(900, "the chain's key goes on after so long; 0: not by time", ge=0)
    rotate_records: int = setting(
        1_000_000, "and after so many records, at least 1000; 0: not by count", ge=0
    )
    alg: Literal["s256", "sm3"] = setting("s256", "chain MAC: HMAC-SHA256 or HMAC-SM3")
    prompt_hash_mode: Literal["keyed", "plain"] = setting(
        "keyed", "plain lets a dictionary open prompt hashes"
    )
    observed_bytes: int = setting(64 << 20, "bodies held for hashing, together", ge=1 << 20)
    sync: AuditSync = AuditSync()


def audit_problems(audit: Audit) -> list[str]:
    """Return what is wrong between settings of the audit chain."""
    if 0 < audit.rotate_records < ROTATE_RECORDS_MIN:
        return [f"audit.rotate_records: expected 0 or at least {ROTATE_RECORDS_MIN}"]
    if audit.sync.opens and not (audit.enabled and audit.dir):
        qos = audit.sync.opens[0].lower()
        return [f"audit.sync.{qos}: request needs a chain: set audit.dir, or let it be group"]
    if audit.seeds == "agent" and not audit.agent:
        return ["audit.seeds: agent needs audit.agent, its address"]
    if len(audit.witness) > WITNESSES_MAX:
        return [f"audit.witness: expected at most {WITNESSES_MAX} addresses"]
    if len(set(audit.witness)) < len(audit.witness):
        return ["audit.witness: an address stands there twice"]
    if audit.witness and len(audit.witness_authorization_file) > len(audit.witness):
        return ["audit.witness_authorization_file: more files than witnesses"]
    endpoints = [("witness", endpoint) for endpoint in audit.witness]
    for name, endpoint in (*endpoints, ("agent", audit.agent)):
        if endpoint.startswith("https:"):
            return [f"audit.{name}: expected http:// or unix:/path, of an agent"]
        try:
            split_endpoint(endpoint or "unix:/none")
        except ValueError as problem:
            return [f"audit.{name}: {problem}"]
    return []
