"""A worker without an engine, which fails in the way that its first argument names."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import msgspec

from strata_cli.server.protocol import (
    Beat,
    Done,
    Failed,
    Generate,
    Hello,
    ModelFacts,
    Open,
    Refused,
    Shutdown,
    Started,
    Stop,
    Timings,
    Token,
)
from strata_cli.server.worker_channel import Channel

FACTS = ModelFacts(
    name="fake",
    vocab_size=10,
    context_tokens=100,
    model_context_tokens=100,
    eos_ids=(0,),
    device="host",
    chunk_tokens=8,
    parallel=4,
)


REFUSALS = {
    "refuses": Refused(
        kind="out_of_memory",
        message="layer 3 does not fit on cuda:0: need 9 GiB, free 1 GiB",
        hint="buy more",
    ),
    "is set wrong": Refused(
        kind="setting", message="--max-context 9 is too much", hint="at most 8"
    ),
}


class FakeWorker:
    """Answers a request with one token, the first of its prompt, unless the mode says otherwise."""

    def __init__(self, mode: str, channel: Channel) -> None:
        self.mode = mode
        self.channel = channel
        self.running: list[str] = []

    def serve(self) -> None:
        opening = self.channel.receive()
        assert isinstance(opening, Open)
        reserve_mib = opening.config.vram_reserve_mib
        if self.mode in REFUSALS:
            self.channel.send(REFUSALS[self.mode])
            return
        if self.mode == "dies first":
            os._exit(3)
        if self.mode == "says nothing":
            self.channel.receive()
            return
        version = 999 if self.mode == "is another version" else 1
        facts = FACTS
        if self.mode == "is on a GPU":
            facts = msgspec.structs.replace(
                FACTS, device="cuda:0", placement=f"{reserve_mib} MiB are left"
            )
            if reserve_mib > 9000:
                self.channel.send(Refused(kind="out_of_memory", message="too little", hint="less"))
                return
        self.channel.send(Hello(version=version, facts=facts))
        while (message := self.channel.receive()) is not None:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Generate):
                self.generate(message)
            if isinstance(message, Stop):
                self.stop(message.request_id)

    def generate(self, request: Generate) -> None:
        name, mode = request.request_id, self.mode
        self.channel.send(Started(request_id=name, reused_tokens=0))
        if mode == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif mode == "babbles":
            self.channel._connection.sendall(b"\0\0\0\1?")
        elif mode == "gives up":
            self.channel.send(
                Refused(kind="device", message="cuda:0 fell off the bus", hint="pray")
            )
        elif mode == "hangs":
            threading.Thread(target=self.beat, daemon=True).start()
        elif mode == "fails":
            self.channel.send(Failed(request_id=name, kind="input", message="bad", hint="good"))
        elif mode == "waits for stop":
            self.running.append(name)
        else:
            self.finish(name, request.prompt[0])

    def stop(self, name: str) -> None:
        """Tells of it, in a token of every later request, and of what comes too late."""
        if name in self.running:
            self.running.remove(name)
            self.mode = "stopped"
        self.finish(name, 7)

    def finish(self, name: str, token_id: int) -> None:
        token_id = 99 if self.mode == "stopped" else token_id
        self.channel.send(Token(request_id=name, index=0, token_id=token_id))
        self.channel.send(
            Done(
                request_id=name,
                finish_reason="length",
                prompt_tokens=1,
                reused_tokens=0,
                read_tokens=1,
                generated_tokens=1,
                canonical=False,
                timings=Timings(wait_ms=0, prompt_ms=0, generate_ms=0),
            )
        )

    def beat(self) -> None:
        """Beats, but never any progress."""
        while True:
            self.channel.send(Beat(progress=1, pending_tokens=0))
            time.sleep(0.01)


def main() -> None:
    FakeWorker(sys.argv[1], Channel(socket.socket(fileno=int(sys.argv[2])))).serve()
