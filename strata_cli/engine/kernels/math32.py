"""Float32 exp, sigmoid, silu, softplus and friends as fixed sequences of IEEE operations.

The C library's and numpy's versions may give other bits in a vector body than in its remainder, or
on another machine. These are built from fused multiply-adds only, so every lane of every machine
gives the same bits. Each formula is written once, over ``Lanes``: row operations use it for
vectors, and functions whose names end in 32 are the same for single floats in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from strata_cli.engine.kernels import lanes
from strata_cli.engine.kernels.jit import intrinsic
from strata_cli.engine.kernels.lanes import Lanes, floor, magnitude

_LOG2E = 1.4426950408889634
_LN2_HI = 0.693145751953125  # 15 significant bits: n * _LN2_HI is exact for |n| < 256
_LN2_LO = 1.4286068203094173e-06
_EXP_MIN = -87.0
_EXP_MAX = 88.0
_SQRT2 = 1.4142135


def exp(x: Lanes) -> Lanes:
    """e**x, about 1 ulp; saturates outside [-87, 88] (no infinities, no denormals)."""
    x = x.at_least(_EXP_MIN).at_most(_EXP_MAX)
    n = floor(lanes.fma(x, _LOG2E, 0.5))
    r = lanes.fma(n, -_LN2_HI, x)
    r = lanes.fma(n, -_LN2_LO, r)
    # Minimax-like Taylor polynomial of e**r on |r| <= ln(2)/2, degree 7.
    p = _polynomial(r, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
    return p * ((n.integers() + 127) << 23).as_float()


def log(x: Lanes) -> Lanes:
    """Natural logarithm of a positive normal float32, about 2 ulp."""
    bits = x.as_integer()
    exponent = (bits >> 23) - 127
    m = ((bits & 0x7FFFFF) | 0x3F800000).as_float()
    is_large = m.exceeds(_SQRT2)
    m = is_large.pick(m * 0.5, m)
    exponent = is_large.pick(exponent + 1, exponent)
    # log(m) = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.1716.
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = _polynomial(z, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3)
    e = exponent.floats()
    return lanes.fma(e, _LN2_HI, lanes.fma(e, _LN2_LO, lanes.fma(p * z, s, s * 2.0)))


def sigmoid(x: Lanes) -> Lanes:
    """1 / (1 + e**-x)."""
    return 1.0 / (1.0 + exp(x.negated()))


def silu(x: Lanes) -> Lanes:
    """x * sigmoid(x)."""
    return x / (1.0 + exp(x.negated()))


def softplus(x: Lanes) -> Lanes:
    """log(1 + e**x), without overflow and without loss for very negative x."""
    y = exp(magnitude(x).negated())
    # log(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1/3 for 0 <= y <= 1.
    s = y / (2.0 + y)
    z = s * s
    p = _polynomial(z, 2 / 17, 2 / 15, 2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3)
    return x.at_least(0.0) + lanes.fma(p * z, s, s * 2.0)


def _polynomial(x: Lanes, highest: float, *others: float) -> Lanes:
    """By Horner's rule, coefficients from the highest power down."""
    value = x.constant(highest)
    for coefficient in others:
        value = lanes.fma(value, x, coefficient)
    return value


def _for_floats(formula: Callable[[Lanes], Lanes]) -> Callable[[np.float32], np.float32]:
    """A formula as a function of one float32 in compiled code."""

    def single(_typing: Any, _x: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return formula(Lanes(builder, args[0])).value

        return types.float32(types.float32), generate

    return intrinsic(single)


exp32 = _for_floats(exp)
log32 = _for_floats(log)
sigmoid32 = _for_floats(sigmoid)
silu32 = _for_floats(silu)
softplus32 = _for_floats(softplus)


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
