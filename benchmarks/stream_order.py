"""What copy orders and depths avoid, on a clock: the engine's walk, simulated link and compute.

    PYTHONPATH=. python benchmarks/stream_order.py [--copy-us 34] [--resident 0.4] [--topic 2]

For prompts of several lengths and several speeds of compute: the share of unneeded copies that is
avoided, and the time against what the needed copies alone take on the link. Traffic is made up (see
tests/experts/clocked.py): it ranks orders, it does not predict a model. 48 layers, 512 experts,
10 for each token.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import run_benchmark
from strata_cli.engine.experts.depth import AutoDepth, DepthRule, FixedDepth
from strata_cli.engine.experts.order import by_score, expected_use, oracle
from tests.experts.clocked import ClockedChunk, SimRouter, Speeds, Timing, rules_of

SHAPE = (48, 512)
TOP_K = 10
TOKENS = (1046, 1979, 4096)
DENSE_US = (300.0, 2000.0)
EXPERT_US = 2.0


def resident_experts(profile: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    """The most popular pairs of all layers together."""
    first = int(share * profile.size)
    flat = np.argsort(-profile, axis=None, kind="stable")[:first]
    resident = np.zeros(profile.size, np.bool_)
    resident[flat] = True
    return resident.reshape(profile.shape)


def orders(router: SimRouter, counts: NDArray[np.int64]) -> dict[str, NDArray[np.int64] | None]:
    last = router.prompt(1000, seed=1) // 2 + counts // 2  # half the topic of this chunk
    return {
        "id": None,
        "profile": by_score(router.profile),
        "profile, 16 classes": by_score(router.profile, finest=16),
        "last chunk and profile": by_score(expected_use(last, router.profile)),
        "oracle": oracle(counts),
    }


def depths() -> dict[str, DepthRule | None]:
    return {
        "plain": None,
        "4": FixedDepth(4),
        "16": FixedDepth(16),
        "64": FixedDepth(64),
        "auto": AutoDepth(),
    }


def line(what: str, timing: Timing) -> str:
    ratio = timing.total_us / timing.link_us
    return (
        f"{what:<58} avoided {timing.avoided:6.1%}  time {timing.total_us / 1e3:7.1f} ms "
        f"= {ratio:5.2f} x needed copies  link busy {timing.busy:6.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--copy-us", type=float, default=34.0, help="one blob over the link")
    parser.add_argument("--resident", type=float, default=0.4, help="share of experts in the cache")
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--topic", type=float, default=2.0)
    options = parser.parse_args()
    router = SimRouter(*SHAPE, TOP_K, skew=options.skew, topic=options.topic)
    resident = resident_experts(router.profile, options.resident)
    for num_tokens in TOKENS:
        counts = router.prompt(num_tokens, seed=2)
        routed = counts > 0
        print(
            f"\n{num_tokens} tokens: {routed[~resident].mean():.1%} of streamed experts are routed"
        )
        for dense_us in DENSE_US:
            speeds = Speeds(copy_us=options.copy_us, dense_us=dense_us, expert_us=EXPERT_US)
            for name, order in orders(router, counts).items():
                chunk = ClockedChunk(resident, routed, order, rules_of(FixedDepth(16)), speeds)
                print(
                    line(
                        f"  {dense_us:.0f} us before routing, depth 16, order: {name}", chunk.run()
                    )
                )
            for name, depth in depths().items():
                chunk = ClockedChunk(resident, routed, None, rules_of(depth), speeds)
                print(
                    line(
                        f"  {dense_us:.0f} us before routing, order: id, depth {name}", chunk.run()
                    )
                )


if __name__ == "__main__":
    run_benchmark(main)
