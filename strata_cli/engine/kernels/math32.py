"""Float32 exp, sigmoid, silu, softplus and friends as fixed sequences of IEEE operations.

The C library's and numpy's versions may give other bits in a vector body than in its remainder, or
on another machine. These are built from fused multiply-adds only, so every lane of every machine
gives the same bits, and LLVM vectorises loops over them. Call them from compiled code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from strata_cli.engine.kernels.jit import inline_jit, intrinsic

F32 = np.float32
_LOG2E = F32(1.4426950408889634)
_LN2_HI = F32(0.693145751953125)  # 15 significant bits: n * _LN2_HI is exact for |n| < 256
_LN2_LO = F32(1.4286068203094173e-06)
_EXP_MIN = F32(-87.0)
_EXP_MAX = F32(88.0)


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return signature, generate


@intrinsic
def float_from_bits(_typing: Any, bits: Any) -> Any:
    """The float32 whose IEEE bit pattern is the int32 given."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_from_float(_typing: Any, value: Any) -> Any:
    """The IEEE bit pattern of a float32 as int32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@inline_jit
def exp32(x: np.float32) -> np.float32:
    """e**x, about 1 ulp; saturates outside [-87, 88] (no infinities, no denormals)."""
    x = min(max(x, _EXP_MIN), _EXP_MAX)
    n = np.floor(fma(x, _LOG2E, F32(0.5)))
    r = fma(n, -_LN2_HI, x)
    r = fma(n, -_LN2_LO, r)
    # Minimax-like Taylor polynomial of e**r on |r| <= ln(2)/2, degree 7.
    p = F32(1.0 / 5040.0)
    p = fma(p, r, F32(1.0 / 720.0))
    p = fma(p, r, F32(1.0 / 120.0))
    p = fma(p, r, F32(1.0 / 24.0))
    p = fma(p, r, F32(1.0 / 6.0))
    p = fma(p, r, F32(0.5))
    p = fma(p, r, F32(1.0))
    p = fma(p, r, F32(1.0))
    scale = float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return F32(p * scale)


@inline_jit
def log32(x: np.float32) -> np.float32:
    """Natural logarithm of a positive normal float32, about 2 ulp."""
    bits = bits_from_float(x)
    exponent = np.int32((bits >> np.int32(23)) - np.int32(127))
    m = float_from_bits(np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)))
    if m > F32(1.4142135):
        m = F32(m * F32(0.5))
        exponent = np.int32(exponent + np.int32(1))
    # log(m) = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.1716.
    s = F32((m - F32(1.0)) / (m + F32(1.0)))
    z = F32(s * s)
    p = F32(2.0 / 11.0)
    p = fma(p, z, F32(2.0 / 9.0))
    p = fma(p, z, F32(2.0 / 7.0))
    p = fma(p, z, F32(2.0 / 5.0))
    p = fma(p, z, F32(2.0 / 3.0))
    p = fma(F32(p * z), s, F32(F32(2.0) * s))
    e = F32(exponent)
    return F32(fma(e, _LN2_HI, fma(e, _LN2_LO, p)))


@inline_jit
def sigmoid32(x: np.float32) -> np.float32:
    """1 / (1 + e**-x)."""
    return F32(F32(1.0) / (F32(1.0) + exp32(F32(-x))))


@inline_jit
def silu32(x: np.float32) -> np.float32:
    """x * sigmoid(x)."""
    return F32(x / (F32(1.0) + exp32(F32(-x))))


@inline_jit
def softplus32(x: np.float32) -> np.float32:
    """log(1 + e**x), without overflow and without loss for very negative x."""
    y = exp32(F32(-abs(x)))
    # log(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1/3 for 0 <= y <= 1.
    s = F32(y / (F32(2.0) + y))
    z = F32(s * s)
    p = F32(2.0 / 17.0)
    p = fma(p, z, F32(2.0 / 15.0))
    p = fma(p, z, F32(2.0 / 13.0))
    p = fma(p, z, F32(2.0 / 11.0))
    p = fma(p, z, F32(2.0 / 9.0))
    p = fma(p, z, F32(2.0 / 7.0))
    p = fma(p, z, F32(2.0 / 5.0))
    p = fma(p, z, F32(2.0 / 3.0))
    tail = fma(F32(p * z), s, F32(F32(2.0) * s))
    return F32(max(x, F32(0.0)) + tail)
