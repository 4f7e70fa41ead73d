"""Chunks for the simulator: eight fixed ones, and random ones by their seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from strata_cli.engine.experts.depth import AutoDepth, FixedDepth
from tests.experts.simulator import Case

SLOT_BYTES = 12


def plain_case(
    num_layers: int = 4,
    num_experts: int = 12,
    *,
    resident: float = 0.3,
    routed: float = 0.5,
    ring_slots: int = 20,
    depth: int = 4,
    seed: int = 0,
) -> Case:
    """A chunk with these shares of resident and routed experts."""
    rng = np.random.default_rng(seed)
    shape = (num_layers, num_experts)
    return Case(
        resident=rng.random(shape) < resident,
        routed=rng.random(shape) < routed,
        staged=np.zeros(shape, np.bool_),
        blob_bytes=(SLOT_BYTES,) * num_layers,
        ring_slots=ring_slots,
        depth=FixedDepth(depth),
        seed=seed,
    )


def _with_special_layers(case: Case) -> Case:
    """Layer 0 wants nobody, layer 1 is resident, layer 2 wants everybody."""
    resident, routed = case.resident.copy(), case.routed.copy()
    resident[0], routed[0] = False, False
    resident[1] = True
    resident[2], routed[2] = False, True
    return replace(case, resident=resident, routed=routed)


FIXED = {
    "a usual chunk": plain_case(),
    "depth 1": plain_case(depth=1),
    "depth 256": plain_case(depth=256, ring_slots=300),
    "a ring smaller than a layer": plain_case(ring_slots=3),
    "a ring larger than the list": plain_case(ring_slots=500),
    "a ring of one slot": plain_case(ring_slots=1),
    "nobody routed, all resident, all routed": _with_special_layers(plain_case()),
    "nothing to copy": plain_case(resident=1.0),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any chunk at any speed of issuer, link, compute and stager."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    num_layers, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    shape = (num_layers, num_experts)
    share = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
    resident = rng.random(shape) < draw(share)
    is_staged = rng.random(shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    order = np.argsort(rng.random(shape), axis=1)
    sizes = st.sampled_from([SLOT_BYTES, SLOT_BYTES, 5])
    depth = st.one_of(st.sampled_from([1, 2, 4, 16, 256]).map(FixedDepth), st.builds(AutoDepth))
    speed = st.integers(1, 9)
    likely = st.lists(st.integers(0, num_experts), min_size=num_layers, max_size=num_layers)
    return Case(
        resident=resident,
        routed=rng.random(shape) < draw(share),
        staged=is_staged & ~resident,
        order=draw(st.sampled_from([None, order])),
        blob_bytes=tuple(draw(st.lists(sizes, min_size=num_layers, max_size=num_layers))),
        ring_slots=draw(st.integers(1, 40)),
        depth=draw(depth),
        together=draw(st.sampled_from([1, 2, 8])),
        group=draw(st.sampled_from([1, 3, 16])),
        takes_landed=draw(st.booleans()),
        skips=draw(st.sampled_from([True, True, False])),
        lists_routed=draw(st.sampled_from([False, False, True])),
        lists_ahead=draw(st.sampled_from([False, False, True])),
        selects=draw(st.booleans()),
        ahead=draw(st.sampled_from([1, 2, 5])),
        num_likely=draw(st.one_of(st.none(), likely.map(tuple))),
        weights=(draw(speed), draw(speed), draw(speed), draw(speed)),
        seed=seed,
    )
