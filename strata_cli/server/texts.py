"""The model as far as text goes: its tokenizer and chat template, without its weights.

Read from the model file's metadata alone, so the server needs no engine to count tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from strata_cli.engine.model.chat_prompt import ChatPrompt, encode_chat
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.shards import model_stem
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.server.failures import RequestFailed, bad_request

T = TypeVar("T")

_SPECIAL_NAMES = {
    "bos_token": "bos_token",
    "eos_token": "eos_token",
    "padding_token": "pad_token",
}

SHORT_TEXT = 512
"""Characters that are encoded on the event loop; for more another thread is worth its start."""


class ModelTexts:
    """Tokens and prompts of one model. Safe to share between threads.

    Args:
        name: what the model is called.
        tokenizer: the model's.
        template: the model's, or None.
        special_tokens: texts of bos_token, eos_token and pad_token, as far as there are any.

    Attributes:
        name, tokenizer, template, special_tokens: as given.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def open(cls, path: Path) -> ModelTexts:
        """Read them from a model file, or any of its shards.

        Raises:
            ModelError: the file cannot be used.
        """
        with open_gguf(path) as file:
            name = file.metadata.get("general.name")
            tokenizer = Tokenizer.from_metadata(file.metadata)
            ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_id") for key in _SPECIAL_NAMES}
            return cls(
                name if isinstance(name, str) and name else model_stem(file.paths[0]),
                tokenizer,
                ChatTemplate.from_metadata(file.metadata),
                {
                    _SPECIAL_NAMES[key]: tokenizer.token_text(token_id)
                    for key, token_id in ids.items()
                    if isinstance(token_id, int) and 0 <= token_id < tokenizer.vocab_size
                },
            )

    @property
    def can_think(self) -> bool:
        """Whether the chat template knows of thinking."""
        source = "" if self.template is None else self.template.source
        return "enable_thinking" in source or "reasoning_effort" in source

    async def encode(self, text: str, *, adds_bos: bool = True) -> list[int]:
        """Token ids of a raw prompt; special tokens in it are special.

        Args:
            text: any.
            adds_bos: False leaves out the token that the model may want in front.

        Raises:
            InputError: the text has half a surrogate pair.
        """
        return await _apart(
            len(text),
            lambda: self.tokenizer.encode(text, parse_special=True, add_bos=adds_bos),
        )

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens.

        Raises:
            InputError: an id is out of range.
        """
        return await _apart(len(ids), lambda: self.tokenizer.decode(ids))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        continues: bool,
    ) -> ChatPrompt:
        """A conversation as the model reads it.

        Args:
            messages: the turns, oldest first.
            tools: functions that may be called.
            variables: what else the template asks for.
            continues: the last turn is unfinished, and the answer goes on with it.

        Raises:
            RequestFailed: the model has no chat template.
            StrataError: see chat_prompt.encode_chat.
        """
        template = self._template()
        return await asyncio.to_thread(
            encode_chat,
            template,
            self.tokenizer,
            messages,
            tools=tools,
            continues=continues,
            **variables,
        )

    def close(self) -> None:
        """End the template's process. Safe to call twice."""
        if self.template is not None:
            self.template.close()

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise self.no_template()
        return self.template

    def no_template(self) -> RequestFailed:
        """What to say when a conversation cannot be made a prompt."""
        return bad_request(
            f"the model {self.name} has no chat template; try: /v1/completions with a raw prompt",
            param="messages",
        )


async def _apart(size: int, work: Callable[[], T]) -> T:
    return work() if size <= SHORT_TEXT else await asyncio.to_thread(work)
