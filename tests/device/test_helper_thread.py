"""Helper threads: what an interrupt of another thread does not change."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from strata_cli.engine.device import helper_thread
from strata_cli.engine.device.helper_thread import HelperThread
from tests.device.interrupting import interrupted_at

PATIENCE_S = 30.0
FILES = (helper_thread.__file__, threading.__file__)


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    """Set at the end in any case, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def test_a_thread_lives_from_its_start_to_its_end(may_end: threading.Event) -> None:
    thread = HelperThread(may_end.wait, "strata-test")
    assert not thread.is_alive()
    thread.start()
    thread.join(0.001)
    assert thread.is_alive()
    assert thread.daemon
    may_end.set()
    thread.join()
    thread.join()
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_one_that_fails_has_ended(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", lambda _told: None)
    thread = HelperThread(fail, "strata-test")
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_one_that_could_not_be_started_does_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = HelperThread(list, "strata-test")
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        with pytest.raises(RuntimeError):
            thread.start()
    assert not thread.is_alive()
    thread.join()


def test_ctrl_c_twice_in_a_start_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes as the lock is given back whose taking was interrupted by the first."""

    def wait(*_: object) -> None:
        threading.Lock().release()

    begun = threading.Event()
    thread = HelperThread(begun.set, "strata-test")
    with monkeypatch.context() as patch:
        patch.setattr(vars(thread)["_started"], "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
    assert begun.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


@pytest.mark.parametrize("asks", [HelperThread.is_alive, partial(HelperThread.join, timeout=0.001)])
def test_ctrl_c_in_whoever_asks_leaves_it_alive(
    asks: Callable[[HelperThread], object], may_end: threading.Event
) -> None:
    """Anywhere. With threading.Thread itself it would count as ended behind some places."""
    thread = HelperThread(may_end.wait, "strata-test")
    thread.start()
    for place in itertools.count():
        try:
            with interrupted_at(place, FILES):
                asks(thread)
        except KeyboardInterrupt:
            assert thread.is_alive()
        else:
            break
    assert place > 0
    may_end.set()
    thread.join()
    assert not thread.is_alive()
