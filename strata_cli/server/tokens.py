"""Texts to tokens and back, as the model reads and writes them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.chat_prompts import chat_setup, read_chat
from strata_cli.server.failures import bad_request
from strata_cli.server.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from strata_cli.server.service import Service, ignored_headers, json_response, service_of


async def tokenize(request: Request) -> Response:
    """Token ids of a raw prompt, or of a chat."""
    service = service_of(request)
    parsed = await service.parse(request, TokenizeRequest)
    body = parsed.request
    ids = await _ids(service, body)
    facts = service.engine.facts
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": None if facts is None else facts.context_tokens,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.texts.tokenizer.token_text(token_id) for token_id in ids]
    return json_response(answer, headers=ignored_headers(parsed))


async def detokenize(request: Request) -> Response:
    """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
    service = service_of(request)
    parsed = await service.parse(request, DetokenizeRequest)
    text = await service.texts.decode(parsed.request.tokens)
    return json_response({"prompt": text}, headers=ignored_headers(parsed))


async def tokenizer_info(request: Request) -> Response:
    """What a client needs to prepare prompts itself, by the names that transformers gives it."""
    service = service_of(request)
    texts, facts = service.texts, service.engine.facts
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": texts.tokenizer.vocab_size,
            "model_max_length": None if facts is None else facts.context_tokens,
            **texts.special_tokens,
            "chat_template": None if texts.template is None else texts.template.source,
        }
    )


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        if body.chat_template_kwargs is not None:
            raise bad_request("chat_template_kwargs needs messages", "chat_template_kwargs")
        return await service.texts.encode(
            body.prompt, adds_bos=body.add_special_tokens is not False
        )
    if body.add_special_tokens is not None:
        raise bad_request(
            "add_special_tokens needs prompt: a chat template writes its own", "add_special_tokens"
        )
    chat = ChatRequest(messages=body.messages or [], chat_template_kwargs=body.chat_template_kwargs)
    if not chat.messages:
        raise bad_request("messages is an empty list", "messages")
    setup = chat_setup(service.texts, service.limits, chat)
    return (await read_chat(service.texts, setup)).ids
