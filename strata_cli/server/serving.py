"""A server from its settings to its end: sockets, engine, signals, the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from strata_cli.config import StrataConfig
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.server.access import AccessRules, check_bind
from strata_cli.server.app import create_app
from strata_cli.server.asking import SamplingDefaults
from strata_cli.server.connections import connections_of
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.idling import unload_when_idle
from strata_cli.server.limits import Limits
from strata_cli.server.listening import listen, url
from strata_cli.server.notify import Notifier
from strata_cli.server.queue import RequestQueue
from strata_cli.server.service import Service
from strata_cli.server.texts import ModelTexts

logger = logging.getLogger(__name__)

AHEAD = 16
"""Requests that the worker sees besides those it works on: it reads together what begins alike."""

GRACE_S = 5.0  # for requests that are being answered when the end is asked for
TELL_S = 1  # for those that are not over then to be told so
ENGINE_GRACE_S = 1.5  # for the engine to end
LOADING_NEWS_S = 1.0
MORE_TIME_S = 60.0  # that the service manager is asked for with each news
KEEP_ALIVE_S = 75  # of an idle connection; clients keep theirs for less
SPARE_FILES = 64  # descriptors that are no connections
MOST_CONNECTIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a server tells of itself, and to whom.

    Attributes:
        notifier: the service manager.
        say: one line for people.
        flags: settings that were given as flags.
    """

    notifier: Notifier
    say: Callable[[str], None]
    flags: frozenset[str] = frozenset()


def serve(config: StrataConfig, around: Surroundings) -> None:
    """Serve the model that the settings name until SIGINT or SIGTERM.

    Raises:
        StrataError: a setting is wrong, the port is taken, or the model cannot be loaded.
    """
    check_bind(config.host, has_key=config.api_key is not None, allow_no_key=config.allow_no_key)
    sockets = listen(config.host, config.port)
    with contextlib.ExitStack() as stack:
        for opened in sockets:
            stack.callback(opened.close)
        texts = ModelTexts.open(config.model or DEMO_MODEL_PATH)
        stack.callback(texts.close)
        if texts.template is not None:
            texts.template.start()
        asyncio.run(_serve(config, texts, sockets, around))


def service_of_config(config: StrataConfig, texts: ModelTexts, engine: EngineProcess) -> Service:
    """What the application serves by these settings."""
    return Service(
        engine=engine,
        texts=texts,
        queue=RequestQueue(config.parallel, config.max_queue, ahead=AHEAD),
        rules=AccessRules(
            listen=config.host,
            api_key=config.api_key,
            allowed_hosts=config.allowed_hosts,
            trusted_origins=config.trusted_origins,
            cors_origins=config.cors_origins,
        ),
        limits=Limits(
            max_body_bytes=config.max_body_bytes,
            max_messages=config.max_messages,
            max_prompts=config.max_prompts,
            body_timeout_s=config.body_timeout_s,
            request_timeout_s=config.request_timeout_s,
        ),
        defaults=SamplingDefaults(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=config.seed or None,
        ),
    )


class Server(uvicorn.Server):
    """uvicorn's server; signals and the moment it listens are ours.

    Args:
        config: uvicorn's.

    Attributes:
        listens: set when connections are taken.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def stop(self) -> None:
        """Take no more; the second time, wait for nothing."""
        self.force_exit = self.should_exit
        self.should_exit = True


def new_server(service: Service) -> Server:
    """A server for an application, not started."""
    _quiet_uvicorn()
    return Server(
        uvicorn.Config(
            create_app(service),
            http=connections_of(_most_connections()),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(GRACE_S) + TELL_S,
        )
    )


async def _serve(
    config: StrataConfig, texts: ModelTexts, sockets: list[socket.socket], around: Surroundings
) -> None:
    engine = EngineProcess(config, silence_s=config.engine_silence_s, flags=around.flags)
    service = service_of_config(config, texts, engine)
    server = new_server(service)
    address = url(config.host, sockets)

    loop = asyncio.get_running_loop()

    def stop() -> None:
        around.notifier.stopping("finishing requests")
        server.stop()
        loop.call_later(GRACE_S, closing.set)

    closing = asyncio.Event()
    ending = asyncio.create_task(_close_when(closing, engine))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    beats = asyncio.create_task(around.notifier.beat())
    idling = asyncio.create_task(unload_when_idle(engine, service.queue, config.idle_unload_s))
    serving = asyncio.create_task(server.serve(sockets))
    try:
        await server.listens.wait()
        if not config.lazy_load:
            await _load(engine, serving, around)
            if engine.facts is not None:
                around.say(f"{engine.facts.name} {engine.facts.placement}")
        if not serving.done():
            around.notifier.ready(f"answering on {address}")
            around.say(f"{texts.name} answers on {address}/v1; Ctrl-C ends it")
        await serving
    finally:
        server.stop()
        await asyncio.wait([serving])
        beats.cancel()
        idling.cancel()
        closing.set()
        await ending
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _close_when(closing: asyncio.Event, engine: EngineProcess) -> None:
    """End the engine; what it still had to do fails, with an error that says why."""
    await closing.wait()
    await engine.close(ENGINE_GRACE_S)


async def _load(engine: EngineProcess, serving: asyncio.Task[None], around: Surroundings) -> None:
    """Load the model, unless the end is asked for first.

    Raises:
        StrataError: it cannot be loaded.
    """
    loading = asyncio.create_task(engine.start())
    said = ""
    while not loading.done() and not serving.done():
        await asyncio.wait(
            [loading, serving],
            timeout=LOADING_NEWS_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        news = engine.loading
        around.notifier.extend_timeout(MORE_TIME_S)
        if news is not None and news.phase == "notice" and news.text != said:
            said = news.text
            around.say(said)
        elif news is not None and news.total:
            around.notifier.status(f"loading {news.phase}: {news.done / news.total:.0%}")
    if loading.done():
        await loading
    else:
        loading.cancel()


def _most_connections() -> int:
    """As many as there are descriptors for; the limit is raised as far as it may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        current, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if current != resource.RLIM_INFINITY and current < soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    current, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if current == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, current - SPARE_FILES))


def _quiet_uvicorn() -> None:
    """Its errors go where ours go; what else it says, we say ourselves."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers = logging.getLogger("strata_cli").handlers
    theirs.setLevel(logging.ERROR)
    theirs.propagate = False
