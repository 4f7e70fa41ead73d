"""From the messages of a chat request to the prompt that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strata_cli.server.answers import Thinking
from strata_cli.server.failures import bad_request
from strata_cli.server.formats import format_grammar
from strata_cli.server.limits import Limits
from strata_cli.server.schemas import ChatRequest, Json
from strata_cli.server.texts import ModelTexts
from strata_cli.server.tools import TemplateTools, ToolUse, call_grammar, told, tool_use

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
TEXT_PARTS = ("text", "input_text", "output_text")
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continues", "template", "tokenizer", "self"}
)
ROLES = {"developer": "system"}  # one role under two names
LONGEST_ROLE = 64


class ChatSetup(NamedTuple):
    """What the chat template is given.

    Attributes:
        messages: the turns.
        variables: what else it may ask for.
        continues: the last turn is the assistant's and unfinished.
        thinks: the model is asked to think first.
        tools: that the template lists; None: it does not, or there are none.
        use: what the answer may do with tools.
        grammar: that the answer follows; None: any text.
    """

    messages: list[Json]
    variables: dict[str, Any]
    continues: bool
    thinks: bool
    tools: list[Json] | None
    use: ToolUse
    grammar: str | None


class ReadChat(NamedTuple):
    """A conversation as token ids, and the thought that its answer may begin with."""

    ids: list[int]
    thinking: Thinking | None


def chat_setup(texts: ModelTexts, limits: Limits, body: ChatRequest) -> ChatSetup:
    """What a request gives the chat template.

    Raises:
        RequestFailed: 400, the model has no template, or a field is wrong or would change nothing.
    """
    if texts.template is None:
        raise texts.no_template()
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    template = TemplateTools.of(texts.template.source)
    grammar = _grammar(body, use, template)
    if len(body.messages) > limits.max_messages:
        raise bad_request(
            f"{len(body.messages)} messages are more than the {limits.max_messages} that are read",
            "messages",
        )
    messages = [_message(index, item) for index, item in enumerate(body.messages)]
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1]["content"] == "":
        messages, continues = messages[:-1], False
        if not messages:
            raise bad_request("messages has one empty turn of the assistant alone", "messages")
    variables = _variables(texts, body)
    thinks = variables.get("enable_thinking") is True and not continues
    messages = told(messages, use, template)
    tools = [tool.described for tool in use.tools] if use.tools and template.lists else None
    return ChatSetup(messages, variables, continues, thinks, tools, use, grammar)


async def read_chat(texts: ModelTexts, setup: ChatSetup) -> ReadChat:
    """The prompt of a conversation.

    Raises:
        StrataError: the template refuses the messages, or fails on them.
    """
    prompt = await texts.encode_chat(
        setup.messages, tools=setup.tools, variables=setup.variables, continues=setup.continues
    )
    special = texts.tokenizer.special_ids
    if not setup.thinks or not {THINK_OPEN, THINK_CLOSE} <= special.keys():
        return ReadChat(prompt.ids, None)
    is_open = prompt.text.rstrip().endswith(THINK_OPEN)
    return ReadChat(prompt.ids, Thinking(special[THINK_OPEN], special[THINK_CLOSE], is_open))


def _grammar(body: ChatRequest, use: ToolUse, template: TemplateTools) -> str | None:
    wanted = format_grammar(body.response_format)
    if wanted is not None and use.tools:
        raise bad_request("response_format cannot go with tools; give one", "response_format")
    return wanted if wanted is not None else call_grammar(use, template)


def _message(index: int, message: Json) -> Json:
    """One turn with its content as one text."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= LONGEST_ROLE:
        raise bad_request(f"{where}.role must be a text, such as user", f"{where}.role")
    content = _content(message.get("content"), f"{where}.content")
    return {**message, "role": ROLES.get(role, role), "content": content}


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise bad_request(f"{where} must be a text or a list of parts", where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise bad_request(f"{where} must be an object with type and text", where)
    text = part.get("text")
    if part.get("type") not in TEXT_PARTS or not isinstance(text, str):
        raise bad_request(
            f"{where} is no text, and this server reads text alone", where, code="unsupported_part"
        )
    return text


def _variables(texts: ModelTexts, body: ChatRequest) -> dict[str, Any]:
    """Thinking is off unless it is asked for, so that a one-token read reads the answer."""
    variables: dict[str, Any] = {"enable_thinking": False}
    effort = body.reasoning_effort
    if effort is not None:
        variables |= _effort(texts, effort)
    given = body.chat_template_kwargs or {}
    taken = sorted(RESERVED & given.keys())
    if taken:
        raise bad_request(
            f"chat_template_kwargs cannot set {taken[0]}; it has a field of its own, or none",
            "chat_template_kwargs",
        )
    return variables | given


def ignored_variables(texts: ModelTexts, body: ChatRequest) -> list[str]:
    """Variables for the chat template that it does not have, as x-strata-ignored names them."""
    source = "" if texts.template is None else texts.template.source
    given = body.chat_template_kwargs or {}
    return [f"chat_template_kwargs.{name}" for name in given if name not in source]


def _effort(texts: ModelTexts, effort: str) -> dict[str, Any]:
    if effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort"
        )
    if effort == "none":
        return {"enable_thinking": False}
    if not texts.can_think:
        raise bad_request(
            f"reasoning_effort {effort} has no effect: the chat template of {texts.name} knows "
            "no thinking; try: none, or leave it out",
            "reasoning_effort",
            code="unsupported_parameter",
        )
    return {"enable_thinking": True, "reasoning_effort": effort}
