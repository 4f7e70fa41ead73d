"""Damaged and hostile files: a ModelError or a model, never anything else, never much memory."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.metadata import ValueType
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import ModelError
from tests.model.tiny_model import TinyDims, build_tiny_model

MAX_BYTES = 8 << 20
HUGE = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Sample(NamedTuple):
    """A small valid model, and the offsets in its header at which a field begins or ends."""

    content: bytes
    header_bytes: int
    boundaries: list[int]


@cache
def sample() -> Sample:
    dims = TinyDims(layers=2, interval=2, ple_layer=0, hidden=16, streams=2, vocab=264)
    builder = build_tiny_model(dims)
    boundaries = list(itertools.accumulate(map(len, builder.header_parts()), initial=0))
    return Sample(builder.to_bytes(), boundaries[-1], boundaries)


def use(path: Path) -> bool:
    """Open the model and decode all that is decoded lazily; False when it is refused."""
    tracemalloc.start()
    try:
        with load_model_file(path) as model:
            dict(model.metadata)
            for info in model.tensors.values():
                assert info.data.nbytes == info.nbytes
        return True
    except ModelError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES


def test_the_sample_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sample().content)
    assert use(path)


@settings(same_folder, max_examples=80)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, sample().header_bytes - 1), st.integers(1, 255)),
        min_size=1,
        max_size=4,
    )
)
def test_flipped_bytes_give_a_model_or_an_error(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(sample().content)
    for position, mask in flips:
        content[position] ^= mask
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    use(path)


@settings(same_folder, max_examples=80)
@given(
    position=st.sampled_from(sample().boundaries[:-1]),
    value=st.sampled_from(HUGE),
    form=st.sampled_from(["<I", "<Q"]),
)
def test_absurd_numbers_in_any_field_give_a_model_or_an_error(
    tmp_path: Path, position: int, value: int, form: str
) -> None:
    content = bytearray(sample().content)
    number = struct.pack(form, value & (2**32 - 1 if form == "<I" else 2**64 - 1))
    content[position : position + len(number)] = number
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    use(path)


@settings(same_folder, max_examples=50)
@given(
    start=st.sampled_from(sample().boundaries),
    end=st.sampled_from(sample().boundaries),
    junk=st.binary(max_size=40),
)
def test_replaced_stretches_give_a_model_or_an_error(
    tmp_path: Path, start: int, end: int, junk: bytes
) -> None:
    content = sample().content
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: min(start, end)] + junk + content[max(start, end) :])
    use(path)


def test_a_header_cut_at_any_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    builder = build_tiny_model(TinyDims(layers=1, ple_layer=0))
    builder.add("tokenizer.ggml.tokens", ValueType.STRING, ["a", "b"])
    builder.write(path)
    boundaries = itertools.accumulate(map(len, builder.header_parts()), initial=0)
    for boundary in reversed(list(boundaries)):
        with path.open("r+b") as file:
            file.truncate(boundary)
        with pytest.raises(ModelError):
            open_gguf(path)


@settings(same_folder, max_examples=25)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    content = sample().content.rstrip(b"\0")
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: int(share * (len(content) - 32))])
    assert not use(path)


@settings(same_folder, max_examples=50)
@given(
    body=st.binary(max_size=200), num_tensors=st.sampled_from(HUGE), num_keys=st.sampled_from(HUGE)
)
def test_junk_behind_the_magic_is_refused(
    tmp_path: Path, body: bytes, num_tensors: int, num_keys: int
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + body)
    assert not use(path)


def test_a_large_file_full_of_zeros_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 100_000, 60_000))
        file.truncate(1 << 36)
    assert not use(path)


def test_a_claim_that_a_large_file_could_hold_is_still_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    strings = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 30)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + strings)
        file.truncate(1 << 36)
    with pytest.raises(ModelError, match="claims 1073741824 strings"):
        open_gguf(path)
