"""What most files here begin with: an upstream, key files, and a channel of theirs, one a file."""

import itertools

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import OK, Sidecar, Upstream, new_keys, ok
from tests.blackbox.queues import GRANTED, OFF


@pytest.fixture(scope="module")
def backend():
    """A server that does what a test tells it to; a test takes it as `upstream`."""
    with Upstream() as backend:
        yield backend


@pytest.fixture
def upstream(backend):
    """The backend as it answers when nothing is told, and without a script that failed."""
    yield backend.answering(ok)
    assert backend.problems == []


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder of key files: the sidecar's, a client's and the auditor's."""
    return new_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def channel(keys):
    """The client's side of the SM4 channel."""
    return Channel(keys / "client.json")


@pytest.fixture
def two():
    """Two servers, for pools that have the choice."""
    with Upstream() as first, Upstream() as second:
        yield first.answering(OK), second.answering(OK)
        assert first.problems == second.problems == []


@pytest.fixture
def started(tmp_path, upstream):
    """Start sidecars that end with the test; they ask no agent for limits."""
    made = []
    numbers = itertools.count()

    def start(toml=GRANTED, url=None, **variables):
        folder = tmp_path / f"sidecar{next(numbers)}"
        sidecar = Sidecar(folder, url or upstream.url, toml=toml, **{**OFF, **variables})
        made.append(sidecar.start())
        return sidecar

    yield start
    for sidecar in made:
        sidecar.kill()
        bad = [line for line in sidecar.log.splitlines() if " ERROR " in line or "Trace" in line]
        assert bad == [], sidecar.log
