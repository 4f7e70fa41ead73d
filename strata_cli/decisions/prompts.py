"""What AnyJev asks of a tokenizer, answered by the engine's; a state cannot pass for the template.

AnyJev renders a prompt as one text and hands that text back to be read. Control tokens that a state
or an option spells out are therefore replaced by stand-ins before the template sees them, and put
back, as plain characters, when the text is encoded: see chat_prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from strata_cli.engine.model.chat_prompt import Shield
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.errors import InputError, quoted


class PromptTokenizer:
    """The interface of a transformers tokenizer, as far as AnyJev uses it.

    Prompts are kept until the next protect(): AnyJev renders those again that tell what to read.

    Args:
        tokenizer: the model's.
        template: the model's chat template, or None.

    Attributes:
        chat_template: source of the template, or None.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._memory = tokenizer.memory()
        self._rendered: dict[str, str] = {}
        self._encoded: dict[str, list[int]] = {}
        self.chat_template = None if template is None else template.source
        self.protect(())

    def protect(self, texts: Iterable[str]) -> None:
        """Choose stand-ins that occur in none of the texts of the prompts to come.

        No prompt's tokens depend on the choice. Prompts of before are forgotten.
        """
        known = [self.chat_template or "", *texts]
        self._shield = Shield(self._tokenizer.control_texts, known)
        self._rendered.clear()
        self._encoded.clear()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a piece of plain text, such as a label."""
        return self._tokenizer.encode(text, parse_special=False, add_bos=add_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: bool,
    ) -> str:
        """The text of a conversation, with stand-ins; only for prompt_ids() to read.

        Raises:
            StrataError: see ChatTemplate.render.
        """
        assert self._template is not None
        assert not tokenize
        hidden = [
            {**message, "content": self._shield.hide(message["content"])} for message in messages
        ]
        key = json.dumps([hidden, add_generation_prompt, variables])
        if key not in self._rendered:
            self._rendered[key] = self._template.render(
                hidden, add_generation_prompt=add_generation_prompt, tools=None, **variables
            )
        return self._rendered[key]

    def shown(self, text: str) -> str:
        """A text of protect() as it stands in a rendered prompt."""
        return text if self._template is None else self._shield.hide(text)

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a whole prompt, as AnyJev rendered it. For reading only.

        Raises:
            InputError: the text has half a surrogate pair.
        """
        if text not in self._encoded:
            self._encoded[text] = self._encode_prompt(text)
        return self._encoded[text]

    def _encode_prompt(self, text: str) -> list[int]:
        if self._template is None:
            return self._tokenizer.encode(text, parse_special=False, memory=self._memory)
        return self._tokenizer.encode(
            text,
            parse_special=True,
            add_bos=False,
            restore=self._shield.restore,
            memory=self._memory,
        )

    def continuation(self, prompt: str, text: str) -> list[int]:
        """Token ids that a plain text adds behind a prompt, encoded in its place.

        A model without a chat template is prompted up to "Answer:", and reads a space first.

        Args:
            prompt: as rendered.
            text: one of the texts of protect(); what it spells out is no control token.

        Raises:
            InputError: the text changes the prompt's own tokens.
        """
        before = self.prompt_ids(prompt)
        hidden = f" {text}" if self._template is None else self._shield.hide(text)
        ids = self.prompt_ids(prompt + hidden)
        if ids[: len(before)] != before or len(ids) == len(before):
            raise InputError(
                f"{quoted(text)} cannot be scored behind the prompt: it merges with its last token",
                hint="leave out spaces and line breaks in front of it",
            )
        return ids[len(before) :]
