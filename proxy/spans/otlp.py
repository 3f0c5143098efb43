"""Spans as OpenTelemetry's SDK has them, over OTLP/HTTP. The one file that imports it.

Settings of ours alone decide: its variables (`OTEL_…`), `HTTP_PROXY` and the like are not read.
"""

from __future__ import annotations

import logging
import os
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from proxy.config_tracing import collector_url
from proxy.settings import one_line
from proxy.spans import conventions as names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.config import Settings
    from proxy.spans.build import Span

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpCollector:
    """See `outbox.Collector`. Raises SettingsError for a credential that cannot be read."""

    def __init__(self, settings: Settings, node: str) -> None:
        row = settings.tracing
        secret = one_line(row.authorization_file, "tracing.authorization_file")
        # Its own variables would add header fields and certificates; nobody else here reads them.
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        session = requests.Session()
        session.trust_env = False
        # What it says of a failure is said by `outbox`, once a minute.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(
            endpoint=collector_url(row.endpoint),
            certificate_file=row.ca_file or None,
            headers={"authorization": secret.decode("latin-1")} if secret else {},
            timeout=row.timeout_s,
            compression=Compression.Gzip,
            session=session,
        )
        self._resource = resource(settings, node)
        self._scope = InstrumentationScope(names.SCOPE, version("tongguan"), names.SCHEMA_URL)

    def export(self, batch: Sequence[Span]) -> bool:
        """See `outbox.Collector`."""
        made = [self._readable(span) for span in batch]
        return self._exporter.export(made) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """See `outbox.Collector`."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        def context(span_id: int, *, remote: bool) -> SpanContext:
            return SpanContext(span.trace_id, span_id, is_remote=remote, trace_flags=_SAMPLED)

        return ReadableSpan(
            span.name,
            context(span.span_id, remote=False),
            parent=context(span.parent_id, remote=span.remote) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )


def resource(settings: Settings, node: str) -> Resource:
    """Return what says which sidecar this is: pod and node where it has them."""
    identity = settings.identity
    place = identity.pod_uid or identity.pod or node
    told = {
        names.SERVICE: names.SERVICE_VALUE,
        names.SERVICE_VERSION: version("tongguan"),
        names.INSTANCE: f"{place}/{os.getpid()}",
        names.HOST: identity.pod or socket.gethostname(),
        names.CLUSTER: identity.cluster,
        names.NAMESPACE: identity.namespace if identity.pod else "",
        names.POD: identity.pod,
        names.POD_UID: identity.pod_uid,
        names.NODE: identity.node,
        names.SDK_NAME: "opentelemetry",
        names.SDK_LANGUAGE: "python",
        names.SDK_VERSION: version("opentelemetry-sdk"),
    }
    return Resource({name: value for name, value in told.items() if value}, names.SCHEMA_URL)
