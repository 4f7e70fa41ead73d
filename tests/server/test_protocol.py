"""The bytes between server and worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.config import StrataConfig
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.server import framing
from strata_cli.server.framing import (
    LENGTH_BYTES,
    body_length,
    encode,
    server_decoder,
    worker_decoder,
)
from strata_cli.server.protocol import (
    Generate,
    Message,
    Open,
    PromptLogprobs,
    PromptRow,
    ProtocolError,
    Ranked,
    Score,
    Token,
)

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
RANKED = st.lists(st.builds(Ranked, st.integers(0, 10**6), FLOAT32), max_size=4).map(tuple)
SEEDS = st.integers(0, 2**64 - 1)


def round_trip(message: Message, decode: object) -> Message:
    data = encode(message)
    assert body_length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    result: Message = decode.decode(data[LENGTH_BYTES:])  # type: ignore[attr-defined]  # both kinds
    return result


@given(prompt=IDS, allowed=IDS, seed=SEEDS, temperature=st.floats(0, 9), text=st.text())
def test_requests_arrive_as_they_were(
    prompt: tuple[int, ...], allowed: tuple[int, ...], seed: int, temperature: float, text: str
) -> None:
    sampling = Sampler(seed=seed, temperature=temperature)
    for message in (
        Generate(prompt=prompt, max_tokens=3, allowed_ids=allowed, sampling=sampling),
        Generate(request_id=text, prompt=prompt, max_tokens=0, constraint=text, canonical=False),
        Score(prefix=prompt, suffixes=(allowed, prompt), ids=(prompt, allowed)),
    ):
        assert round_trip(message, worker_decoder()) == message


@given(logprob=FLOAT32, top=RANKED, named=RANKED)
def test_every_bit_of_a_number_arrives(
    logprob: float, top: tuple[Ranked, ...], named: tuple[Ranked, ...]
) -> None:
    for message in (
        Token(request_id="a", index=1, token_id=2, logprob=logprob, top=top, named=named),
        PromptLogprobs(request_id="a", start=1, rows=(PromptRow(3, logprob, top),)),
    ):
        told = round_trip(message, server_decoder())
        assert told == message
        assert repr(told) == repr(message)  # zeros have signs


def test_settings_arrive_whatever_their_paths_are() -> None:
    config = StrataConfig(model=Path(os.fsdecode(b"/models/\xff\xfe.gguf")), seed=2**64 - 1)
    message = round_trip(Open(config=config), worker_decoder())
    assert isinstance(message, Open)
    assert message.config == config


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(body: bytes) -> None:
    for decoder in (worker_decoder(), server_decoder()):
        with pytest.raises(ProtocolError):
            decoder.decode(body)


def test_fields_that_cannot_be_are_refused() -> None:
    good = encode(Generate(prompt=(1,), max_tokens=3, sampling=Sampler(temperature=0.5)))
    for old, new in (
        (b"max_tokens\x03", b"max_tokens\xc0"),  # no number
        (b"max_tokens\x03", b"max_tokans\x03"),  # no such field
        (b"Generate", b"Degenera"),  # no such message
        (b"top_p\xcb?\xf0", b"top_p\xcb?\xff"),  # out of range
    ):
        assert old in good
        with pytest.raises(ProtocolError):
            worker_decoder().decode(good[LENGTH_BYTES:].replace(old, new))
    with pytest.raises(ProtocolError):  # no message of the worker's
        server_decoder().decode(good[LENGTH_BYTES:])


def test_a_message_may_not_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "LARGEST_BYTES", 200)
    with pytest.raises(ProtocolError, match="longer than the 200 allowed"):
        encode(Generate(prompt=(10**6,) * 100, max_tokens=1))
    with pytest.raises(ProtocolError, match="of 201 bytes"):
        body_length((201).to_bytes(4, "big"))
