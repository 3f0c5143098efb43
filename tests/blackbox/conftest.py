"""What most files here begin with: an upstream, key files, and a channel of theirs, one a file."""

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import Upstream, new_keys, ok


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
