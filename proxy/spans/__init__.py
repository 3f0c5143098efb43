"""From finished requests to OpenTelemetry spans, off the request path (docs/tracing.md)."""
