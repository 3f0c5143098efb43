import asyncio
import os
import socket

import pytest

from agent.listen import ListenError, open_tcp, open_unix, peer_uid


def test_accepted_connections_send_small_answers_at_once():
    # Head and body are two writes: with Nagle's algorithm each answer would wait 40 ms.
    with open_tcp("127.0.0.1:0", "agent.listen", 4) as listener:

        async def main():
            made = asyncio.get_running_loop().create_future()

            class Protocol(asyncio.Protocol):
                def connection_made(self, transport):
                    made.set_result(transport)

            loop = asyncio.get_running_loop()
            server = await loop.create_server(Protocol, sock=listener)
            with socket.create_connection(listener.getsockname()):
                transport = await made
                sock = transport.get_extra_info("socket")
                delayed = not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                transport.abort()
            server.close()
            return delayed

        assert asyncio.run(main()) is False


def test_a_taken_address_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"^agent.admin: {address} is in use$"):
            open_tcp(address, "agent.admin", 4)


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ListenError, match=r"^agent\.listen: cannot listen on 192\.0\.2\.1:80"):
        open_tcp("192.0.2.1:80", "agent.listen", 4)


def test_a_dead_socket_is_replaced_and_others_may_not_connect(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with open_unix(path, "agent.socket", 4):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o660
        with pytest.raises(ListenError, match=r"^agent\.socket: .* is in use$"):
            open_unix(path, "agent.socket", 4)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_left_alone(tmp_path, kind):
    path = tmp_path / "precious"
    path.mkdir() if kind == "folder" else path.write_text("mine")
    with pytest.raises(ListenError, match="is in use"):
        open_unix(str(path), "agent.socket", 4)
    assert path.is_dir() if kind == "folder" else path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ListenError, match="No such file"):
        open_unix(str(tmp_path / "none" / "s"), "agent.socket", 4)


class Transport:
    def __init__(self, sock):
        self.sock = sock

    def get_extra_info(self, _name):
        return self.sock


def test_only_a_unix_peer_has_a_uid():
    left, right = socket.socketpair()
    with left, right:
        assert peer_uid(Transport(left)) == os.getuid()
    with socket.socket() as tcp:
        assert peer_uid(Transport(tcp)) is None
    assert peer_uid(Transport(None)) is None
    assert peer_uid(None) is None
