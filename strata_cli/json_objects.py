"""Objects of JSON whose keys are all different.

JSON leaves open what a key means that is there twice; parsers keep the last one and say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from strata_cli.errors import quoted


class RepeatedKeyError(ValueError):
    """An object has a key twice: one of its values would be lost."""


def distinct_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object from its keys and values, for json.loads(object_pairs_hook=...).

    Raises:
        RepeatedKeyError: a key is there twice.
    """
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RepeatedKeyError(f"{quoted(str(key))} is there twice")
        result[key] = value
    return result


def check_keys(data: bytes) -> None:
    """Refuse JSON that a stricter parser has taken already, if an object of it has a key twice.

    Raises:
        RepeatedKeyError: it has.
        ValueError: a whole number has more digits than Python reads.
        RecursionError: it is nested too deeply.
    """
    json.loads(data, object_pairs_hook=distinct_keys)
