"""One life of the engine's worker, as the server holds it: a process and a socket."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Self

from strata_cli.server.framing import LENGTH_BYTES, body_length, encode, server_decoder
from strata_cli.server.protocol import FromWorker, ToWorker

# -I keeps the working folder out of the worker's search path; it gets this process's own instead.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:-1]; del sys.argv[1:-1];"
    " from strata_cli.server.worker import main; sys.exit(main())"
)
_EXIT_S = 1.0  # a process whose socket has ended is about to end itself


class WorkerLink:
    """A worker process and the way to it. Use from one event loop; end() frees everything.

    Args:
        process: the worker.
        reader, writer: the server's end of the socket; the worker ends when it is closed.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder = server_decoder()

    @classmethod
    async def spawn(cls, command: Sequence[str] | None = None) -> Self:
        """Start a worker.

        Args:
            command: of a worker that is not ours; the number of its end of the socket is added.

        Raises:
            OSError: the process cannot be started.
        """
        command = command or [sys.executable, "-I", "-c", _BOOT, *sys.path]
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # given up just now: the process must not stay
            ours.close()
            process.kill()
            await process.wait()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Of the worker."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Queue a message. One to a worker that is gone is dropped: receive() tells of that.

        Raises:
            ProtocolError: it is too long.
        """
        data = encode(message)
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> FromWorker | None:
        """The next message; None: the worker is gone.

        Raises:
            ProtocolError: what came is no message.
        """
        try:
            length = body_length(await self._reader.readexactly(LENGTH_BYTES))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within the time."""
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def fate(self) -> str:
        """How the process ended, in words; to be asked when its socket has."""
        await self.wait(_EXIT_S)
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    async def end(self, grace_s: float = 0.0) -> None:
        """End the worker, by force if it takes longer than the grace. Safe to call twice."""
        try:
            if not grace_s or not await self.wait(grace_s):
                if self._process.returncode is None:
                    self._process.kill()
                await self._process.wait()
        finally:
            self._writer.close()
