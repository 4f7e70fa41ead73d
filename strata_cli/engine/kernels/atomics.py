"""What compiled code needs to work beside other threads and devices: atomics, a clock, a rest.

Addresses are plain integers (intp), to whole numbers of 32 or 64 bits that are aligned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.jit import intrinsic

cgutils: Any = numba_cgutils  # carries no types
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_CLOCK_MONOTONIC = 1  # of Linux


@intrinsic
def load_acquire(_typing: Any, _address: Any) -> Any:
    """The int32 at an address; what its writer wrote before can be read from here on."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=4)

    return types.int32(types.intp), generate


@intrinsic
def store_release(_typing: Any, _address: Any, _value: Any) -> Any:
    """Write an int32; who reads it finds all that was written before. Takes (address, value)."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        builder.store_atomic(args[1], pointer, ordering="release", align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.int32), generate


@intrinsic
def fetch_add(_typing: Any, _address: Any, _value: Any) -> Any:
    """Add to the int64 at an address, ordered with all else; gives what was there before."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def monotonic_ns(_typing: Any) -> Any:
    """Nanoseconds on a clock that only goes forward."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        time = cgutils.alloca_once(builder, _I64, size=2)
        kind = ir.FunctionType(_I32, [_I32, _I64.as_pointer()])
        function = _external(builder, "clock_gettime", kind)
        builder.call(function, [ir.Constant(_I32, _CLOCK_MONOTONIC), time])
        seconds = builder.load(time)
        rest = builder.load(builder.gep(time, [ir.Constant(_I32, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), rest)

    return types.int64(), generate


@intrinsic
def rest_briefly(_typing: Any) -> Any:
    """Between two looks at a flag: leave the core to its other thread for some cycles."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if "+sse2" in context.codegen().magic_tuple()[2].split(","):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(_external(builder, "llvm.x86.sse2.pause", kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(_typing: Any) -> Any:
    """Let other threads have the processor, if any wants it."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.call(_external(builder, "sched_yield", ir.FunctionType(_I32, [])), [])
        return context.get_dummy_value()

    return types.void(), generate


def _external(builder: Any, name: str, kind: Any) -> Any:
    """A function of the C library."""
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, kind, name=name)
