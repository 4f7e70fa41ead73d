"""Decoders for processors with the registers of AVX-512, which hold 64 codes or 16 floats.

Weights are those of ``dequant_books`` and ``dequant_blocks``, bit for bit. Where codes are few,
what a code stands for is looked up in a register of floats that are scaled already. Where an index
names a row of a code book, 64 are looked up at once, if bytes can be shuffled, and become one
stream of 4-bit codes: a level and a sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from strata_cli.engine.kernels.dequant_lanes import (
    Block,
    float_book,
    look_up_floats,
    pick_floats,
)
from strata_cli.engine.kernels.lanes import Lanes, instruction
from strata_cli.engine.model.quants import QuantType, grid

FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "gfni")
_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_BYTES = 64  # of a register
_HALF_BYTES, _WHOLE_BYTES = ir.VectorType(_I8, 32), ir.VectorType(_I8, _BYTES)

# Where in 8 bytes the seven sign bits of 8 weights begin: 4 times 7 in each of two words.
_SIGN_FIELDS = (0, 7, 14, 21, 32, 39, 46, 53)
# Of a byte's bits, those whose parity each bit of another byte becomes.
_EVEN_SIGNS = (1, 2, 4, 8, 16, 32, 64, 0x7F)
_FIRST_SIGNS = (0, 0, 0, 1, 0, 0, 0, 2)  # of four weights' signs: those of the first two codes
_LAST_SIGNS = (0, 0, 0, 4, 0, 0, 0, 8)


def q4_k(block: Block) -> None:
    """For AVX-512; see dequant_blocks."""
    scales, minimums = _scales_and_minimums(block)
    for pair in range(4):
        codes = [block.bytes(16 + 32 * pair + 16 * half, 16).unsigned(32) for half in range(2)]
        for side in range(2):
            run = 2 * pair + side
            book = float_book(scales, range(16)) * scales.lane(run) - minimums.lane(run)
            for half, code in enumerate(codes):
                first = 64 * pair + 32 * side + 16 * half
                block.store(first, pick_floats(code >> (4 * side), book))


def q6_k(block: Block) -> None:
    """For AVX-512; see dequant_blocks."""
    scales = block.half(208) * block.bytes(192, 16).floats()
    for half in range(2):
        lows = [block.bytes(64 * half + 16 * part, 16).unsigned(32) for part in range(4)]
        highs = [block.bytes(128 + 32 * half + 16 * part, 16).unsigned(32) for part in range(2)]
        for row in range(4):
            for side in range(2):
                low = (lows[2 * (row % 2) + side] >> (4 * (row // 2))) & 15
                codes = low | (_moved(highs[side], 4 - 2 * row) & 48)
                run = 8 * half + 2 * row + side
                block.store(16 * run, (codes - 32).floats() * scales.lane(run))


def _scales_and_minimums(block: Block) -> tuple[Lanes, Lanes]:
    """Those of eight runs as float32: the 6-bit numbers of four at once, in the bytes of a word."""
    words = [block.integer(4 + 4 * index, 32) for index in range(3)]
    highest = [(word >> 6) & 0x03030303 for word in words[:2]]
    last = [words[2] & 0x0F0F0F0F, (words[2] >> 4) & 0x0F0F0F0F]
    found = []
    for index, factor in enumerate((block.half(0), block.half(2))):
        late = last[index] | (highest[index] << 4)
        both = (words[index] & 0x3F3F3F3F).unsigned(64) | (late.unsigned(64) << 32)
        found.append(factor * both.of_width(8).unsigned(32).floats())
    return found[0], found[1]


def _moved(bits: Lanes, places: int) -> Lanes:
    """Shifted to the left, or to the right by fewer than none."""
    return bits << places if places >= 0 else bits >> -places


def is_wide(block: Block) -> bool:
    """Whether iq3_xxs() runs where a block is decoded."""
    return block.has(*FEATURES)


def iq3_xxs(block: Block) -> None:
    """Half d, 64 indices, then per 32 weights: 4 seven-bit signs and a 4-bit scale in 4 bytes."""
    words = block.integers(66, 8)
    scales = block.half(0) * ((words >> 28).floats() + 0.5) * 0.5
    firsts, lasts, book = iq3_xxs_codes(block)
    # Index i has two codes in byte i of either. Side by side they are the codes in order; that
    # leaves eight times 16 bytes, of 32 weights each: by turns in these two.
    streams = [_interleaved(firsts, lasts, start) for start in (0, 8)]
    spread = [[_spread(stream, pair) for stream in streams] for pair in (0, 2)]
    for run in range(8):
        codes, scale = spread[run // 4][run % 2], scales.lane(run)
        for half in range(2):
            byte = 2 * (run // 2 % 2) + half
            shifts = [8 * byte + 4 * (lane % 2) for lane in range(16)]
            block.store(32 * run + 16 * half, look_up_floats(codes >> shifts, book, scale))


class Codes(NamedTuple):
    """A block's 4-bit codes: byte i has those of two of the weights 4 i .. 4 i + 4.

    Attributes:
        first, last: of the first two and of the last two, the earlier in the low half.
        book: what codes stand for.
    """

    first: Lanes
    last: Lanes
    book: Sequence[int]


def iq3_xxs_codes(block: Block) -> Codes:
    """What a block of IQ3_XXS says, but for scales."""
    books = _books_of_pairs()
    indices, signs = block.bytes(2, _BYTES), _signs_of_fours(block, 66)
    first = _look_up_256(indices, books.first) | _combined_bits(signs, _FIRST_SIGNS)
    last = _look_up_256(indices, books.last) | _combined_bits(signs, _LAST_SIGNS)
    return Codes(first, last, (*books.levels, *(-level for level in books.levels)))


def look_up_64(indices: Lanes, book: Sequence[int]) -> Lanes:
    """book[index] in each of 64 bytes, of which the lowest six bits count."""
    return _permuted(Lanes(indices.builder, ir.Constant(_WHOLE_BYTES, list(book))), indices)


def _permuted(values: Lanes, places: Lanes) -> Lanes:
    """values[place] in each of 64 bytes: one instruction."""
    name = "llvm.x86.avx512.permvar.qi.512"
    return instruction(values.builder, name, _WHOLE_BYTES, values.value, places.value)


class _Books(NamedTuple):
    """Rows of four magnitudes as two bytes each, and the eight magnitudes that there are.

    Attributes:
        first, last: the first two and the last two of each row, as places in ``levels``: four bits
            each, of which a sign may take the highest.
        levels: ascending.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    levels: tuple[int, ...]


@cache
def _books_of_pairs() -> _Books:
    """Those of IQ3_XXS."""
    rows = np.asarray(grid(QuantType.IQ3_XXS)).reshape(-1, 4).astype(np.int64)
    levels, codes = np.unique(rows, return_inverse=True)
    codes = codes.reshape(rows.shape)
    first, last = codes[:, 0] | codes[:, 1] << 4, codes[:, 2] | codes[:, 3] << 4
    return _Books(*(tuple(each.tolist()) for each in (first, last, levels)))


def _signs_of_fours(block: Block, at: int) -> Lanes:
    """The signs of weights 4 i .. 4 i + 4 in the low half of byte i; its high half is anything."""
    fields = ir.Constant(_HALF_BYTES, _SIGN_FIELDS * 4)
    name = "llvm.x86.avx512.pmultishift.qb.256"
    packed = block.bytes(at, 32)
    sevens = instruction(packed.builder, name, _HALF_BYTES, fields, packed.value)
    signs = _combined_bits(sevens, _EVEN_SIGNS).unsigned(16)
    return (signs | (signs << 4)).of_width(8)


def _combined_bits(values: Lanes, masks: Sequence[int]) -> Lanes:
    """In each byte, bit b is the parity of the bits of masks[b]."""
    kind = values.value.type
    name = f"llvm.x86.vgf2p8affineqb.{8 * kind.count}"
    matrix = ir.Constant(kind, list(reversed(masks)) * (kind.count // 8))
    operands = values.value, matrix, ir.Constant(_I8, 0)
    return instruction(values.builder, name, kind, *operands)


def _look_up_256(indices: Lanes, book: Sequence[int]) -> Lanes:
    """book[index] in each of 64 bytes."""
    name, builder = "llvm.x86.avx512.vpermi2var.qi.512", indices.builder
    quarters = [
        ir.Constant(_WHOLE_BYTES, list(book[start : start + _BYTES]))
        for start in range(0, len(book), _BYTES)
    ]
    low, high = (
        instruction(builder, name, _WHOLE_BYTES, quarters[i], indices.value, quarters[i + 1])
        for i in (0, 2)
    )
    zero = ir.Constant(_WHOLE_BYTES, [0] * _BYTES)
    is_high = Lanes(builder, builder.icmp_signed("<", indices.value, zero))
    return is_high.pick(high, low)


def _interleaved(first: Lanes, last: Lanes, start: int) -> Lanes:
    """Of each 16 bytes, 8 from ``start`` on of either, by turns: one instruction."""
    order = [
        place
        for lane in range(0, _BYTES, 16)
        for byte in range(lane + start, lane + start + 8)
        for place in (byte, _BYTES + byte)
    ]
    return first.shuffled(last, order)


def _spread(stream: Lanes, pair: int) -> Lanes:
    """Two of a stream's four times 32 codes in 16 integers: 16 codes to a byte of each.

    Integer l holds codes l, 16 + l of the first, then of the second, in its four bytes: in a byte's
    low half where l is even, else in its high half.
    """
    order = [
        16 * lane + 8 * half + place // 2
        for place in range(16)
        for lane in (pair, pair + 1)
        for half in range(2)
    ]
    bytes_of = ir.Constant(_WHOLE_BYTES, order)
    return _permuted(stream, Lanes(stream.builder, bytes_of)).of_width(32)
