"""Renders the chat template of a model file, which is a program from a stranger.

jinja2's sandbox keeps a template away from Python, but not from endless loops, or from one
expression that fills the memory (``'a' * 10**10``, ``s|center(10**10)``). So a child process
renders it, see ``template_process``; it stays for the next rendering.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from strata_cli.engine.model.metadata import Value
from strata_cli.engine.model.template_process import RenderLimits, TemplateProcess
from strata_cli.errors import InputError, ModelError

Message = Mapping[str, object]
"""One turn: ``role``, ``content`` and whatever else the template reads; JSON values only."""

_KEY = "tokenizer.chat_template"
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_RAW_HINT = "read the prompt without the template (raw), or use another build of the model"


class ChatTemplate:
    """One model's chat template. Safe to share between threads; renderings take turns.

    The child process starts with ``start`` or the first rendering, is replaced after a rendering
    that had to be ended, and goes with ``close``, with the object, or with this process.

    Attributes:
        source: the Jinja source.
        limits: what one rendering may use.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """Take a template without running it.

        Args:
            source: Jinja source.
            special_tokens: variables such as ``bos_token``, given to every rendering.
            limits: what one rendering may use.

        Raises:
            ModelError: the source is longer than limits allow.
        """
        self.source = source
        self.limits = limits or RenderLimits()
        self._special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._worker: TemplateProcess | None = None
        if len(source) > self.limits.max_template_chars:
            raise ModelError(
                f"the chat template is {len(source)} characters long; "
                f"at most {self.limits.max_template_chars} are read",
                hint=_RAW_HINT,
            )

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Value], *, limits: RenderLimits | None = None
    ) -> Self | None:
        """The template of a model file; None when it has none.

        Raises:
            ModelError: the template is no string, or too long.
        """
        source = metadata.get(_KEY)
        if source is None or source == "":
            return None
        if not isinstance(source, str):
            raise ModelError(
                f"{_KEY} must be a string, not {type(source).__name__}", hint=_RAW_HINT
            )
        return cls(source, special_tokens=_special_tokens(metadata, source), limits=limits)

    def start(self) -> None:
        """Start the child process without waiting, so that the first rendering need not.

        Safe to call twice.
        """
        with self._lock:
            self._running()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The text of a conversation as the model was trained to read it.

        Args:
            messages: the turns, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of the functions that may be called.
            variables: what else the template asks for, such as ``enable_thinking=False``.

        Returns:
            Text with special tokens written out. Text from users is in it as it was: see
            ``chat_prompt.encode_chat`` for ids in which it cannot pass for the template's.

        Raises:
            InputError: the template refuses these messages, or fails on them.
            ModelError: the template is broken, forbidden, or ran into a limit.
        """
        request = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"the messages are not plain JSON values: {error}",
                hint="use texts, numbers, booleans, lists and objects only",
            ) from error
        with self._lock:
            return _text_or_error(self._exchange(line))

    def close(self) -> None:
        """End the child process. Safe to call twice; a later rendering starts another."""
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _exchange(self, line: str) -> Mapping[str, str]:
        worker = self._running()
        try:
            problem = worker.ready()
            reply = problem or worker.ask(line)
        except BaseException:
            self._drop()  # an answer may still be on its way: never take it for the next one's
            raise
        if problem or reply["kind"] == "ended":
            self._drop()
        return reply

    def _running(self) -> TemplateProcess:
        if self._worker is None or self._worker.has_ended:
            self._drop()
            self._worker = TemplateProcess(self.source, self.limits)
        return self._worker

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _text_or_error(reply: Mapping[str, str]) -> str:
    kind, message = reply["kind"], reply["message"]
    if kind == "text":
        return message
    if kind == "refused":
        raise InputError(
            f"the model's chat template does not take these messages: {message}",
            hint="change the order, roles or content of the messages as it says",
        )
    if kind == "failed":
        raise InputError(
            f"the model's chat template failed on these messages: {message}",
            hint="give each message a role and a text as content, or read the prompt raw",
        )
    what = {
        "syntax": "cannot be read",
        "security": "does something that is forbidden",
        "limit": "was stopped",
        "ended": "was stopped",
    }[kind]
    raise ModelError(f"the model's chat template {what}: {message}", hint=_RAW_HINT)


def _special_tokens(metadata: Mapping[str, Value], source: str) -> dict[str, str]:
    """Texts of the special tokens that the template names; reads no vocabulary otherwise."""
    wanted = {name: key for name, key in _SPECIAL_KEYS.items() if name in source}
    tokens = metadata.get("tokenizer.ggml.tokens") if wanted else None
    if not isinstance(tokens, Sequence):
        return {}
    ids = {name: metadata.get(key) for name, key in wanted.items()}
    return {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }
