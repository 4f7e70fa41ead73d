"""A quantized block as a decoder sees it: its bytes as ``Lanes`` in, its weights out.

A decoder is a plain function of a ``Block``; it runs once, when its type is compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from strata_cli.engine.kernels.lanes import Lanes

_I64 = ir.IntType(64)


class Block:
    """One quantized block being decoded; positions are bytes from its start, weights from zero."""

    def __init__(self, builder: Any, source: Any, target: Any, table: Any) -> None:
        self._builder = builder
        self._source = source
        self._target = target
        self._table = table

    def _load(self, base: Any, index: Any, kind: Any) -> Lanes:
        at = self._builder.bitcast(self._builder.gep(base, [index]), kind.as_pointer())
        return Lanes(self._builder, self._builder.load(at, align=1))

    def half(self, at: int) -> Lanes:
        """The IEEE half at a byte, as float32."""
        return self.half_from(self.integer(at, 16))

    def half_from(self, bits: Lanes) -> Lanes:
        """The float32 of an IEEE half given as a 16-bit integer.

        By integers, because LLVM calls a function that need not be there where the CPU cannot.
        """
        wide = bits.unsigned(32)
        magnitude = (wide & 0x7FFF) << 13
        exponent = wide & 0x7C00
        normal = magnitude + (112 << 23)
        denormal = (magnitude + (113 << 23)).as_float() - 2.0**-14
        special = magnitude + (224 << 23)
        value = exponent.equals(0).pick(denormal.as_integer(), normal)
        value = exponent.equals(0x7C00).pick(special, value)
        return (value | ((wide & 0x8000) << 16)).as_float()

    def integer(self, at: int, bits: int) -> Lanes:
        """A little-endian integer at a byte."""
        return self._load(self._source, ir.Constant(_I64, at), ir.IntType(bits))

    def byte(self, at: int) -> Lanes:
        """The unsigned byte at a position, as a 32-bit scalar."""
        return self.integer(at, 8).unsigned(32)

    def bytes(self, at: int, count: int) -> Lanes:
        """Consecutive bytes as 8-bit lanes."""
        return self._load(self._source, ir.Constant(_I64, at), ir.VectorType(ir.IntType(8), count))

    def entry(self, index: Lanes, width: int) -> Lanes:
        """Row ``index`` (32-bit scalar) of the type's code book: width 8-bit lanes."""
        at = self._builder.mul(self._builder.zext(index.value, _I64), ir.Constant(_I64, width))
        return self._load(self._table, at, ir.VectorType(ir.IntType(8), width))

    def store(self, first: int, values: Lanes) -> None:
        """Write float32 weights from weight ``first`` on."""
        at = self._builder.gep(self._target, [ir.Constant(_I64, first)])
        at = self._builder.bitcast(at, values.value.type.as_pointer())
        self._builder.store(values.value, at, align=4)
