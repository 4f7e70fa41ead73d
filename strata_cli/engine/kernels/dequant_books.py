"""Decoders of the i-quants: codes are indices into a code book that comes with the type.

Byte layouts and the order of float operations: ggml's block structs, as gguf's numpy dequantizers
state them. Books: ``model.quants.grid``. All but iq4 store blocks of 256 weights.
"""

from __future__ import annotations

from strata_cli.engine.kernels import dequant_wide
from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.lanes import Lanes

IQ4_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _signed(magnitudes: Lanes, signs: Lanes) -> Lanes:
    """Magnitudes, negative where the lane's bit of the scalar signs is set."""
    count = magnitudes.value.type.count
    return signs.bits(count).pick(magnitudes.negated(), magnitudes)


def _even_signs(code: Lanes) -> Lanes:
    """Eight sign bits from seven (32-bit scalar): the eighth makes their number even."""
    return code | ((code.count_bits() & 1) << 7)


def _two(first: Lanes, second: Lanes) -> Lanes:
    """Sixteen sign bits from twice eight."""
    return first | (second << 8)


def _nibble(block: Block, at: int, index: int) -> Lanes:
    """Four bits of a packed list that starts at a byte, as a 32-bit scalar."""
    return (block.byte(at + index // 2) >> (4 * (index % 2))) & 15


def iq2_xxs(block: Block) -> None:
    """Half d, then per 32 weights: 4 indices, 4 seven-bit signs and a 4-bit scale in 8 bytes."""
    d = block.half(0)
    for run in range(8):
        word = block.integer(6 + 8 * run, 32)
        scale = d * ((word >> 28).floats() + 0.5) * 0.25
        signs = [_even_signs((word >> (7 * part)) & 127) for part in range(4)]
        for part in (0, 2):
            indices = [block.byte(2 + 8 * run + part + i) for i in range(2)]
            values = _signed(block.entries(indices, 8), _two(signs[part], signs[part + 1]))
            block.store(32 * run + 8 * part, values.floats() * scale)


def iq2_xs(block: Block) -> None:
    """Half d, 32 words of 9-bit index and 7-bit signs, 16 4-bit scales."""
    d = block.half(0)
    for run in range(16):
        scale = d * (_nibble(block, 66, run).floats() + 0.5) * 0.25
        words = [block.integer(2 + 4 * run + 2 * i, 16).unsigned(32) for i in range(2)]
        signs = _two(*(_even_signs(word >> 9) for word in words))
        values = _signed(block.entries([word & 511 for word in words], 8), signs)
        block.store(16 * run, values.floats() * scale)


def iq2_s(block: Block) -> None:
    """Half d, 32 low index bytes, 32 sign bytes, 32 2-bit high indices, 16 4-bit scales."""
    d = block.half(0)
    for run in range(16):
        scale = d * (_nibble(block, 74, run).floats() + 0.5) * 0.25
        indices = []
        for group in (2 * run, 2 * run + 1):
            high = (block.byte(66 + group // 4) >> (2 * (group % 4))) & 3
            indices.append(block.byte(2 + group) | (high << 8))
        values = _signed(block.entries(indices, 8), block.integer(34 + 2 * run, 16))
        block.store(16 * run, values.floats() * scale)


def iq3_xxs(block: Block) -> None:
    """Half d, 64 indices, then per 32 weights: 4 seven-bit signs and a 4-bit scale in 4 bytes."""
    if dequant_wide.is_wide(block):
        dequant_wide.iq3_xxs(block)
        return
    d = block.half(0)
    for run in range(8):
        word = block.integer(66 + 4 * run, 32)
        scale = d * ((word >> 28).floats() + 0.5) * 0.5
        signs = [_even_signs((word >> (7 * part)) & 127) for part in range(4)]
        for part in (0, 2):
            indices = [block.byte(2 + 8 * run + 2 * part + i) for i in range(4)]
            values = _signed(block.entries(indices, 4), _two(signs[part], signs[part + 1]))
            block.store(32 * run + 8 * part, values.floats() * scale)


def iq3_s(block: Block) -> None:
    """Half d, 64 low index bytes, 64 high index bits, 32 sign bytes, 8 4-bit scales."""
    d = block.half(0)
    for run in range(8):
        scale = d * (_nibble(block, 106, run) * 2 + 1).floats()
        for part in (0, 4):
            group, indices = 8 * run + part, []
            for i in range(part, part + 4):
                high = (block.byte(66 + run) >> i) & 1
                indices.append(block.byte(2 + 8 * run + i) | (high << 8))
            values = _signed(block.entries(indices, 4), block.integer(74 + group // 2, 16))
            block.store(4 * group, values.floats() * scale)


def _shifted(values: Lanes, is_minus: Lanes, scale: Lanes) -> Lanes:
    """(values + 1/8) * scale, or minus 1/8 where the scalar is_minus is not zero."""
    delta = is_minus.equals(0).pick(scale.constant(0.125), scale.constant(-0.125))
    return (values.floats() + delta) * scale


def iq1_s(block: Block) -> None:
    """Half d, 32 low index bytes, then per 32 weights a word: 4 high indices, scale, delta sign."""
    d = block.half(0)
    for run in range(8):
        word = block.integer(34 + 2 * run, 16).unsigned(32)
        scale = d * (((word >> 12) & 7) * 2 + 1).floats()
        for part in (0, 2):
            indices = []
            for i in (part, part + 1):
                indices.append(block.byte(2 + 4 * run + i) | (((word >> (3 * i)) & 7) << 8))
            values = block.entries(indices, 8)
            block.store(32 * run + 8 * part, _shifted(values, word & 0x8000, scale))


def iq1_m(block: Block) -> None:
    """32 low index bytes, 32 nibbles of high index and delta sign, 4 words of 4 3-bit scales.

    The half d is spread over the top four bits of the words.
    """
    words = [block.integer(48 + 2 * i, 16) for i in range(4)]
    bits = (words[0] >> 12) | ((words[1] >> 8) & 0xF0) | ((words[2] >> 4) & 0xF00)
    d = block.half_from(bits | (words[3] & 0xF000))
    for run in range(16):
        code = (words[run // 4].unsigned(32) >> (3 * (run % 4))) & 7
        scale = d * (code * 2 + 1).floats()
        for group in (2 * run, 2 * run + 1):
            high = _nibble(block, 32, group)
            values = block.entries([block.byte(group) | ((high & 7) << 8)], 8)
            block.store(8 * group, _shifted(values, high & 8, scale))


def _store_pairs(block: Block, first: int, at: int, scale: Lanes) -> None:
    """32 weights from weight ``first`` on: 16 bytes of two codes at a byte."""
    low, high = block.look_up_pairs(at, IQ4_BOOK, scale)
    block.store(first, low)
    block.store(first + 16, high)


def iq4_nl(block: Block) -> None:
    """Half d, 16 bytes of two codes: weights 0..15 in the low halves, 16..31 in the high ones."""
    _store_pairs(block, 0, 2, block.half(0))


def iq4_xs(block: Block) -> None:
    """Half d, 8 2-bit high scales, 8 4-bit low scales, 8 runs of codes as in iq4_nl."""
    d, high_scales = block.half(0), block.integer(2, 16).unsigned(32)
    for run in range(8):
        high = (high_scales >> (2 * run)) & 3
        scale = d * ((_nibble(block, 4, run) | (high << 4)) - 32).floats()
        _store_pairs(block, 32 * run, 8 + 16 * run, scale)
