"""Settings of the spans that go to a collector."""

from urllib.parse import urlsplit

from proxy.settings import Section, setting


class Tracing(Section):
    """Spans of finished requests, for OpenTelemetry."""

    endpoint: str = setting(
        "", "OTLP/HTTP collector, http(s)://host:port[/v1/traces]; empty: no spans"
    )
    ratio: float = setting(
        0.1, "share of requests whose spans are kept; errors and late P0 always are", ge=0, le=1
    )
    p0_late_ms: int = setting(800, "a P0 request whose first byte took longer is kept", ge=1)
    queue: int = setting(2048, "requests that wait for the collector", ge=1, le=65536)
    timeout_s: float = setting(5.0, "one export, its repeats included", ge=0.1, le=60)
    flush_s: float = setting(2.0, "what is left at the end has so long to go out", ge=0, le=60)
    ca_file: str = setting("", "certificates that an https collector is verified by; empty: system")
    authorization_file: str = setting(
        "", "file whose content becomes the Authorization header to the collector"
    )


def tracing_problems(tracing: Tracing) -> list[str]:
    """Return what is wrong between settings of the spans."""
    if not tracing.endpoint:
        return []
    try:
        collector_url(tracing.endpoint)
    except ValueError as problem:
        return [f"tracing.endpoint: {problem}"]
    return []


def collector_url(endpoint: str) -> str:
    """Return where spans are posted to; raises ValueError with the reason."""
    parts = urlsplit(endpoint)
    wrong = parts.username is not None or parts.query or parts.fragment
    try:
        port = parts.port
    except ValueError:  # no number, or beyond 65535
        port = None
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port or wrong:
        raise ValueError(f"expected http://host:port or https://host:port, got {endpoint!r}")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
