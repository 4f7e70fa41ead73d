"""Where a prompt comes from: an argument, a file, stdin, or token ids; and what it becomes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson

from strata_cli.engine.engine import Engine
from strata_cli.engine.model.chat_prompt import encode_chat
from strata_cli.errors import ConfigError, InputError, path_text, quoted
from strata_cli.parsers import to_int

MOST_BYTES, BLOCK_BYTES = 1 << 30, 1 << 20  # far more than any context or list of suffixes takes
STDIN = "-"  # instead of PROMPT or of a file's name; a file named "-" is given with its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """What the command line says about the prompt.

    Attributes:
        text: the argument; "-" reads stdin.
        file: a text file; "-" reads stdin.
        tokens: ids written as "1,2,3".
        tokens_file: a JSON file with a list of ids; "-" reads stdin.
        raw: read the text as it is, without a chat template.
        chat: require the chat template.
        system: system message of the chat.
    """

    text: str | None
    file: Path | None
    tokens: str | None
    tokens_file: Path | None
    raw: bool
    chat: bool
    system: str | None

    @classmethod
    def taken_from(cls, flags: dict[str, Any]) -> Self:
        """Take the keyword arguments that prompt_options added to a command out of all."""
        return cls(text=flags.pop("prompt"), **{name: flags.pop(name) for name in _NAMES})

    def check(self) -> None:
        """Refuse flags that contradict each other.

        Raises:
            ConfigError: naming the flags.
        """
        sources = {
            "PROMPT": self.text,
            "--file": self.file,
            "--tokens": self.tokens,
            "--tokens-file": self.tokens_file,
        }
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise _conflict(given[0], given[1], "give the prompt once")
        if self.raw and self.chat:
            raise _conflict("--raw", "--chat", "choose one")
        plain = "--raw" if self.raw else given[0] if given and given[0].startswith("--tok") else ""
        for flag, is_given in (("--system", self.system is not None), ("--chat", self.chat)):
            if plain and is_given:
                raise _conflict(plain, flag, f"{flag} needs the chat template")

    def is_from_stdin(self) -> bool:
        """Whether the prompt is to be read from stdin."""
        if self.text is None and not any((self.file, self.tokens, self.tokens_file)):
            return True
        return STDIN in (self.text, str(self.file), str(self.tokens_file))

    def will_chat(self, prompt: str | list[int]) -> bool:
        """Whether encode() uses the chat template for this prompt, where the model has one."""
        return not self.raw and isinstance(prompt, str)

    def read(self) -> str | list[int]:
        """The prompt's text, or its token ids.

        Raises:
            InputError: it cannot be read, is empty, or is not what it should be.
        """
        if self.tokens is not None:
            return parse_ids(self.tokens, "--tokens")
        if self.tokens_file is not None:
            return _parse_ids_file(*self._read_bytes(self.tokens_file))
        if self.text is not None and not self.is_from_stdin():
            text = self.text
        else:
            text = _decode(*self._read_bytes(self.file))
        if not text:
            raise InputError("the prompt is empty", hint="give some text to read")
        return text

    def _read_bytes(self, file: Path | None) -> tuple[bytes, str]:
        """A file's bytes, or those of stdin, and what to call their origin."""
        if self.is_from_stdin() or file is None:
            is_explicit = any((self.text, self.file, self.tokens_file))
            return _read_stdin(is_explicit=is_explicit), "stdin"
        return _read_file(file), path_text(file)

    def encode(self, engine: Engine, prompt: str | list[int]) -> list[int]:
        """Token ids as the model will read them.

        Raises:
            InputError: --chat or --system with a model that has no chat template, or an id
                outside the vocabulary.
        """
        tokenizer, template = engine.tokenizer, engine.chat_template
        if isinstance(prompt, list):
            tokenizer.check_ids(prompt)
            return prompt
        if template is None and (self.chat or self.system is not None):
            flag = "--chat" if self.chat else "--system"
            raise InputError(
                f"{flag} needs a chat template, and {engine.model_name} has none",
                hint="use --raw to read the text as it is",
            )
        if self.raw or template is None:
            return tokenizer.encode(prompt, parse_special=True)
        messages = [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return encode_chat(template, tokenizer, messages, enable_thinking=False).ids


_NAMES = ("file", "tokens", "tokens_file", "raw", "chat", "system")


def _conflict(one: str, other: str, hint: str) -> ConfigError:
    return ConfigError(f"{one} and {other} cannot be used together", hint=hint)


def argument_text(text: str, name: str) -> str:
    """What the bytes of an argument say as UTF-8, whatever the locale made of them.

    Args:
        text: as Python has it: bytes that its locale could not decode are half surrogate pairs.
        name: the argument's, for the message.

    Raises:
        InputError: the bytes are not UTF-8.
    """
    if not any("\udc80" <= character <= "\udcff" for character in text):
        return text
    return _decode(os.fsencode(text), name)


def input_bytes(file: Path) -> tuple[bytes, str]:
    """A file's bytes, or those of stdin where it is "-", and what to call their origin.

    Raises:
        InputError: it cannot be read.
    """
    if str(file) == STDIN:
        return _read_stdin(is_explicit=True), "stdin"
    return _read_file(file), path_text(file)


def input_text(file: Path) -> str:
    """A file's text, or that of stdin where it is "-".

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    return _decode(*input_bytes(file))


def parse_ids(text: str, flag: str) -> list[int]:
    """Token ids written as "1,2,3", in plain ASCII digits.

    Args:
        text: what was given.
        flag: the option it was given to, for the message.

    Raises:
        InputError: a part is no such number; names the part.
    """
    ids = []
    for part in text.split(","):
        try:
            ids.append(to_int(part))
        except ValueError:
            where = "" if part == text else f" in {quoted(text)}"
            raise InputError(
                f"{flag} must be whole numbers with commas between, got {quoted(part)}{where}",
                hint=f"for example {flag} 9906,11,1917",
            ) from None
    return ids


def _parse_ids_file(data: bytes, origin: str) -> list[int]:
    hint = "--tokens-file wants a list such as [1, 2, 3]"
    try:
        ids = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{origin} is not valid JSON: {error}", hint=hint) from None
    # A bool is an int to Python, and no token id.
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise InputError(f"{origin} is not a list of whole numbers", hint=hint)
    if not ids:
        raise InputError(f"{origin} has no token ids", hint="give at least one")
    return ids


def _read_stdin(*, is_explicit: bool) -> bytes:
    hint = "give PROMPT or --file"
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("cannot read the prompt: stdin is closed", hint=hint)
    if not is_explicit and sys.stdin.isatty():
        raise InputError("no prompt", hint='strata read "your text", --file FILE, or pipe it in')
    try:
        return _all_of(sys.stdin.buffer, "stdin")
    except OSError as error:
        raise InputError(
            f"cannot read the prompt from stdin: {error.strerror}", hint=hint
        ) from error


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return _all_of(file, path_text(path))
    except OSError as error:
        raise InputError(
            f"cannot read {path_text(path)}: {error.strerror}", hint="check the path"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise InputError(f"cannot read {path_text(path)}: {error}", hint="check the path") from None


def _all_of(file: BinaryIO, origin: str) -> bytes:
    """What a file, a pipe or a device holds; not without end, as that of /dev/zero."""
    data = bytearray()
    while block := file.read(BLOCK_BYTES):
        data += block
        if len(data) > MOST_BYTES:
            raise InputError(
                f"{origin} has more than {MOST_BYTES >> 20} MiB of input", hint="check the path"
            )
    return bytes(data)


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with iconv -t utf-8",
        ) from None
