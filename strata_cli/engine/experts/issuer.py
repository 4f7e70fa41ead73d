"""Who takes the walk's turns: a thread of its own, or the consumer's between its launches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Protocol

from strata_cli.engine.device.base import Event
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.engine.experts.waiting import LONGEST_WAIT_S, Bell, Pace, Watchdog, poll
from strata_cli.engine.experts.walk import ANY_NUMBER, Turn, Walk
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import StallError, StateError

JOIN_S = 10.0  # a thread inside a device call must come back before that


class Issuer(Protocol):
    """Drives a walk on behalf of the consumer, from whose thread every method is called."""

    @property
    def walk(self) -> Walk:
        """What it drives."""
        ...

    @property
    def num_waits(self) -> int:
        """How often the consumer had to wait for an entry to be issued."""
        ...

    @property
    def waited_s(self) -> float:
        """For how long, in seconds."""
        ...

    @property
    def turns(self) -> Counter[Turn]:
        """Turns so far, by what ended them."""
        ...

    def start(self) -> None:
        """Begins with the first copies."""
        ...

    def nudge(self) -> None:
        """The walk may be able to go on: routing was published or entries were given back."""
        ...

    def require(self, k: int) -> None:
        """Blocks until entry k is issued.

        Raises:
            StrataError: the link failed.
            StallError: nothing moved for the watchdog's time.
            StateError: the walk was stopped.
        """
        ...

    def await_event(self, event: Event, what: str) -> None:
        """Blocks until the device has reached the event, the walk going on meanwhile.

        Raises:
            StrataError: the link or the event's stream failed.
            StallError: nothing moved for the watchdog's time.
            StateError: the walk was stopped.
        """
        ...

    def finish(self) -> None:
        """Blocks until the walk is done. Raises what require raises."""
        ...

    def stop(self) -> None:
        """Ends the walk at its next turn, and with it the waits. Any thread may call it."""
        ...

    def close(self) -> None:
        """Stops the walk and waits for its last turn. Safe to call twice.

        Raises:
            StallError: the issuer's thread does not come back from the device.
        """
        ...


class _WatchedIssuer(ABC):
    """How a consumer waits for any issuer: watched, counted and traced.

    Args:
        walk: whose turns to take.
        watchdog_s: seconds without progress that end a wait, 0 = none do.
        trace: told of turns and waits.
    """

    def __init__(self, walk: Walk, watchdog_s: float, trace: Trace = NO_TRACE) -> None:
        self.walk = walk
        self.num_waits = 0
        self.waited_s = 0.0
        self.turns: Counter[Turn] = Counter()
        self._watchdog_s = watchdog_s
        self._trace = trace

    def require(self, k: int) -> None:
        """See Issuer."""
        if self.walk.issued > k:
            return
        start, start_ns = time.perf_counter(), self._trace.now_ns()
        self._await_entry(k)
        self.num_waits += 1
        self.waited_s += time.perf_counter() - start
        self._trace.since("issue.wait", start_ns, entry=k)

    def await_event(self, event: Event, what: str) -> None:
        """See Issuer."""
        start_ns = self._trace.now_ns()

        def is_reached() -> bool:
            self._go_on()
            return event.query()

        poll(is_reached, Watchdog(self.walk, self._watchdog_s), what)
        self._trace.since("device.wait", start_ns, what=what)

    def finish(self) -> None:
        """See Issuer."""
        if self.walk.entries.count:
            self.require(self.walk.entries.count - 1)

    def stop(self) -> None:
        """See Issuer."""
        self.walk.stop()

    @abstractmethod
    def _await_entry(self, k: int) -> None:
        """Blocks until entry k, which is not yet, is issued. Raises what require raises."""

    @abstractmethod
    def _go_on(self) -> None:
        """What is left to do for the walk while the device is waited for.

        Raises:
            StrataError: the link failed.
            StateError: the walk was stopped.
        """


class ThreadIssuer(_WatchedIssuer):
    """A thread that sleeps unless the walk can go on.

    ``turns``, ``_failure`` and then ``_has_ended`` are written by the issuer's thread, everything
    else by the consumer's; ``_wanted`` is the entry that it waits for.
    """

    def __init__(self, walk: Walk, watchdog_s: float, trace: Trace = NO_TRACE) -> None:
        super().__init__(walk, watchdog_s, trace)
        self._failure: BaseException | None = None
        self._has_ended = False
        self._wanted = ANY_NUMBER
        self._work = Bell()  # wakes the issuer's thread
        self._issued = Bell()  # wakes the consumer's
        self._thread = HelperThread(self._serve, "strata-issuer")

    def start(self) -> None:
        """See Issuer."""
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C: the thread may run all the same, and copy into slots
            self.close()
            raise

    def nudge(self) -> None:
        """See Issuer."""
        self._work.ring()

    def finish(self) -> None:
        """See Issuer."""
        super().finish()
        self._join()
        self._check_failure()

    def stop(self) -> None:
        """See Issuer."""
        super().stop()
        self._work.ring()

    def close(self) -> None:
        """See Issuer."""
        self.stop()
        if self._thread.ident is not None:
            self._join()

    def _await_entry(self, k: int) -> None:
        watchdog = Watchdog(self.walk, self._watchdog_s)
        longest_s = min(self._watchdog_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
        self._wanted = k
        while self.walk.issued <= k:
            self._check_going_on()
            self._issued.wait(longest_s)
            watchdog.check(f"entry {k}")
        self._wanted = ANY_NUMBER

    def _go_on(self) -> None:
        self._check_failure()
        if self.walk.is_stopped:
            raise _stopped(self.walk)

    def _join(self) -> None:
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            raise StallError(
                f"the issuer did not end within {JOIN_S:.0f} s; {self.walk.report()}",
                hint="the device hangs: end the process",
            )

    def _serve(self) -> None:
        pace = Pace()
        try:
            while (turn := _turn(self.walk, self._trace)) not in (Turn.DONE, Turn.STOPPED):
                self.turns[turn] += 1
                if self.walk.issued > self._wanted:
                    self._issued.ring()
                start_ns = self._trace.now_ns()
                if turn in (Turn.LINK_FULL, Turn.UNLIKELY, Turn.UNSTAGED):
                    now = time.perf_counter()
                    self._work.wait(pace.nap_s(self.walk.landed, self.walk.spare, now))
                else:
                    pace.interrupt()
                    self._work.wait(-1)
                self._trace.since("issuer.wait", start_ns, reason=turn.name.lower())
        except BaseException as error:  # noqa: BLE001  carried to the consumer, which raises it
            self._failure = error
        self._has_ended = True
        self._issued.ring()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_going_on(self) -> None:
        has_ended = self._has_ended  # first: whatever it issued before is then visible
        self._check_failure()
        if has_ended and self.walk.is_stopped:
            raise _stopped(self.walk)


class InlineIssuer(_WatchedIssuer):
    """The consumer's own thread takes a turn whenever it comes by."""

    def start(self) -> None:
        """See Issuer."""
        self._turn()

    def nudge(self) -> None:
        """See Issuer."""
        self._turn()

    def close(self) -> None:
        """See Issuer."""
        self.stop()

    def _await_entry(self, k: int) -> None:
        def is_issued() -> bool:
            self._go_on()
            return self.walk.issued > k

        poll(is_issued, Watchdog(self.walk, self._watchdog_s), f"entry {k}")

    def _go_on(self) -> None:
        if self._turn() is Turn.STOPPED:
            raise _stopped(self.walk)

    def _turn(self) -> Turn:
        turn = _turn(self.walk, self._trace)
        self.turns[turn] += 1
        return turn


def _turn(walk: Walk, trace: Trace) -> Turn:
    """Take a turn, and tell the trace if it got anywhere."""
    if not trace.is_on:
        return walk.turn()
    first, copied, skipped = walk.issued, walk.copied, walk.skipped
    start_ns = trace.now_ns()
    turn = walk.turn()
    if walk.issued > first:
        trace.since(
            "issuer.turn",
            start_ns,
            first=first,
            last=walk.issued - 1,
            copied=walk.copied - copied,
            skipped=walk.skipped - skipped,
            ended_by=turn.name.lower(),
        )
    return turn


def _stopped(walk: Walk) -> StateError:
    return StateError(f"the stream of experts was stopped; {walk.report()}")
