"""Every name in our spans, and the conventions that they are pinned to.

OpenTelemetry semantic conventions 1.37.0: `gen_ai.*` is in Development there, and later releases
moved it elsewhere and renamed parts. Whoever follows them changes this file, and SCHEMA_URL with
it. What the conventions have no name for begins with `tongguan.`.
"""

from __future__ import annotations

VERSION = "1.37.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{VERSION}"
SCOPE = "tongguan.proxy"

# -- spans. The request's is named after its method and route, the model's after operation and model
QUEUE = "tongguan.queue"  # head accepted -> a place: the body, and the queue
WAIT = "tongguan.upstream.wait"  # a place -> a connection
FIRST_BYTE = "tongguan.first_byte"  # a connection -> the answer's first body byte
STREAM = "tongguan.stream"  # first body byte -> the end
AUDIT = "tongguan.audit.write"  # the record made -> on disk

# -- attributes
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"
SCHEME = "url.scheme"

RECORD = "tongguan.trace_id"  # the audit record's
DOOR = "tongguan.door"
QOS = "tongguan.qos"
QOS_ASKED = "tongguan.qos.asked"
POOL = "tongguan.pool"
OUTCOME = "tongguan.outcome"
PHASE = "tongguan.phase"
TENANT = "tongguan.tenant"  # a pseudonym
KEPT = "tongguan.kept"

# -- values
PROVIDER_VALUE = "openai"  # whose API it is: "the telemetry format flavor", not who runs the model
OTHER_METHOD = "_OTHER"
METHODS = frozenset(
    ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
)
# A path that is not here may hold anything, so it is not told.
ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
    "/v1/models": "",
}

# -- resource
SERVICE = "service.name"
SERVICE_VALUE = "tongguan-proxy"
SERVICE_VERSION = "service.version"
INSTANCE = "service.instance.id"
CLUSTER = "k8s.cluster.name"
NAMESPACE = "k8s.namespace.name"
POD = "k8s.pod.name"
POD_UID = "k8s.pod.uid"
NODE = "k8s.node.name"
HOST = "host.name"
SDK_NAME, SDK_LANGUAGE, SDK_VERSION = (
    "telemetry.sdk.name",
    "telemetry.sdk.language",
    "telemetry.sdk.version",
)
