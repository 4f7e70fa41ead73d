"""The server's side of the engine: a worker that is started when needed, and requests to it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

import msgspec

from strata_cli.config import StrataConfig
from strata_cli.errors import ConfigError, InputError, StrataError
from strata_cli.server.engine_errors import EngineGone, error_of
from strata_cli.server.protocol import (
    PROTOCOL_VERSION,
    Beat,
    Done,
    Failed,
    FromWorker,
    Generate,
    Hello,
    Loading,
    ModelFacts,
    Open,
    Progress,
    PromptLogprobs,
    ProtocolError,
    Refused,
    RequestEvent,
    Score,
    Scores,
    Shutdown,
    Started,
    Status,
    StatusRequest,
    Stop,
    Token,
)
from strata_cli.server.silence import Silence
from strata_cli.server.worker_link import WorkerLink

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["stopped", "starting", "ready", "dead"]
GenerateEvent: TypeAlias = Started | Progress | PromptLogprobs | Token | Done
Inbox: TypeAlias = asyncio.Queue[RequestEvent | StrataError]
R = TypeVar("R", Generate, Score)

_END_S = 20.0  # that a worker may take to end when it is told to


class EngineProcess:
    """The engine behind one worker process at a time. Use from one event loop.

    Any number of requests may run at once; the worker queues those that it has no room for. When a
    worker dies or falls silent, the requests it had fail at once and the next one starts another.

    Args:
        config: shapes the engine.
        silence_s: seconds without any progress after which a worker counts as stuck.
        command: starts another worker than ours; gets the number of its socket as last argument.
        flags: see Open.

    Attributes:
        facts: of the model, once it is loaded; kept when it is unloaded.
        state: "stopped" before the first start and after unload(); "dead" until the next start
            after a worker's end that nobody asked for.
        loading: the latest news of a start that is under way.
        starts: workers that have loaded a model.
    """

    def __init__(
        self,
        config: StrataConfig,
        *,
        silence_s: float = 300.0,
        command: Sequence[str] | None = None,
        flags: Iterable[str] = (),
    ) -> None:
        self.facts: ModelFacts | None = None
        self.state: State = "stopped"
        self.loading: Loading | None = None
        self.starts = 0
        self._config = config
        self._command = command
        self._flags = tuple(sorted(flags))
        self._silence = Silence(silence_s)
        self._link: WorkerLink | None = None
        self._starting: asyncio.Task[None] | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._asked: deque[asyncio.Future[Status]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._serial = 0
        self._is_busy = asyncio.Event()
        self._is_closed = False

    @property
    def running(self) -> int:
        """Requests that are not over."""
        return len(self._inboxes)

    async def start(self) -> None:
        """Start a worker and wait until its model is loaded; at once if one is ready.

        A start goes on when a caller that waits for it is cancelled.

        Raises:
            StrataError: the worker cannot start; what it says itself, in the class it says.
            EngineGone: it died, or fell silent, before it could say anything.
        """
        if self._is_closed:
            raise _closing()
        if self.state == "ready":
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="engine start")
            self._starting.add_done_callback(self._forget_start)
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # by unload() or close(), not the caller
                raise EngineGone("the engine's start was given up", hint="try again") from None
            raise

    async def load(self) -> None:
        """What start() does, for a request.

        Raises:
            EngineGone: a setting is wrong, which is not the request's fault.
            StrataError: see start().
        """
        try:
            await self.start()
        except (ConfigError, InputError) as error:
            raise EngineGone(
                f"the model cannot be loaded: {error.message}", hint=error.hint
            ) from error

    async def reserve(self, mib: int) -> None:
        """Load the model anew, with so much of the device's memory left to others.

        No answer depends on it. Where the model does not fit into the rest, the next request loads
        it as it was.

        Raises:
            InputError: there is no device memory, or a setting says how much of it is used.
            StrataError: see start().
        """
        await self.load()
        assert self.facts is not None
        if self.facts.device == "host" or self._config.vram_bytes:
            why = "vram_bytes says how much" if self._config.vram_bytes else "the host computes"
            raise InputError(
                f"vram_reserve_mib {mib} would change nothing: {why}",
                hint="leave it out; /v1/unload gives all memory back until the next request",
            )
        before = self._config
        self._config = replace(before, vram_reserve_mib=mib)  # also for who comes in between
        try:
            await self.unload()
            await self.load()
        except BaseException:
            self._config = before
            raise

    async def unload(self) -> None:
        """End the worker, which gives all memory back; the next request starts another.

        Running requests fail. Safe to call at any time.
        """
        await self._end(EngineGone("the model was unloaded", hint="send the request again"))

    async def close(self, grace_s: float = _END_S) -> None:
        """End the worker for good; requests from now on fail. Safe to call twice.

        Args:
            grace_s: that it may take to end by itself.
        """
        self._is_closed = True
        await self._end(_closing(), grace_s)

    async def generate(self, request: Generate) -> AsyncGenerator[GenerateEvent, None]:
        """What comes of a request, in order; Done is last.

        Closing the generator before that stops the request: close it whatever happens, with
        contextlib.aclosing.

        Raises:
            StrataError: the request failed; in the class that it failed with in the worker.
            EngineGone: the engine ended.
        """
        with self._submitted(request, await self._ready()) as inbox:
            while True:
                event = _raise_failure(await inbox.get())
                assert not isinstance(event, Scores)
                yield event
                if isinstance(event, Done):
                    return

    async def score(self, request: Score) -> Scores:
        """The answer to a request.

        Raises:
            StrataError: see generate().
        """
        with self._submitted(request, await self._ready()) as inbox:
            while True:
                event = _raise_failure(await inbox.get())
                if isinstance(event, Scores):
                    return event
                if isinstance(event, Done):  # somebody else stopped it
                    raise EngineGone("the request was cancelled", hint="send it again")

    async def status(self) -> Status | None:
        """What the worker does now; None: there is none.

        Raises:
            EngineGone: it ended before it answered.
        """
        if self._link is None or self.state != "ready":
            return None
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._link.send(StatusRequest())
        return await future

    async def _ready(self) -> WorkerLink:
        while self._link is None or self.state != "ready":
            await self.load()
        return self._link

    @contextmanager
    def _submitted(self, request: R, link: WorkerLink) -> Iterator[Inbox]:
        """Inside, a request is with the worker; left before it is over, it is stopped."""
        self._serial += 1
        name = f"{request.request_id or 'request'}#{self._serial}"  # no other has or had it
        inbox: Inbox = asyncio.Queue()
        if not self._inboxes:
            self._silence.sign()  # an idle engine has nothing to say
        link.send(msgspec.structs.replace(request, request_id=name))
        self._inboxes[name] = inbox
        self._is_busy.set()
        try:
            yield inbox
        finally:
            if self._forget(name):
                link.send(Stop(request_id=name))

    async def _start(self) -> None:
        if self._ending is not None:  # it may still hold the device's memory
            await self._ending
        self.state, self.loading = "starting", None
        link = None
        try:
            try:
                link = await WorkerLink.spawn(self._command)
            except OSError as error:
                raise EngineGone(f"cannot start the engine's process: {error}") from error
            link.send(Open(config=self._config, flags=self._flags))
            self.facts = await self._hello(link)
        except BaseException:
            self.state = "dead"
            if link is not None:
                await link.end()
            raise
        self._link, self.state, self.loading = link, "ready", None
        self.starts += 1
        self._spawn(self._receive(link))
        self._spawn(self._watch(link))
        where = self.facts.placement or f"on {self.facts.device}"
        logger.info("%s is ready %s", self.facts.name, where)

    async def _hello(self, link: WorkerLink) -> ModelFacts:
        """Wait until the model is loaded."""
        self._silence.sign()
        message = await self._news(link)
        while isinstance(message, Loading | Beat):
            if isinstance(message, Loading):
                self.loading = message
                self._silence.sign()
            else:
                self._silence.beat(message)
            message = await self._news(link)
        if isinstance(message, Refused):
            raise error_of(message.kind, message.message, message.hint)
        if not isinstance(message, Hello) or message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the engine's process began with {message!r:.200}, not with a Hello of version "
                f"{PROTOCOL_VERSION}",
                hint="server and worker must be of one version of strata",
            )
        return message.facts

    async def _news(self, link: WorkerLink) -> FromWorker:
        """The next message of a worker that starts; it may be silent as long as a busy one."""
        receiving = asyncio.ensure_future(link.receive())
        try:
            while not receiving.done():
                left_s = self._silence.left_s()
                if left_s <= 0:
                    raise _silent(self._silence.limit_s, "while it started")
                await asyncio.wait([receiving], timeout=left_s)
            message = receiving.result()
        finally:
            receiving.cancel()
        if message is None:
            raise _gone(await link.fate(), "before its model was loaded")
        return message

    async def _receive(self, link: WorkerLink) -> None:
        """Hand out what a worker says, until it is gone."""
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Refused):
                    self._lose(link, EngineGone(message.message, hint=message.hint))
                    return
                self._dispatch(message)
        except ProtocolError as error:
            self._lose(link, EngineGone(error.message, hint=error.hint))
            return
        if self._link is link:
            self._lose(link, _gone(await link.fate(), "while it was in use"))

    def _dispatch(self, message: FromWorker) -> None:
        if isinstance(message, Beat):
            self._silence.beat(message)
            return
        self._silence.sign()
        if isinstance(message, Status):
            while self._asked and not _answer(self._asked.popleft(), message):
                pass
        elif isinstance(message, Hello | Refused | Loading):
            raise ProtocolError(
                f"the engine said {type(message).__name__} out of turn",
                hint="server and worker must be of one version of strata",
            )
        else:
            self._deliver(message)

    def _deliver(self, event: RequestEvent) -> None:
        """To the request's inbox; what comes late of one that is over is dropped."""
        inbox = self._inboxes.get(event.request_id)
        if inbox is None:
            return
        inbox.put_nowait(event)
        if isinstance(event, Done | Scores | Failed):
            self._forget(event.request_id)

    def _forget(self, name: str) -> bool:
        """Whether a request was not over yet."""
        was_running = self._inboxes.pop(name, None) is not None
        if not self._inboxes:
            self._is_busy.clear()
        return was_running

    async def _watch(self, link: WorkerLink) -> None:
        """End a worker that has work and gets nothing done."""
        while self._link is link:
            await self._is_busy.wait()
            left_s = self._silence.left_s()
            if left_s <= 0:
                self._lose(link, _silent(self._silence.limit_s, "with work to do"))
                return
            await asyncio.sleep(left_s)

    def _lose(self, link: WorkerLink, error: EngineGone) -> None:
        """A worker is gone, or must go: fail its requests now, and end it."""
        if self._link is link:
            logger.error("%s", error.message)
            self._drop(link, error, "dead", 0.0)

    async def _end(self, error: EngineGone, grace_s: float = _END_S) -> None:
        """End the worker in good order, or the start that is under way."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._link is not None:
            self._link.send(Shutdown())
            self._drop(self._link, error, "stopped", grace_s)
        if self._ending is not None:
            await self._ending
        self.state = "stopped"

    def _drop(self, link: WorkerLink, error: EngineGone, state: State, grace_s: float) -> None:
        self._link, self.state = None, state
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
        self._inboxes.clear()
        self._is_busy.clear()
        while self._asked:
            future = self._asked.popleft()
            if not future.done():
                future.set_exception(error)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._ending = asyncio.create_task(link.end(grace_s), name="engine end")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the engine's worker cannot be heard any more", exc_info=task.exception())

    def _forget_start(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever waits gets it; if nobody does, it is no bug


def _answer(future: asyncio.Future[Status], status: Status) -> bool:
    """Whether somebody still waited."""
    if future.done():
        return False
    future.set_result(status)
    return True


def _raise_failure(event: RequestEvent | StrataError) -> GenerateEvent | Scores:
    if isinstance(event, StrataError):
        raise event
    if isinstance(event, Failed):
        raise error_of(event.kind, event.message, event.hint)
    return event


def _gone(fate: str, when: str) -> EngineGone:
    cause = "the server's log has its last words"
    if "SIGKILL" in fate:
        cause = "somebody did so, perhaps the kernel for want of memory: see dmesg"
    return EngineGone(
        f"the engine's process {fate} {when}", hint=f"{cause}; the next request starts it again"
    )


def _silent(limit_s: float, when: str) -> EngineGone:
    return EngineGone(
        f"the engine got nothing done for {limit_s:g} s {when} and was ended",
        hint="raise --engine-silence-s if it is only slow; the next request starts it again",
    )


def _closing() -> EngineGone:
    return EngineGone("the server is shutting down", hint="send the request again later")
