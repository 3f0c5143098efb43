"""What the audit chain costs: a record on the request's way, sustained writing, verification.

    python -m perf.audit [--records N] [--dir DIR] [--json FILE]

Gates: a record on the request's way at most 15 us of the data loop's CPU, hashes included;
sustained writing with group sync at least 0.6 times a bare loop that writes the same bytes and
fdatasyncs after every group of `audit.flush_records`, in the same run (median of the rounds; on a
disk that takes hundreds of megabytes a second the CPU is the bound); of one chain of N records (2
million), verified in one go, at least 90 000 a second of CPU by one process and 150 000 a second
with two, in memory that does not grow with N. A line of a gigabyte behind a chain is named rightly
by both verifiers, in no more memory. The disk must hold about 1 KB a record and round. Beside them,
without a gate: the tree's cost a record, a signature, proofs, the bundle's verifier.
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf import machine, output
from proxy.audit import hashes
from proxy.audit.bundle import verify as bundle_verify
from proxy.audit.layout import segments
from proxy.audit.note import ED25519
from proxy.audit.prove import prove
from proxy.audit.request import RequestText, request_text
from proxy.audit.setup import ChainConfig
from proxy.audit.signing import NoteSigner
from proxy.audit.tree import Range
from proxy.audit.writer import AuditWriter
from proxy.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDS = 2_000_000
# Of a round on the request's way, and of a round of sustained writing.
WAY_RECORDS, WRITE_RECORDS = 40_000, 100_000
BATCH = 64
GROUP = 256  # `audit.flush_records`, as shipped
ROUNDS = 5
# As much as waits while a batch is synced; less than what a writer keeps.
WAITING = 4096
LINE_BYTES = 1000
LONG_LINE_BYTES = 1 << 30
SEED, KEY = bytes(32), bytes(range(32))
SIGNER = NoteSigner("perf", ED25519, b"\7" * 32)
PROMPT = b'[{"role":"user","content":"' + b"what is the tallest mountain? " * 20 + b'"}]'
ANSWER = "The tallest mountain above sea level is Mount Everest. " * 8
# Name: (bound, whether it is the least).
GATES = {
    "record_us": (15.0, False),
    "write_ratio": (0.6, True),
    "verify_per_s": (90_000.0, True),
    "verify_two_per_s": (150_000.0, True),
    "verify_growth_mib": (16.0, False),
    "long_line_named": (1.0, True),
    "long_line_growth_mib": (16.0, False),
}


def chain_config(
    directory: Path, origin: str = "perf/default/pod/uid/1", flush_ms: int = 5
) -> ChainConfig:
    """Return the settings of a chain as a sidecar has them."""
    return ChainConfig(
        dir=directory,
        origin=origin,
        seed_id="perf",
        seed=SEED,
        alg="s256",
        token_ids="off",
        auditor_public=None,
        on_failure="degrade",
        flush_ms=flush_ms,
        flush_records=GROUP,
        segment_bytes=64 << 20,
        heartbeat_s=30,
        genesis={"config_sha256": "0" * 64, "image": "perf"},
        signers=(SIGNER,),
    )


def record_text(number: int, trace_id: str = "") -> RequestText:
    """Return a record's text as `proxy.recorder` makes them, hashes included."""
    output_hash, output_len = hashes.output_hash(KEY, {0: ANSWER})
    return request_text(
        trace_id=trace_id or f"1767225600000-00001-{number % 10_000:04d}",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tenant="default",
        qos="P1",
        pool="shared",
        status=200,
        outcome="ok",
        phase="done",
        queue_us=41,
        first_byte_us=1203,
        total_us=20_111,
        model="llama",
        served_model="llama-3-8b",
        prompt_hash=hashes.prompt_hash(KEY, PROMPT, b"llama", b"0.7"),
        params_hash=hashes.params_hash(KEY, b'{"max_tokens":256,"stream":true}'),
        output_hash=output_hash,
        output_len=output_len,
        usage={"prompt": 180, "completion": 96, "total": 276},
    )


async def _on_the_way(directory: Path, records: int) -> tuple[float, float]:
    """Return CPU microseconds a record: of the data loop's thread, and of all threads.

    The loop makes hashes and text, chains and flushes; the sync thread writes, syncs and signs.
    """
    writer = AuditWriter.start(chain_config(directory), SystemClock(), asyncio.get_running_loop())
    begin, begin_loop = time.process_time_ns(), time.thread_time_ns()
    for number in range(0, records, BATCH):
        rows = [record_text(n) for n in range(number, number + BATCH)]
        ticket = writer.append_requests(rows, [None] * BATCH)[-1]
        await asyncio.sleep(0)
        if len(writer._pending) > WAITING:  # noqa: SLF001 - not to lose any
            await writer.durable(ticket)
    await writer.durable(ticket)
    loop_ns, all_ns = time.thread_time_ns() - begin_loop, time.process_time_ns() - begin
    await writer.close()
    return loop_ns / 1000 / records, all_ns / 1000 / records


async def _sustained(directory: Path, records: int) -> tuple[float, int, int]:
    """Return (seconds, bytes, syncs) of writing as fast as it goes."""
    writer = AuditWriter.start(chain_config(directory), SystemClock(), asyncio.get_running_loop())
    rows = [record_text(n) for n in range(BATCH)]
    begin, bytes_before, syncs_before = time.monotonic(), writer.stats.bytes, writer.stats.syncs
    for _ in range(0, records, BATCH):
        ticket = writer.append_requests(rows, [None] * BATCH)[-1]
        await asyncio.sleep(0)
        if len(writer._pending) > WAITING:  # noqa: SLF001 - not to lose any
            await writer.durable(ticket - WAITING // 2)
    await writer.durable(ticket)
    spent = time.monotonic() - begin
    written, syncs = writer.stats.bytes - bytes_before, writer.stats.syncs - syncs_before
    await writer.close()
    return spent, written, syncs


def _bare(path: Path, size: int, syncs: int) -> float:
    """Return seconds of writing as many bytes, in as many pieces, each of them synced."""
    data = os.urandom(-(-size // syncs))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    begin = time.monotonic()
    for _ in range(syncs):
        os.write(handle, data)
        os.fdatasync(handle)
    spent = time.monotonic() - begin
    os.close(handle)
    path.unlink()
    return spent


def _timed(call: Callable[[], Any]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _verified(directory: Path, jobs: int, verdict: str = "ok") -> dict[str, Any]:
    """Verify with the command, in a process of its own; return what it said and cost."""
    keys = directory.parent / "auditor.json"
    document = {
        "format": "tongguan-keys/1",
        "role": "auditor",
        "chain_seeds": [{"id": "perf", "seed": SEED.hex()}],
        "verify_keys": [SIGNER.key.line()],
    }
    keys.touch(mode=0o600)
    keys.write_text(json.dumps(document), encoding="utf-8")
    command = [sys.executable, "-m", "proxy.cli", "audit", "verify", str(directory), "--json"]
    command += ["--keys", str(keys), "--jobs", str(jobs)]
    begin = time.monotonic()
    # Its own output is small; what it costs comes with the end of the process.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    spent = time.monotonic() - begin
    result = json.loads(said or b"{}")
    if result.get("verdict") != verdict:
        raise RuntimeError(f"the chain does not verify as {verdict}: {result}")
    return {
        "records": result["records"],
        "seq": result["seq"],
        "wall_s": spent,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_mib": usage.ru_maxrss / 1024,
    }


def _verification(large: Path, small: Path) -> dict[str, float]:
    """Return records verified a second: of CPU by one process, of time by two; and memory."""
    few, one, two = _verified(small, 1), _verified(large, 1), _verified(large, 2)
    return {
        "verify_records": one["records"],
        "verify_per_s": one["records"] / one["cpu_s"],
        "verify_wall_per_s": one["records"] / one["wall_s"],
        "verify_two_per_s": two["records"] / two["wall_s"],
        "verify_rss_mib": one["rss_mib"],
        "verify_growth_mib": one["rss_mib"] - few["rss_mib"],
    }


def _long_line(directory: Path) -> dict[str, float]:
    """Put a line of a gigabyte behind a chain's last one; return what both verifiers make of it."""
    before = _verified(directory, 1)
    (chain,) = directory.iterdir()
    _, path = segments(chain)[-1]
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            file.truncate(size + LONG_LINE_BYTES)  # sparse: zeros, and no newline
        after = _verified(directory, 1, "malformed")
        command = [sys.executable, "-I", "-S", bundle_verify.__file__, str(directory)]
        bundle = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        said = json.loads(bundle.stdout)
    finally:
        os.truncate(path, size)
    named = (
        (said["verdict"], said["seq"])
        == ("malformed", after["seq"])
        == ("malformed", before["records"])
    )
    return {
        "long_line_named": float(named),
        "long_line_s": after["wall_s"],
        "long_line_growth_mib": after["rss_mib"] - before["rss_mib"],
    }


def _bundled(directory: Path) -> dict[str, float]:
    log = bundle_verify.Log(directory, {"perf": SEED}, [bundle_verify.read_key(SIGNER.key.line())])
    spent = _timed(lambda: log.check({}))
    return {"bundle_verify_per_s": sum(chain.records for chain in log.chains) / spent}


def _tree(directory: Path) -> dict[str, float]:
    (chain,) = directory.iterdir()
    data = [path.read_bytes() for _, path in segments(chain)]
    lines = b"".join(data).count(b"\n")
    tree = Range()
    spent = _timed(lambda: [tree.extend_lines(part) for part in data])
    text = "perf\n1\n" + "A" * 43 + "=\n"
    signs = _timed(lambda: [SIGNER.sign(text) for _ in range(500)])
    proof = _timed(lambda: prove(directory, "perf/default/pod/uid/1", lines // 2))
    return {
        "tree_us": spent * 1e6 / lines,
        "sign_us": signs * 1e6 / 500,
        "prove_s": proof,
        "line_bytes": sum(map(len, data)) / lines,
    }


def _writing(folder: Path) -> dict[str, float]:
    """Return the cost on the way (the best round), and of sustained writing (the median)."""
    ways = [asyncio.run(_on_the_way(folder / f"way{n}", WAY_RECORDS)) for n in range(ROUNDS)]
    found: dict[str, float] = {}
    found["record_us"], found["record_all_threads_us"] = min(ways)
    rounds: list[dict[str, float]] = []
    for number in range(ROUNDS):
        directory, bare = folder / f"sustained{number}", folder / f"bare{number}"
        spent, size, syncs = asyncio.run(_sustained(directory, WRITE_RECORDS))
        grouped = _bare(bare, size, -(-WRITE_RECORDS // GROUP))
        rounds.append(
            {
                "write_ratio": grouped / spent,
                "write_ratio_own_batches": _bare(bare, size, syncs) / spent,
                "write_per_s": WRITE_RECORDS / spent,
                "write_batch_records": WRITE_RECORDS / syncs,
                "bare_mb_per_s": size / grouped / 1e6,
            }
        )
        shutil.rmtree(directory)
    for name in rounds[0]:
        found[name] = statistics.median(row[name] for row in rounds)
    return found


def measure(folder: Path, records: int) -> dict[str, float]:
    """Return every number."""
    found = _writing(folder)
    spent, _, _ = asyncio.run(_sustained(folder / "large", records))
    found["large_write_per_s"] = records / spent
    found |= _verification(folder / "large", folder / "way0")
    found |= _bundled(folder / "way0") | _tree(folder / "way0")
    return found | _long_line(folder / "way0")


def _room(directory: Path, records: int) -> None:
    """Raise RuntimeError unless the disk holds what the run writes, and as much again."""
    need = 2 * LINE_BYTES * (records + ROUNDS * WAY_RECORDS + 2 * WRITE_RECORDS)
    free = shutil.disk_usage(directory).free
    if free < need:
        raise RuntimeError(
            f"{directory}: {need >> 20} MiB are needed, {free >> 20} MiB are free; "
            "give another --dir, or fewer --records"
        )


def _holds(name: str, value: float) -> bool:
    bound, least = GATES[name]
    return value >= bound if least else value <= bound


def run(args: argparse.Namespace) -> int:
    """Measure, print, keep."""
    _room(args.dir, args.records)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="audit-") as folder:
        found = measure(Path(folder), args.records)
    gates = {name: _holds(name, found[name]) for name in GATES}
    result = {
        "machine": machine.facts() | {"sidecar": machine.sidecar()},
        "records": args.records,
        "results": {name: round(value, 4) for name, value in found.items()},
        "gates": {name: {"bound": GATES[name][0], "holds": held} for name, held in gates.items()},
    }
    verdicts = {
        name: f"   gate {GATES[name][0]:g}: {'holds' if held else 'MISSED'}"
        for name, held in gates.items()
    }
    table = [f"{name:24}{value:12.4g}{verdicts.get(name, '')}" for name, value in found.items()]
    output.put(args.json, result, "\n".join(table))
    return 0 if all(gates.values()) else 1


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.audit", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--records", type=int, default=RECORDS, help=f"of the chain that is verified ({RECORDS})"
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to measure")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (OSError, RuntimeError) as problem:
        sys.stderr.write(f"perf.audit: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
