"""Decoders of the types that store a scale and small integers: one function per type.

Byte layouts and the order of float operations: ggml's block structs, as gguf's numpy dequantizers
state them. Weights of a block of 256 come in runs of 16 or 32 that share a scale.
"""

from __future__ import annotations

from strata_cli.engine.kernels import dequant_wide
from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.lanes import Lanes

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BITS = [1 << bit for bit in range(8)]


def f16(block: Block) -> None:
    """2 bytes: an IEEE half."""
    block.store(0, block.half(0))


def bf16(block: Block) -> None:
    """2 bytes: the upper half of a float32."""
    block.store(0, (block.integer(0, 16).unsigned(32) << 16).as_float())


def q8_0(block: Block) -> None:
    """Half d, 32 int8."""
    block.store(0, block.bytes(2, 32).floats() * block.half(0))


def q4_0(block: Block) -> None:
    """Half d, 16 bytes of two codes: weights 0..15 in the low halves, 16..31 in the high ones."""
    d, codes = block.half(0), block.bytes(2, 16)
    block.store(0, ((codes & 15) - 8).floats() * d)
    block.store(16, ((codes >> 4) - 8).floats() * d)


def q4_1(block: Block) -> None:
    """Half d, half m, 16 bytes of two codes as in q4_0."""
    d, m, codes = block.half(0), block.half(2), block.bytes(4, 16)
    block.store(0, (codes & 15).floats() * d + m)
    block.store(16, (codes >> 4).floats() * d + m)


def _fifth_bits(block: Block, at: int, first: int) -> Lanes:
    """Bits first .. first + 16 of a 32-bit field, each as 16 in a lane of its own."""
    bits = block.bytes(at + first // 8, 2).repeat(8)
    return ((bits >> (list(range(8)) * 2)) & 1) << 4


def q5_0(block: Block) -> None:
    """Half d, 32 fifth bits, 16 bytes of two codes."""
    d, codes = block.half(0), block.bytes(6, 16)
    block.store(0, (((codes & 15) | _fifth_bits(block, 2, 0)) - 16).floats() * d)
    block.store(16, (((codes >> 4) | _fifth_bits(block, 2, 16)) - 16).floats() * d)


def q5_1(block: Block) -> None:
    """Half d, half m, 32 fifth bits, 16 bytes of two codes."""
    d, m, codes = block.half(0), block.half(2), block.bytes(8, 16)
    block.store(0, ((codes & 15) | _fifth_bits(block, 4, 0)).floats() * d + m)
    block.store(16, ((codes >> 4) | _fifth_bits(block, 4, 16)).floats() * d + m)


def q1_0(block: Block) -> None:
    """Half d, 128 bits: set means d, clear means -d."""
    d = block.half(0)
    for at in range(16):
        is_clear = (block.bytes(2 + at, 1).repeat(8) & _BITS).equals(0)
        block.store(8 * at, is_clear.pick(d.negated().spread(8), d.spread(8)))


def q2_0(block: Block) -> None:
    """Half d, 64 codes of two bits in order: 0..3 mean -d, 0, d, 2d."""
    d = block.half(0)
    for at in range(0, 16, 4):
        codes = block.bytes(2 + at, 4).repeat(4).unsigned(32) >> ([0, 2, 4, 6] * 4)
        block.store(4 * at, ((codes & 3) - 1).floats() * d)


def q2_k(block: Block) -> None:
    """16 bytes of scale and minimum (4 bits each), 64 bytes of codes, half d, half dmin."""
    d, dmin = block.half(80), block.half(82)
    for run in range(16):
        scales = block.byte(run)
        scale, minimum = d * (scales & 15).floats(), dmin * (scales >> 4).floats()
        half, shift = run // 8, 2 * (run % 8 // 2)
        codes = (block.bytes(16 + 32 * half + 16 * (run % 2), 16) >> shift) & 3
        block.store(16 * run, codes.floats() * scale - minimum)


def q3_k(block: Block) -> None:
    """32 bytes of third bits, 64 bytes of two low bits, 12 bytes of 6-bit scales, half d."""
    d = block.half(108)
    for run in range(16):
        low = block.byte(96 + run % 8) >> (4 * (run // 8))
        high = block.byte(104 + run % 4) >> (2 * (run // 4))
        scale = d * (((low & 15) | ((high & 3) << 4)) - 32).floats()
        half, shift, side = run // 8, 2 * (run % 8 // 2), 16 * (run % 2)
        codes = (block.bytes(32 + 32 * half + side, 16) >> shift) & 3
        third = (block.bytes(side, 16) >> (run // 2)) & 1
        # A clear third bit subtracts 4.
        block.store(16 * run, ((codes | (third << 2)) - 4).floats() * scale)


def _scale_and_minimum(block: Block, run: int) -> tuple[Lanes, Lanes]:
    """The 6-bit pair of a 32-weight run, in the 12 bytes from byte 4 that q4_k and q5_k share."""
    if run < 4:
        return block.byte(4 + run) & 63, block.byte(8 + run) & 63
    both = block.byte(8 + run)
    return (
        (both & 15) | ((block.byte(run) >> 2) & 48),
        (both >> 4) | ((block.byte(4 + run) >> 2) & 48),
    )


def q4_k(block: Block) -> None:
    """Half d, half dmin, 12 bytes of 6-bit scales and minimums, 128 bytes of two codes."""
    if block.has("avx512f"):
        dequant_wide.q4_k(block)
        return
    d, dmin = block.half(0), block.half(2)
    for run in range(8):
        scale, minimum = _scale_and_minimum(block, run)
        codes = (block.bytes(16 + 32 * (run // 2), 32) >> (4 * (run % 2))) & 15
        block.store(32 * run, codes.floats() * (d * scale.floats()) - dmin * minimum.floats())


def q5_k(block: Block) -> None:
    """As q4_k, with 32 bytes of fifth bits before the codes."""
    d, dmin = block.half(0), block.half(2)
    for run in range(8):
        scale, minimum = _scale_and_minimum(block, run)
        codes = (block.bytes(48 + 32 * (run // 2), 32) >> (4 * (run % 2))) & 15
        fifth = (block.bytes(16, 32) >> run) & 1
        codes = codes | (fifth << 4)
        block.store(32 * run, codes.floats() * (d * scale.floats()) - dmin * minimum.floats())


def q6_k(block: Block) -> None:
    """128 bytes of four low bits, 64 bytes of two high bits, 16 int8 scales, half d."""
    if block.has("avx512f"):
        dequant_wide.q6_k(block)
        return
    d = block.half(208)
    for run in range(16):
        half, row, side = run // 8, run % 8 // 2, 16 * (run % 2)
        low = block.bytes(64 * half + 32 * (row % 2) + side, 16) >> (4 * (row // 2))
        high = block.bytes(128 + 32 * half + side, 16) >> (2 * row)
        codes = ((low & 15) | ((high & 3) << 4)) - 32
        block.store(16 * run, codes.floats() * (d * block.integer(192 + run, 8).floats()))


def _ternary(packed: Lanes, power: int) -> Lanes:
    """One base-3 digit of each byte, minus one."""
    return ((((packed * power).unsigned(16) * 3) >> 8).unsigned(8)) - 1


def tq1_0(block: Block) -> None:
    """48 bytes of five base-3 digits, 4 bytes of four, half d; digit by digit."""
    d = block.half(52)
    runs = [
        (at, 16, digit)
        for start, size in ((0, 32), (32, 16))
        for digit in range(5)
        for at in range(start, start + size, 16)
    ]
    for run, (at, size, digit) in enumerate(runs):
        block.store(16 * run, _ternary(block.bytes(at, size), 3**digit).floats() * d)
    for digit in range(4):
        block.store(240 + 4 * digit, _ternary(block.bytes(48, 4), 3**digit).floats() * d)


def tq2_0(block: Block) -> None:
    """64 bytes of four two-bit codes, half d."""
    d = block.half(64)
    for run in range(8):
        codes = (block.bytes(32 * (run // 4), 32) >> (2 * (run % 4))) & 3
        block.store(32 * run, (codes - 1).floats() * d)


def mxfp4(block: Block) -> None:
    """An e8m0 exponent, 16 bytes of two e2m1 codes; half the scale times doubled values."""
    exponent = block.byte(0)
    # Exponents 0 and 1 make denormals.
    is_small = (exponent >> 1).equals(0)
    d = is_small.pick((exponent + 1) << 21, (exponent - 1) << 23).as_float()
    low, high = block.look_up_pairs(1, _E2M1_DOUBLED, d)
    block.store(0, low)
    block.store(16, high)


def nvfp4(block: Block) -> None:
    """4 unsigned e4m3 scales, 32 bytes of two e2m1 codes; half the scales times doubled values."""
    for run in range(4):
        scale, codes = block.byte(run), block.bytes(4 + 8 * run, 8)
        exponent, mantissa = (scale >> 3) & 15, scale & 7
        normal = (((exponent + 119) << 23) | (mantissa << 20)).as_float()
        d = exponent.equals(0).pick(mantissa.floats() * 2.0**-10, normal)
        d = scale.equals(0x7F).pick(d.constant(0.0), d)
        block.store(16 * run, block.look_up(codes & 15, _E2M1_DOUBLED).floats() * d)
        block.store(16 * run + 8, block.look_up(codes >> 4, _E2M1_DOUBLED).floats() * d)
