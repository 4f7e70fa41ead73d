"""The worker's end of the socket."""

from __future__ import annotations

import contextlib
import socket
import threading

from strata_cli.server.framing import LENGTH_BYTES, body_length, encode, worker_decoder
from strata_cli.server.protocol import FromWorker, ToWorker


class Channel:
    """Whole messages over a socket. One thread receives; any thread sends.

    Args:
        connection: the worker's end; closed by the server's end of life.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._file = connection.makefile("rb")
        self._decoder = worker_decoder()

    def send(self, message: FromWorker) -> None:
        """Send a message; one to a server that is gone is dropped: receive() tells of that.

        Raises:
            ProtocolError: it is too long.
        """
        data = encode(message)
        with self._lock:
            try:
                self._connection.sendall(data)
            except OSError:
                return

    def receive(self) -> ToWorker | None:
        """The next message; None: the server is gone. Blocks until then.

        Raises:
            ProtocolError: what came is no message.
        """
        try:
            prefix = self._file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                return None
            length = body_length(prefix)
            body = self._file.read(length)
        except OSError:
            return None
        return self._decoder.decode(body) if len(body) == length else None

    def close(self) -> None:
        """Safe to call twice; ends a receive() of another thread."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
