"""From the fields of a request to what the engine is asked, for both kinds of completion."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec

from strata_cli.engine.decode.sampling import Sampler
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.server.failures import CONTEXT_EXCEEDED, RequestFailed, bad_request
from strata_cli.server.protocol import Generate, ModelFacts
from strata_cli.server.schemas import ChatRequest, CompletionRequest

T = TypeVar("T")

SEEDS = 2**64
DRAWN_SEED_BITS = 32  # a client whose numbers are doubles must be able to send it back


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request without the field gets.

    Attributes:
        temperature, top_k, top_p, min_p: see Sampler.
        seed: None: another one for each request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


class Wanted(NamedTuple):
    """Which log-probabilities a request wants.

    Attributes:
        top: so many of the likeliest tokens; None: no log-probability at all.
        of_prompt: the prompt's tokens have them too.
    """

    top: int | None
    of_prompt: bool = False


class TextRules(NamedTuple):
    """What becomes of an answer's tokens on the way to its text; see AnswerText."""

    stops: tuple[str, ...]
    keeps_stop: bool
    skips_control: bool


class Asked(NamedTuple):
    """What the engine is asked, and what to make of its answers.

    Attributes:
        jobs: one for each choice, in the order of their indices.
        num_choices: of each prompt.
        seed: of the first choice of each prompt; the others count up from it.
        wanted: log-probabilities.
        num_allowed: tokens that the answer is restricted to; 0: it is not.
        text_rules: see there.
    """

    jobs: tuple[Generate, ...]
    num_choices: int
    seed: int
    wanted: Wanted
    num_allowed: int
    text_rules: TextRules


class Grounds(NamedTuple):
    """What a request is asked on, and does not say itself.

    Attributes:
        tokenizer, facts: the model's.
        defaults: of the sampler.
        request_id: for the logs.
    """

    tokenizer: Tokenizer
    facts: ModelFacts
    defaults: SamplingDefaults
    request_id: str


def ask(
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    wanted: Wanted,
    grounds: Grounds,
    *,
    constraint: str | None = None,
) -> Asked:
    """What the engine is asked for a request.

    Args:
        request: the checked fields.
        prompts: token ids.
        max_tokens: to generate; -1 is the rest of the context.
        wanted: log-probabilities.
        grounds: what the request is asked on.
        constraint: see Generate.

    Raises:
        RequestFailed: 400, a prompt is empty or does not fit.
        StrataError: an id is not in the vocabulary, or a sampling value out of range.
    """
    tokenizer = grounds.tokenizer
    tokenizer.check_ids(token_id for prompt in prompts for token_id in prompt)
    seed = _seed(request.seed, grounds.defaults)
    job = _job(request, wanted, grounds, seed, constraint)
    num_choices = request.n or 1
    rooms = [_room(grounds.facts, len(prompt), max_tokens) for prompt in prompts]
    jobs = [
        msgspec.structs.replace(
            job,
            prompt=tuple(prompt),
            max_tokens=room,
            sampling=replace(job.sampling, seed=(seed + choice) % SEEDS),
        )
        for prompt, room in zip(prompts, rooms, strict=True)
        for choice in range(num_choices)
    ]
    num_allowed = len(job.allowed_ids)
    return Asked(tuple(jobs), num_choices, seed, wanted, num_allowed, _text_rules(request))


def _job(
    request: CompletionRequest | ChatRequest,
    wanted: Wanted,
    grounds: Grounds,
    seed: int,
    constraint: str | None,
) -> Generate:
    """What all choices have in common; the prompt is missing."""
    allowed = _distinct(request.allowed_token_ids)
    named = _distinct(request.logprob_token_ids)
    stops = _distinct(request.stop_token_ids)
    grounds.tokenizer.check_ids((*allowed, *named, *stops))
    if request.allowed_token_ids == []:
        raise bad_request("allowed_token_ids is empty: no token could come", "allowed_token_ids")
    if named and wanted.top is None:
        raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
    return Generate(
        request_id=grounds.request_id,
        prompt=(),
        max_tokens=0,
        sampling=_sampler(request, grounds.defaults, seed),
        stop_ids=stops,
        ignore_eos=bool(request.ignore_eos),
        logprobs=wanted.top,
        prompt_logprobs=wanted.top if wanted.of_prompt else None,
        allowed_ids=allowed,
        named_ids=named,
        canonical=_canonical(request.strata_deterministic),
        constraint=constraint,
    )


def _text_rules(request: CompletionRequest | ChatRequest) -> TextRules:
    stop = request.stop or ()
    return TextRules(
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        keeps_stop=bool(request.include_stop_str_in_output),
        skips_control=request.skip_special_tokens is not False,
    )


def _sampler(
    request: CompletionRequest | ChatRequest, defaults: SamplingDefaults, seed: int
) -> Sampler:
    neutral = Sampler()
    return Sampler(
        temperature=_given(request.temperature, defaults.temperature),
        top_k=_given(request.top_k, defaults.top_k),
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, neutral.repetition_penalty),
        frequency_penalty=_given(request.frequency_penalty, neutral.frequency_penalty),
        presence_penalty=_given(request.presence_penalty, neutral.presence_penalty),
        penalty_last_n=_given(request.penalty_last_n, neutral.penalty_last_n),
        seed=seed,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _seed(wanted: int | None, defaults: SamplingDefaults) -> int:
    seed = _given(wanted, defaults.seed)
    return secrets.randbits(DRAWN_SEED_BITS) if seed is None else seed % SEEDS


def _canonical(value: object) -> bool | None:
    """Forced on or off by true and false; anything else leaves it to the rule."""
    return value if isinstance(value, bool) else None


def _distinct(ids: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids or ()))


def _room(facts: ModelFacts, num_prompt: int, max_tokens: int) -> int:
    """Tokens that may be generated.

    Raises:
        RequestFailed: 400, prompt and answer do not fit the context.
    """
    if num_prompt == 0:
        raise bad_request("the prompt is empty; give at least one token", "prompt")
    left = facts.context_tokens - num_prompt
    if left < max(max_tokens, 0) or (max_tokens < 0 and left == 0):
        raise _no_room(facts, num_prompt, max_tokens)
    return left if max_tokens < 0 else max_tokens


def _no_room(facts: ModelFacts, num_prompt: int, max_tokens: int) -> RequestFailed:
    answer = f" and {max_tokens} tokens to generate" if max_tokens > 0 else ""
    ways = "shorten the prompt" + (" or lower max_tokens" if max_tokens > 0 else "")
    if facts.context_tokens < facts.model_context_tokens:
        ways += f", or start the server with --max-context {facts.model_context_tokens} at most"
    return bad_request(
        f"{num_prompt} prompt tokens{answer} do not fit the context of "
        f"{facts.context_tokens} tokens; try: {ways}",
        "max_tokens" if num_prompt < facts.context_tokens else "prompt",
        code=CONTEXT_EXCEEDED,
    )
