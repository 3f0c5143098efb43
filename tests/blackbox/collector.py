"""An OTLP/HTTP collector on loopback: takes what comes, decoded by OpenTelemetry's own messages."""

import contextlib
import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

with contextlib.suppress(ImportError):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )


def value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


def attributes(rows):
    return {row.key: value(row.value) for row in rows}


class Collected:
    """One span as it came."""

    def __init__(self, span, resource, scope):
        self.name = span.name
        self.kind = span.kind  # 1 internal, 2 server, 3 client
        self.trace_id = span.trace_id.hex()
        self.span_id = span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        self.start_ns = span.start_time_unix_nano
        self.end_ns = span.end_time_unix_nano
        self.failed = span.status.code == 2
        self.attributes = attributes(span.attributes)
        self.resource = resource
        self.scope = scope


class Collector:
    """A context manager. `answer`: the status it gives; `delay_s`: how long that takes."""

    def __init__(self):
        pytest.importorskip("opentelemetry.proto", reason="capability: the extra otel")
        self.answer, self.delay_s = 200, 0.0
        self.spans, self.raw, self.heads = [], [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                data = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(outer.delay_s)
                if outer.answer == 200:
                    outer.take(self, gzip.decompress(data))
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(outer.answer)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a sidecar that left

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, handler, data):
        self.heads.append((handler.path, dict(handler.headers)))
        self.raw.append(data)
        for row in ExportTraceServiceRequest.FromString(data).resource_spans:
            for part in row.scope_spans:
                scope = part.scope.name, part.schema_url
                found = attributes(row.resource.attributes)
                self.spans += [Collected(span, found, scope) for span in part.spans]

    def of(self, trace_id):
        """Return the spans of a trace, by name; each name once."""
        found = [span for span in list(self.spans) if span.trace_id == trace_id]
        named = {span.name: span for span in found}
        assert len(named) == len(found), [span.name for span in found]
        return named

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
