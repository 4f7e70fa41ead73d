"""The program of the child process that renders a chat template; ``chat_template`` starts it.

It knows nothing of this package, so that it starts in the time Python and jinja2 need. It talks in
lines of JSON: first a ``Setup``, answered when the template is compiled, then one line of variables
for each rendering. A rendering that takes too long or too much is ended by the operating system,
which also ends what no check inside the interpreter can: one long call into C.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_MESSAGE_CHARS = 2000


class Setup(NamedTuple):
    """The first line.

    Attributes:
        template: Jinja source.
        cpu_seconds: processor time for compiling, and again for each rendering.
        memory_bytes: address space of this process.
        max_chars: length of a rendered text.
    """

    template: str
    cpu_seconds: float
    memory_bytes: int
    max_chars: int


class RefusalError(Exception):
    """The template called raise_exception: it does not take these messages."""


class LimitError(Exception):
    """The rendered text is longer than allowed."""


_LIMITS: dict[type[Exception], str] = {
    LimitError: "",
    MemoryError: "it needs too much memory",
    RecursionError: "it is nested too deeply, or calls itself without end",
    OverflowError: "",  # a range or a number too large; the error says which
}


class Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks a reply for training; here just its body.

    Source: the tag that transformers' chat templates may use.
    """

    tags = {"generation"}  # noqa: RUF012 the base class declares it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which reaching for a forbidden attribute is an error, used or not."""

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Refuse the attribute; jinja2's own would print as nothing."""
        kind = type(obj).__name__
        raise SecurityError(f"access to attribute {attribute!r} of {kind!r} object is unsafe.")


def environment() -> Sandbox:
    """A sandbox with what chat templates expect to find, and nothing that changes its inputs.

    Source: transformers' apply_chat_template: blocks trimmed, loop controls, tojson that leaves
    characters as they are, raise_exception and strftime_now.
    """
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = strftime_now
    return sandbox


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter, without the HTML escapes of jinja2's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: object) -> NoReturn:
    """The ``raise_exception`` function."""
    raise RefusalError(str(message))


def strftime_now(form: str) -> str:
    """The ``strftime_now`` function: the local date or time."""
    return datetime.now().strftime(form)


def render(template: jinja2.Template, variables: Mapping[str, object], max_chars: int) -> str:
    """Render piece by piece, so that an endless text is stopped at its limit.

    Raises:
        LimitError: the text is longer than max_chars.
        Exception: whatever the template does wrong.
    """
    parts, num_chars = [], 0
    for part in template.generate(variables):
        num_chars += len(part)
        if num_chars > max_chars:
            raise LimitError(f"the text is longer than {max_chars} characters")
        parts.append(part)
    return "".join(parts)


def describe(error: Exception) -> dict[str, str]:
    """What went wrong, as the line that is sent back: ``kind`` and ``message``."""
    if isinstance(error, RefusalError):
        kind, message = "refused", str(error)
    elif isinstance(error, jinja2.TemplateSyntaxError):
        kind, message = "syntax", f"line {error.lineno}: {error.message}"
    elif isinstance(error, SecurityError):
        kind, message = "security", f"{_where(error.__traceback__)}{error}"
    elif isinstance(error, tuple(_LIMITS)):
        kind, message = "limit", f"{_where(error.__traceback__)}{_LIMITS[type(error)] or error}"
    else:
        kind, message = "failed", f"{_where(error.__traceback__)}{type(error).__name__}: {error}"
    return {"kind": kind, "message": message[:_MAX_MESSAGE_CHARS]}


def _where(traceback: TracebackType | None) -> str:
    """``line N: `` of the innermost frame that is template code."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


@contextlib.contextmanager
def time_limit(cpu_seconds: float) -> Iterator[None]:
    """End this process by SIGPROF when the block uses more processor time."""
    if sys.platform == "win32":  # no such timer: the parent's clock alone ends the process
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(memory_bytes: int) -> None:
    """Cap this process's address space. Linux only: other systems do not enforce such a cap."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(reply: Mapping[str, str]) -> None:
    """Send one line; half surrogate pairs pass through, for the parent to judge."""
    line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def rendering(
    template: jinja2.Template, variables: Mapping[str, object], setup: Setup
) -> dict[str, str]:
    """The answer to one line of variables: the text, or what went wrong."""
    with time_limit(setup.cpu_seconds):
        try:
            return {"kind": "text", "message": render(template, variables, setup.max_chars)}
        except Exception as error:  # noqa: BLE001 a template can raise anything; all is reported
            return describe(error)


def main() -> None:
    """Compile the template of the first line, render every further one, end with the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    lines = sys.stdin.buffer
    setup = Setup(**json.loads(lines.readline()))
    limit_memory(setup.memory_bytes)
    with time_limit(setup.cpu_seconds):
        try:
            template = environment().from_string(setup.template)
        except Exception as error:  # noqa: BLE001 compiling evaluates the template's constants
            answer(describe(error) | {"kind": "syntax"})
            return
    answer({"kind": "ready", "message": ""})
    for line in lines:
        answer(rendering(template, json.loads(line), setup))
