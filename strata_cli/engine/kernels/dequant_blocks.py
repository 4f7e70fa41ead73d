"""One function per tensor type: decode ``count`` blocks at ``source`` to float32 at ``target``.

Plain integer and float32 arithmetic on pointers, compiled by ``dequant.py``. Byte layouts and the
order of the float operations: ggml's block structs as gguf's numpy dequantizers state them. Every
product is rounded to float32 before it is added to anything, as numpy does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strata_cli.engine.kernels.dequant_loads import bfloat_at, half_at
from strata_cli.engine.model.quants import QuantType

F32 = np.float32
I32 = np.int32

CODE_BOOKS = frozenset(
    {
        QuantType.IQ1_S,
        QuantType.IQ1_M,
        QuantType.IQ2_XXS,
        QuantType.IQ2_XS,
        QuantType.IQ2_S,
        QuantType.IQ3_XXS,
        QuantType.IQ3_S,
        QuantType.IQ4_NL,
        QuantType.IQ4_XS,
        QuantType.MXFP4,
        QuantType.NVFP4,
    }
)


def f16(source: Any, target: Any, count: int, _table: Any) -> None:
    for i in range(count):
        target[i] = half_at(source, 2 * i)


def bf16(source: Any, target: Any, count: int, _table: Any) -> None:
    for i in range(count):
        target[i] = bfloat_at(source, 2 * i)


def q8_0(source: Any, target: Any, count: int, _table: Any) -> None:
    for i in range(count):
        block = 34 * i
        d = half_at(source, block)
        for j in range(32):
            target[32 * i + j] = F32(np.int8(source[block + 2 + j])) * d


def q4_0(source: Any, target: Any, count: int, _table: Any) -> None:
    for i in range(count):
        block = 18 * i
        d = half_at(source, block)
        for j in range(16):
            code = I32(source[block + 2 + j])
            target[32 * i + j] = d * F32((code & 15) - 8)
            target[32 * i + 16 + j] = d * F32((code >> 4) - 8)
