"""Two upstreams behind the pools of one sidecar, and what is known of them."""

import json
import re

from tests.blackbox.harness import OK, Sidecar

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
P0 = b"X-QoS-Class: P0"
UNAVAILABLE = b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"
GRANTED = '[tenants.default]\nmax_class = "P0"\n'


def both(two):
    return ",".join(upstream.url for upstream in two)


def asked(two):
    return [len(upstream.seen) for upstream in two]


def state(sidecar, upstream, pool="shared"):
    """Return the endpoint's state as the metrics say it."""
    text = sidecar.admin_ask("GET", "/metrics").body.decode()
    rows = re.findall(r"(?m)^tongguan_proxy_endpoint_state\{(.*)\} (\S+)$", text)
    labels = f'endpoint="{upstream.url}",pool="{pool}",state='
    (name,) = (row for row, value in rows if row.startswith(labels) and float(value))
    return name.removeprefix(labels).strip('"')


def notes(sidecar):
    return json.loads(sidecar.admin_ask("GET", "/readyz").body)["notes"]


def holding(release):
    """Return a script that answers when `release` is set."""

    def script(seen):
        seen.body()
        assert release.wait(20)
        seen.wire.send(OK)

    return script


def pools(**pools):
    """Return TOML of pools: values as they are written there."""
    return "".join(
        f"[pools.{name}]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())
        for name, rows in pools.items()
    )


def two_pools(two, tmp_path, *, overflow, **dedicated):
    """Return TOML: P0 goes to the first upstream, all else to the second."""
    secret = tmp_path / "secret"
    secret.write_text("Bearer shared\n")
    other = tmp_path / "other"
    other.write_text("Bearer dedicated\n")
    first, second = (json.dumps([upstream.url]) for upstream in two)
    return GRANTED + pools(
        dedicated={
            "endpoints": first,
            "overflow": str(overflow).lower(),
            "host": '"dedicated.test"',
            "authorization_file": json.dumps(str(other)),
            **dedicated,
        },
        shared={
            "endpoints": second,
            "host": '"shared.test"',
            "authorization_file": json.dumps(str(secret)),
        },
    )


class Pooled(Sidecar):
    """A sidecar whose pools are all in its file."""

    def __init__(self, folder, toml, **more):
        super().__init__(folder, "", toml=toml, **more)
        for pool in ("DEDICATED", "SHARED", "BEST_EFFORT"):
            del self.environ[f"TONGGUAN_POOLS_{pool}_ENDPOINTS"]
