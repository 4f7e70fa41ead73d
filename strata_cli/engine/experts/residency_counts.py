"""What became of the experts that windows of the decode path routed to, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class ResidencyCounts:
    """Of all windows so far; the difference of two is what happened in between.

    A distinct expert of a layer that a window routes to counts once: routed = hits + pcie + cpu +
    dropped.

    Attributes:
        windows: passes of the decode path.
        routed: experts that they wanted.
        hits: of these, found in a slot of the device's memory.
        pcie: read by the device over its link to host memory.
        cpu: computed on the host.
        dropped: left out.
        swaps: experts that were brought into a slot in place of another, or are under way.
    """

    windows: int = 0
    routed: int = 0
    hits: int = 0
    pcie: int = 0
    cpu: int = 0
    dropped: int = 0
    swaps: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the routed experts that were in a slot, 0..1; 0 where none was routed."""
        return self._share(self.hits)

    @property
    def pcie_share(self) -> float:
        """Share of the routed experts that the device read over its link, 0..1."""
        return self._share(self.pcie)

    def as_dict(self) -> dict[str, int | float]:
        """The counts and the two shares, for reports."""
        shares = {"hit_rate": self.hit_rate, "pcie_share": self.pcie_share}
        return asdict(self) | {name: round(share, 6) for name, share in shares.items()}

    def __add__(self, other: ResidencyCounts) -> ResidencyCounts:
        return ResidencyCounts(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )

    def __sub__(self, other: ResidencyCounts) -> ResidencyCounts:
        return ResidencyCounts(
            *(getattr(self, f.name) - getattr(other, f.name) for f in fields(self))
        )

    def _share(self, count: int) -> float:
        return count / self.routed if self.routed else 0.0
