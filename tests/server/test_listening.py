"""The sockets of the server: what is refused, and what it says then."""

from __future__ import annotations

import socket

import pytest

from strata_cli.errors import ConfigError, StrataError
from strata_cli.server.listening import listen, url


def test_port_0_is_any_free_one() -> None:
    (opened,) = listen("127.0.0.1", 0)
    with opened:
        port = opened.getsockname()[1]
        assert url("127.0.0.1", [opened]) == f"http://127.0.0.1:{port}"
        assert url("0.0.0.0", [opened]) == f"http://127.0.0.1:{port}"
        assert url("::1", [opened]) == f"http://[::1]:{port}"
        socket.create_connection(opened.getsockname()).close()


def test_a_port_that_is_taken_is_one_message_with_another_port() -> None:
    (opened,) = listen("127.0.0.1", 0)
    with opened, pytest.raises(StrataError, match="is taken by another program") as caught:
        listen("127.0.0.1", opened.getsockname()[1])
    assert caught.value.exit_code == 1
    assert "--port" in caught.value.hint


@pytest.mark.parametrize("host", ["no.such.host.invalid", "8.8.8.8", "a" * 300, "\u200d"])
def test_a_host_that_is_not_ours_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0)
