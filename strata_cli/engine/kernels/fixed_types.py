"""Which types can be multiplied in fixed point, and how: their weights as small integers in order.

Byte layouts are those of ``dequant_books`` and ``dequant_blocks``. Look-ups take registers of 64
bytes, so a piece is as many blocks as fill one or more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

from llvmlite.binding import get_host_cpu_features

from strata_cli.engine.kernels import dequant_wide
from strata_cli.engine.kernels.dequant_books import IQ4_BOOK
from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.fixed_dots import (
    DIGITS_SIGNATURE,
    FIXED_SIGNATURE,
    Group,
    Piece,
    fixed_dots,
    make_digits,
)
from strata_cli.engine.kernels.jit import c_function, named_copy
from strata_cli.engine.kernels.lanes import Lanes
from strata_cli.engine.model.quants import QuantType

_LANES, _BYTES = 16, 64  # of a register
_IQ3_BIAS, _BYTE_BIAS = 64, 128


def _iq3_xxs(block: Block) -> Sequence[Group]:
    """A block: index i names weights 4 i .. 4 i + 4, one in each plane; two lanes share a scale."""
    first, last, levels = dequant_wide.iq3_xxs_codes(block)
    book = [level + _IQ3_BIAS for level in levels]
    planes = [plane for codes in (first, last) for plane in _two_planes(codes, book)]
    words = block.integers(66, 8)
    words = words.shuffled(words, [lane // 2 for lane in range(_LANES)])
    scale = ((words >> 28).floats() + 0.5) * (block.half(0) * 0.5)
    return [Group(planes, scale)]


def _iq4_nl(block: Block) -> Sequence[Group]:
    """Four blocks: 16 bytes of codes each, next to each other; four lanes share a scale."""
    parts = [block.bytes(18 * index + 2, 16) for index in range(4)]
    halves = [a.shuffled(b, range(32)) for a, b in (parts[:2], parts[2:])]
    codes = halves[0].shuffled(halves[1], range(_BYTES))
    return [Group(_two_planes(codes, _IQ4_VALUES), _halves(block, [0, 18, 36, 54]))]


def _iq4_xs(block: Block) -> Sequence[Group]:
    """A block: 4 runs of 32 weights in each of two registers of codes."""
    low, high = block.integer(4, 32).spread(_LANES), block.integer(2, 16).unsigned(32)
    groups = []
    for half in range(2):
        runs = [4 * half + lane // 4 for lane in range(_LANES)]
        nibbles = (low >> [4 * run for run in runs]) & 15
        above = (high.spread(_LANES) >> [2 * run for run in runs]) & 3
        scale = ((nibbles | (above << 4)) - 32).floats() * block.half(0)
        groups.append(Group(_two_planes(block.bytes(8 + 64 * half, _BYTES), _IQ4_VALUES), scale))
    return groups


def _q8_0(block: Block) -> Sequence[Group]:
    """Two blocks: eight lanes share a scale."""
    first, last = block.bytes(2, 32), block.bytes(36, 32)
    weights = first.shuffled(last, range(_BYTES)) ^ -_BYTE_BIAS
    return [Group([weights], _halves(block, [0, 34]))]


def _two_planes(codes: Lanes, book: Sequence[int]) -> tuple[Lanes, Lanes]:
    """What the low halves of 64 bytes stand for, and the high halves: book[code], 16 bytes."""
    high = (codes.of_width(16) >> 4).of_width(8)
    low, high = (dequant_wide.look_up_64(each, list(book) * 4) for each in (codes, high))
    return low, high


def _halves(block: Block, places: Sequence[int]) -> Lanes:
    """IEEE halves at even bytes below 64, each for as many of 16 lanes, as float32."""
    repeats = _LANES // len(places)
    words = block.bytes(0, _BYTES).of_width(16)
    return words.shuffled(words, [place // 2 for place in places for _ in range(repeats)]).widened()


_IQ4_VALUES = [value + _BYTE_BIAS for value in IQ4_BOOK]
_IN_ORDER = list(range(_BYTES))
_FOURS = [[4 * index + place for index in range(_BYTES)] for place in range(4)]


def _sixteens(first: int) -> list[list[int]]:
    """Runs of 32 weights from one on: their first halves in one plane, their last in the other."""
    return [
        [first + 32 * (byte // 16) + 16 * half + byte % 16 for byte in range(_BYTES)]
        for half in range(2)
    ]


FIXED = {
    QuantType.IQ3_XXS: Piece(256, 98, _IQ3_BIAS, [_FOURS], _iq3_xxs),
    QuantType.IQ4_NL: Piece(128, 72, _BYTE_BIAS, [_sixteens(0)], _iq4_nl),
    QuantType.IQ4_XS: Piece(256, 136, _BYTE_BIAS, [_sixteens(0), _sixteens(128)], _iq4_xs),
    QuantType.Q8_0: Piece(64, 68, _BYTE_BIAS, [[_IN_ORDER]], _q8_0),
}


class FixedProduct(NamedTuple):
    """A type's compiled functions, for callers that are compiled too.

    Attributes:
        digits, dots: addresses, see fixed_dots.py; 0: the type or the processor has none.
        weights: of a piece.
        nbytes: of the digits of a piece, behind UNIT_BYTES.
    """

    digits: int
    dots: int
    weights: int
    nbytes: int


NO_PRODUCT = FixedProduct(0, 0, 1, 0)
_lock = threading.Lock()
_ready: dict[int, FixedProduct] = {}
_keep_alive: list[Any] = []
_emit: Any = None  # what the templates call; every copy of one has its own


def _digits(x: int, pieces: int, out: int) -> None:
    _emit(x, pieces, out)


def _dots(
    row: int, stride: int, rows: int, digits: int, pieces: int, out: int, following: int
) -> None:
    _emit(row, stride, rows, digits, pieces, out, following)


def fixed_product(qtype: int, cols: int) -> FixedProduct:
    """That of rows of so many weights; the first call of a type compiles it or loads it."""
    piece = FIXED.get(QuantType(qtype))
    if piece is None or cols % piece.weights or not can_multiply():
        return NO_PRODUCT
    with _lock:
        if qtype not in _ready:
            digits = named_copy(_digits, piece.decode, "_digits", _emit=make_digits(piece))
            dots = named_copy(_dots, piece.decode, "_dots", _emit=fixed_dots(piece))
            functions = [(DIGITS_SIGNATURE, digits), (FIXED_SIGNATURE, dots)]
            # A thread of its own: inside the compiler Python would drop an interrupt of this one.
            with ThreadPoolExecutor(1) as compiler:
                compiled = [compiler.submit(c_function, *each).result() for each in functions]
            _keep_alive.extend(compiled)
            addresses = compiled[0].address, compiled[1].address
            _ready[qtype] = FixedProduct(*addresses, piece.weights, piece.digits_nbytes)
        return _ready[qtype]


@cache
def can_multiply() -> bool:
    """Whether this processor has the instructions."""
    features: Mapping[str, bool] = get_host_cpu_features()
    return all(features.get(name, False) for name in (*dequant_wide.FEATURES, "avx512vnni"))
