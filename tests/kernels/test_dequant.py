"""Compiled block decoders against the plain ones, bit for bit, for every tensor type."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels import dequant, jit
from strata_cli.engine.kernels.dequant import Dequantizer, copy_decoded, dequantizer
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, row_bytes
from tests.model.oracle import ORACLE

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
GUARD = np.float32(12345.0)


@nogil_jit
def decode_row(decoder: Dequantizer, packed: Bytes, out: Floats, weights: int) -> None:
    copy_decoded(decoder, address_of(packed), address_of(out), weights)


def decoded(qtype: QuantType, packed: Bytes, cols: int) -> Floats:
    """Rows decoded one at a time, each from a skewed address and with a guard behind it."""
    rows = np.empty((len(packed), cols), np.float32)
    for skew, (data, row) in enumerate(zip(packed, rows, strict=True)):
        moved = np.empty(data.size + skew, np.uint8)
        moved[skew:] = data
        out = np.full(cols + 1 + skew, GUARD, np.float32)
        decode_row(dequantizer(qtype), moved[skew:], out[skew:], cols)
        assert out[-1] == GUARD
        row[:] = out[skew:-1]
    return rows


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    """Equal bits; any NaN equals any NaN."""
    differs = (actual.view(np.uint32) != expected.view(np.uint32)) & ~(
        np.isnan(actual) & np.isnan(expected)
    )
    assert not differs.any(), f"{differs.sum()} weights differ, first at {np.argwhere(differs)[0]}"


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_any_bytes_decode_as_the_reference_does(qtype: QuantType) -> None:
    rng = np.random.default_rng(qtype)
    for blocks in (1, 2, 7):
        cols = blocks * BLOCK[qtype].weights
        packed = rng.integers(0, 256, (9, row_bytes(qtype, cols)), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = dequantize(qtype, packed, cols)
        assert_same_bits(decoded(qtype, packed, cols), expected)


def test_the_stored_values_of_other_quantizers_are_met() -> None:
    with np.load(ORACLE / "dequant.npz") as stored:
        names = [name.removesuffix("bytes") for name in stored.files if name.endswith("bytes")]
        for name in names:
            expected, packed = stored[f"{name}values"], stored[f"{name}bytes"]
            qtype = QuantType[name.split(".")[0]]
            assert_same_bits(decoded(qtype, packed, expected.shape[1]), expected)
    assert len(names) >= 25


def test_every_half_widens_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    packed = halves.view(np.uint8).reshape(1, -1)
    expected = halves.view(np.float16).astype(np.float32).reshape(1, -1)
    assert_same_bits(decoded(QuantType.F16, packed, halves.size), expected)


FRESH = """
import sys, threading
from numba.core import event
from strata_cli.engine.kernels import dequant, jit
from strata_cli.engine.kernels.dequant import dequantizer
with event.install_recorder("numba:compile") as recorder:
    threads = [threading.Thread(target=dequantizer, args=(int(i),)) for i in sys.argv[1:] * 3]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print([e.data["dispatcher"].__name__ for _, e in recorder.buffer], dequantizer(8).function != 0)
"""


def test_a_second_process_compiles_no_decoder_again() -> None:
    types = (QuantType.Q8_0, QuantType.Q4_0, QuantType.IQ3_S)
    for qtype in types:
        dequantizer(qtype)
    root = Path(__file__).parents[2]
    ids = [str(int(qtype)) for qtype in types]
    command = [sys.executable, "-c", FRESH, *ids]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True"]


def test_the_compiler_runs_in_a_thread_where_no_interrupt_can_get_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    compile_function = jit.c_function

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return compile_function(*args)

    monkeypatch.setattr(dequant, "c_function", noted)
    monkeypatch.setattr(dequant, "_ready", {})
    dequantizer(QuantType.Q8_0)
    assert threads
    assert threading.main_thread() not in threads
