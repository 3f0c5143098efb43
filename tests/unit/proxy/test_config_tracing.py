"""Where spans go: what is taken as a collector, and what is not."""

import pytest

from proxy.config import load
from proxy.config_tracing import collector_url
from proxy.settings import SettingsError


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "http://collector",
        "grpc://collector:4317",
        "http://u:p@collector:4318",
        "http://collector:4318/?key=1",
        "http://collector:4318/#x",
        "http://:4318",
        "http://c:x",
        "http://c:70000",
    ],
)  # fmt: skip
def test_a_collector_that_is_none_is_refused(endpoint):
    with pytest.raises(SettingsError, match=r"^tracing.endpoint: expected http://host:port"):
        load("", {"TONGGUAN_TRACING_ENDPOINT": endpoint})


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c:443/otlp/v1/traces", "https://c:443/otlp/v1/traces"),
    ],
)
def test_a_collectors_path_is_the_usual_one_or_its_own(endpoint, url):
    assert collector_url(endpoint) == url
