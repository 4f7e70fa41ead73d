"""The engine's process: `python -m strata_cli.server.worker FD`, FD being its end of a socket.

Three threads: the main one computes, one listens to the server, one beats. The process ends when
the server says so or closes the socket, however the server itself came to its end.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple

from strata_cli.errors import ConfigError, StrataError
from strata_cli.server.engine_errors import kind_of, out_of_host_memory
from strata_cli.server.protocol import (
    PROTOCOL_VERSION,
    Beat,
    Generate,
    Hello,
    Loading,
    ModelFacts,
    Open,
    ProtocolError,
    Refused,
    Score,
    StatusRequest,
    Stop,
    ToWorker,
)
from strata_cli.server.worker_channel import Channel

if TYPE_CHECKING:
    from strata_cli.engine.engine import Engine
    from strata_cli.engine.forward.places import Places
    from strata_cli.server.constraint import Constraint, MadeConstraint, MakeConstraint
    from strata_cli.server.scheduler import Scheduler

logger = logging.getLogger(__name__)

BEAT_S = 1.0
WARM_UP_TOKENS = 40  # more than kernels of few rows take
END_S = 5.0  # a pass that runs when the end is wanted may take so long


def main() -> int:
    """Serve one server; the process's exit code."""
    # The server says when to end: a Ctrl-C or a service manager's signal is meant for it, and it
    # may still want answers from here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # the server knows our end by the socket's
    channel = Channel(connection)
    try:
        return _serve(channel)
    finally:
        channel.close()


def _warm_up(engine: Engine) -> None:
    """Read a little, so that no request waits for what is loaded and compiled only once."""
    from strata_cli.engine.reading import next_token_logprobs

    tokens = [0] * min(WARM_UP_TOKENS, engine.context_tokens - 1)
    with engine.sequence() as sequence, engine.canonical():
        sequence.prefill(tokens)
        next_token_logprobs(sequence.step(0), 1, (0,))


def _serve(channel: Channel) -> int:
    opening = channel.receive()
    if opening is None:
        return 1
    try:
        if not isinstance(opening, Open) or opening.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the server began with {opening!r:.200}, not with an Open of version "
                f"{PROTOCOL_VERSION}",
                hint="server and worker must be of one version of strata",
            )
        _log(opening.config.log_level)
        EngineWorker(channel, opening).run()
    except StrataError as error:
        return _refuse(channel, error)
    except MemoryError:
        return _refuse(channel, out_of_host_memory("outside of a request"))
    except ModuleNotFoundError as error:
        missing = ConfigError(
            f"strata serve needs the package {error.name}, which is not installed",
            hint="pip install 'strata-cli[serve]'",
        )
        return _refuse(channel, missing)
    return 0


def _refuse(channel: Channel, error: StrataError) -> int:
    channel.send(Refused(kind=kind_of(error), message=error.message, hint=error.hint))
    return error.exit_code


def _log(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("strata: engine: %(levelname)s: %(message)s"))
    logger = logging.getLogger("strata_cli")
    logger.addHandler(handler)
    logger.setLevel(level.upper())


class LineFormatter(logging.Formatter):
    """Log lines in the form of our error lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        """The line, with its level in small letters."""
        record.levelname = record.levelname.lower()
        return super().formatMessage(record)


class Arrived(NamedTuple):
    """A request, and the constraint of its answer; None: it has none."""

    request: Generate | Score
    made: MadeConstraint | None = None


class EngineWorker:
    """Runs the engine for one server.

    Args:
        channel: the way to the server.
        opening: its first message.
    """

    def __init__(self, channel: Channel, opening: Open) -> None:
        self._channel = channel
        self._config = opening.config
        self._flags = opening.flags
        self._placement = ""
        self._inbox: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()
        self._makers = ThreadPoolExecutor(1, "grammars")
        self._make: MakeConstraint | None = None  # with the scheduler
        self._scheduler: Scheduler | None = None  # once the model is loaded
        self._loaded = 0  # grows while it is loaded; the main thread writes it

    def run(self) -> None:
        """Load the model, and serve until the server wants no more.

        Raises:
            StrataError: the model cannot be loaded, or the device cannot be used any more.
        """
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        # Not at the top of the file: who listens and beats must be there before what takes long.
        from strata_cli.engine.engine import Engine
        from strata_cli.engine.from_settings import engine_options
        from strata_cli.engine.prompt_cache import CacheRules
        from strata_cli.engine.trace import open_trace
        from strata_cli.server.grammar import Grammars
        from strata_cli.server.scheduler import Scheduler

        config = self._config
        with (
            open_trace(config.trace) as trace,
            Engine.open(
                engine_options(config, num_sequences=config.parallel, trace=trace),
                self._loading("weights"),
                notice=lambda text: self._channel.send(Loading(phase="notice", text=text)),
                compiling=self._loading("kernels"),
                planned=self._planned,
            ) as engine,
        ):
            _warm_up(engine)
            with Scheduler(
                engine,
                self._channel.send,
                parallel=config.parallel,
                rules=CacheRules.of(config),
            ) as scheduler:
                self._make = Grammars(engine.tokenizer).make
                self._scheduler = scheduler
                self._channel.send(Hello(facts=_facts(engine, config.parallel, self._placement)))
                self._work(scheduler)

    def _planned(self, places: Places) -> None:
        from strata_cli.engine.effects import check_effects

        check_effects(self._config, places, self._flags)
        self._placement = places.describe()

    def _loading(self, phase: Literal["weights", "kernels"]) -> Callable[[int, int], None]:
        def tell(done: int, total: int) -> None:
            self._loaded += 1
            self._channel.send(Loading(phase=phase, done=done, total=total))

        return tell

    def _work(self, scheduler: Scheduler) -> None:
        while True:
            try:
                arrived = self._inbox.get(block=not scheduler.is_busy)
            except queue.Empty:
                scheduler.turn()
                continue
            if arrived is None:
                return
            scheduler.submit(arrived.request, arrived.made)

    def _listen(self) -> None:
        """Until the server wants no more or is gone; whatever happens here, the process ends."""
        try:
            while self._hear(self._channel.receive()):
                pass
        except ProtocolError:
            logger.exception("the server cannot be understood")
        finally:
            self._end()

    def _hear(self, message: ToWorker | None) -> bool:
        """Answer stops and questions at once, hand requests to the main thread; False: the end."""
        scheduler = self._scheduler
        if scheduler is None:
            return False
        if isinstance(message, Generate | Score):
            scheduler.expect(message.request_id)
            self._take(message, scheduler)
        elif isinstance(message, Stop):
            scheduler.cancel(message.request_id)
        elif isinstance(message, StatusRequest):
            self._channel.send(scheduler.status())
        else:
            return False
        return True

    def _take(self, request: Generate | Score, scheduler: Scheduler) -> None:
        """To the main thread, once its constraint is made: others are worked for meanwhile."""
        if not isinstance(request, Generate) or request.constraint is None:
            self._inbox.put(Arrived(request))
            return
        name, text, make = request.request_id, request.constraint, self._make
        assert make is not None

        def made() -> Constraint | None:
            return None if scheduler.is_cancelled(name) else make(text)

        future = self._makers.submit(made)
        future.add_done_callback(lambda made: self._inbox.put(Arrived(request, made)))

    def _end(self) -> None:
        self._inbox.put(None)
        if self._scheduler is not None:
            self._scheduler.cancel_all()
            time.sleep(END_S)
        os._exit(1)  # the main thread is still loading, or stuck

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            scheduler = self._scheduler
            if scheduler is None:
                self._channel.send(Beat(progress=self._loaded, pending_tokens=0))
            elif scheduler.is_busy:
                self._channel.send(scheduler.beat())


def _facts(engine: Engine, parallel: int, placement: str) -> ModelFacts:
    return ModelFacts(
        name=engine.model_name,
        vocab_size=engine.spec.vocab_size,
        context_tokens=engine.context_tokens,
        model_context_tokens=engine.spec.context_tokens,
        eos_ids=tuple(sorted(engine.tokenizer.eos_ids)),
        device=engine.device_name,
        chunk_tokens=engine.chunk_tokens,
        parallel=parallel,
        placement=placement,
    )


if __name__ == "__main__":
    sys.exit(main())
