"""What one thread tells another about routing: which experts of a layer any token wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.errors import ShapeError, StateError


class Gate:
    """A chunk's routing as far as it is known. One thread publishes, any thread reads.

    A layer's row is an immutable object, and one store makes it visible: there is no moment at
    which a reader could see that a layer is published and not yet its row.

    Attributes:
        rows: per layer, None until published; then a byte for each rank, 1 where routed.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_experts = num_experts
        self._rows: list[bytes | None] = [None] * num_layers

    @property
    def rows(self) -> Sequence[bytes | None]:
        """See the class."""
        return self._rows

    def publish(self, layer: int, routed: NDArray[np.bool_]) -> None:
        """Make a layer's routing known: routed [E], by rank.

        Raises:
            StateError: the layer was published before.
            ShapeError: routed has another shape.
        """
        if routed.shape != (self._num_experts,):
            raise ShapeError(f"routing of {self._num_experts} experts cannot be {routed.shape}")
        if self._rows[layer] is not None:
            raise StateError(f"the routing of layer {layer} was published before")
        self._rows[layer] = routed.astype(np.uint8).tobytes()
