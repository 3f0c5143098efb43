"""Settings of the pools: upstream endpoints and how they are used."""

from typing import ClassVar

from proxy.config_address import FIELD_VALUE, split_endpoint
from proxy.settings import Section, setting

OVERFLOWS_TO = {"dedicated": "shared", "shared": "best_effort"}


class Seal(Section):
    """Sealing on the way out, to the sealed doors of the next hop."""

    keys: tuple[str, ...] = setting(
        (), "clients' key files, one for each endpoint in order, or one for all; empty: in clear"
    )
    mac: bool = setting(False, "add an SM3-HMAC where the key does not demand it")
    sign: bool = setting(True, "sign where the key file has a private key")
    events: bool = setting(
        False, "ask for streamed answers as event streams where the app's Accept does not"
    )


class Pool(Section):
    """One group of upstream endpoints."""

    endpoints: tuple[str, ...] = setting(
        ("http://127.0.0.1:14100",),
        "http://host:port, https://host:port or unix:/path, tried by least cost",
    )
    ca_file: str = setting("", "certificates that https endpoints are verified by; empty: system")
    host: str = setting("", "Host sent upstream instead of the client's")
    authorization_file: str = setting("", "file whose content becomes the Authorization header")
    repeatable: bool = setting(False, "a request may be sent again after it was fully written")
    token_ids: bool = setting(False, "the engine understands return_token_ids")
    inflight: int = setting(512, "requests in flight", ge=1)
    idle_connections: int = setting(64, "idle connections kept", ge=0)
    keepalive_s: float = setting(50.0, "idle time upstream; keep it below the peer's", ge=0)
    retry_percent: float = setting(10.0, "requests sent a second time; 0: none", ge=0, le=100)
    seal: Seal = Seal()
    eject_errors: int = setting(5, "errors in a row that eject an endpoint; 0: never", ge=0)
    eject_slow_factor: float = setting(
        5.0, "first byte over the others' median that ejects an endpoint; 0: never", ge=0
    )
    eject_s: float = setting(10.0, "first ejection; each in a row is twice as long", ge=0.1)
    eject_max_s: float = setting(300.0, "longest ejection", ge=0.1)


class UpperPool(Pool):
    """A pool with one below it, which may take what it cannot."""

    overflow: bool = setting(
        False, "what finds no place goes on: P0 to shared, P1 to best_effort; best_effort has none"
    )


class Pools(Section):
    """The three pools a class is sent to."""

    there_are: ClassVar[str] = "; there are dedicated, shared and best_effort"

    dedicated: UpperPool = UpperPool()
    shared: UpperPool = UpperPool()
    best_effort: Pool = Pool()


def pools_problems(pools: Pools) -> list[str]:
    """Return what is wrong between settings of the pools."""
    problems = []
    for name in ("dedicated", "shared", "best_effort"):
        pool: Pool = getattr(pools, name)
        if not FIELD_VALUE.fullmatch(pool.host):
            problems.append(f"pools.{name}.host: expected printable characters, no space")
        if not pool.endpoints:
            problems.append(f"pools.{name}.endpoints: at least one endpoint")
        for endpoint in pool.endpoints:
            try:
                split_endpoint(endpoint)
            except ValueError as problem:
                problems.append(f"pools.{name}.endpoints: {problem}")
        problems.extend(_seal_problems(pools, name))
    return problems


def _seal_problems(pools: Pools, name: str) -> list[str]:
    pool: Pool = getattr(pools, name)
    problems = []
    if pool.seal.keys:
        if len(pool.seal.keys) not in {1, len(pool.endpoints)}:
            problems.append(
                f"pools.{name}.seal.keys: expected one file, or one for each of the "
                f"{len(pool.endpoints)} endpoints"
            )
        if pool.authorization_file:
            problems.append(
                f"pools.{name}.authorization_file: beside an envelope it would travel in clear; "
                "the next hop has its own for its upstream"
            )
    if isinstance(pool, UpperPool) and pool.overflow and pool.seal.keys:
        other = OVERFLOWS_TO[name]
        taker: Pool = getattr(pools, other)
        if not taker.seal.keys:
            problems.append(
                f"pools.{name}.overflow: {other} does not seal, so what overflows would leave "
                "in clear"
            )
    return problems
