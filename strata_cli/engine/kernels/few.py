"""How a GPU runs products with few activation rows: which function of matmul_few.cu, and its plan.

Nothing here decides bits. A launch makes one matrix, or several that share their activations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from strata_cli.engine.kernels.few_shapes import (
    USUAL_WARPS,
    Shape,
    Way,
    choose_shape,
    has_together,
    kind_of,
    kinds_of,
)
from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import WARP, Matrix, Plan, Unit, code_book, defines_of
from strata_cli.engine.kernels.shapes import blocks

FEW_SOURCE = "matmul_few.cu"
MOST_MATRICES = 6
MOST_KINDS = 3
NORM_WARPS = 24  # of a block that norms what it loads


class Extra(NamedTuple):
    """What a launch does besides multiplying; zeros: nothing.

    Attributes:
        is_gated: of one matrix: what is multiplied is silu of x, perhaps times something.
        streams: of one gated matrix that ``can_mix``: its products open so many streams.
        taps: of several matrices and one token: the first one's products are convolved.
        head_dim: of one matrix: what is multiplied are heads so wide, normed as they are loaded.
        written: of one matrix and one token: its products are written to so many streams.
    """

    is_gated: bool = False
    streams: int = 0
    taps: int = 0
    head_dim: int = 0
    written: int = 0

    def function(self, *, is_grouped: bool) -> str:
        """Of one matrix, or of one of each expert."""
        if self.head_dim:
            return "normed_few"
        if is_grouped:
            return "gated_grouped_few" if self.is_gated else "grouped_few"
        name = "gated_few" if self.is_gated else "matmul_few"
        return f"{name}_mix" if self.streams else name

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of matmul_few.cu."""
        numbers = {
            "MIXED_STREAMS": self.streams,
            "CONV_TAPS": self.taps,
            "WRITTEN_STREAMS": self.written,
        }
        return tuple(f"{name}={number}" for name, number in numbers.items() if number)


GATED = Extra(is_gated=True)


@lru_cache(maxsize=4096)
def few_plan(
    matrices: tuple[Matrix, ...],
    tokens: int,
    segments: int,
    gpu: Gpu,
    experts: int = 0,
    way: Way = Way(),  # noqa: B008  # frozen
    extra: Extra = Extra(),  # noqa: B008  # frozen
) -> Plan:
    """The few-row function for matrices that share x, or for those of each of several experts.

    Args:
        matrices: one to six, with at most three kinds and one code book among them; of experts one
            or two of one kind.
        tokens: most activation rows of one segment.
        segments: passes over the tokens of 8 rows, or pairs.
        gpu: where it runs.
        experts: 0: no experts.
        way: other than the usual choice.
        extra: what the launch does besides multiplying.

    Raises:
        DeviceError: nothing fits the shared memory.
    """
    shape, num_blocks = choose_shape(matrices, tokens, segments, gpu, experts, way, extra.streams)
    if not experts:
        segments = blocks(tokens, shape.columns)
    numbers = [shape.columns, shape.teams, shape.team_warps, shape.slots]
    numbers += [shape.slot_chunks, shape.parts, shape.sums]
    if experts:
        numbers = [experts, *numbers]
    elif len(matrices) > 1:
        numbers = [*_of_several(matrices), *numbers]
    for cut in shape.cuts:
        numbers += cut[:6]
    if len(matrices) > 1 and not experts:
        numbers += [0] * (6 * (MOST_KINDS - len(shape.cuts)))
    return Plan(
        unit=_unit(matrices, shape, experts, way, extra),
        grid=(segments, num_blocks, 1),
        block=(WARP * (_num_warps(matrices[0].cols, shape, extra) + 1), 1, 1),
        shared_bytes=shape.shared_bytes,
        extents=tuple(numbers),
    )


def _num_warps(cols: int, shape: Shape, extra: Extra) -> int:
    """Warps that multiply or load activations.

    So many that none loads twice in a row: two gated activations a thread, or two octets, or two
    heads a warp.
    """
    loads = blocks(cols, 2) if extra.is_gated else blocks(cols, 16) * shape.columns
    warps = max(shape.teams * shape.team_warps, min(USUAL_WARPS, blocks(loads, WARP)))
    if extra.head_dim:
        warps = max(warps, min(NORM_WARPS, blocks(cols // extra.head_dim * shape.columns, 2)))
    return warps


def _of_several(matrices: tuple[Matrix, ...]) -> list[int]:
    """Rows and kind of each matrix, and of those that a launch has room for beside them."""
    kinds = kinds_of(matrices)
    own = [number for m in matrices for number in (m.rows, kinds.index(kind_of(m)))]
    return own + [0] * (2 * (MOST_MATRICES - len(matrices)))


def _unit(matrices: tuple[Matrix, ...], shape: Shape, experts: int, way: Way, extra: Extra) -> Unit:
    kinds = kinds_of(matrices)
    if len(matrices) > 1 and not experts:
        of_kinds = ", ".join(f"Kind<{kind.template}>" for kind in kinds)
        function = f"matmul_several<{len(matrices)}, {shape.rows}, {of_kinds}>"
    else:
        name = "grouped_pair" if len(matrices) > 1 else extra.function(is_grouped=experts > 0)
        (kind,) = kinds
        function = f"{name}<{kind.qtype.name}, {kind.lane}, {shape.rows}, {kind.align}>"
    defines = tuple(dict.fromkeys(d for kind in kinds for d in defines_of(kind.qtype)))
    defines += ("ONE_COLUMN=1",) * (shape.columns == 1)
    defines += ("SLICES_TOGETHER=1",) * has_together(matrices, shape)
    return Unit(FEW_SOURCE, function, defines + extra.defines + way.defines)


def can_mix(matrix: Matrix, tokens: int, segments: int, gpu: Gpu, streams: int) -> bool:
    """Whether tiles may have whole spans of rows of each of so many streams."""
    shape, _ = choose_shape((matrix,), tokens, segments, gpu, 0, Way(), streams)
    span_rows, rest = divmod(shape.cuts[0].tile_rows, streams)
    is_whole = matrix.rows % streams == 0 and span_rows > 0 and rest == 0
    return (
        is_whole
        and shape.parts == 1
        and span_rows.bit_count() == 1
        and matrix.rows // streams % span_rows == 0
        and matrix.cols % 32 == 0
    )


def can_share(matrices: tuple[Matrix, ...]) -> bool:
    """Whether one launch can make them all."""
    kinds = kinds_of(matrices)
    books = {kind.qtype for kind in kinds if code_book(kind.qtype)}
    return (
        1 < len(matrices) <= MOST_MATRICES
        and len(kinds) <= MOST_KINDS
        and len(books) <= 1
        and len({matrix.cols for matrix in matrices}) == 1
    )
