"""Columns of n plants, NaN where nothing is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def nan_columns(
    owner: str, names: Sequence[str], n: int, values: Mapping[str, ArrayLike]
) -> dict[str, NDArray[np.float64]]:
    """A float64 array of shape ``(n,)`` for every name, filled from `values`, NaN elsewhere.

    Raises:
        TypeError: a value whose name is no field of `owner`.
        ValueError: a value that does not broadcast to ``(n,)``.
    """
    unknown = values.keys() - set(names)
    if unknown:
        raise TypeError(f"{owner} has no field {sorted(unknown)}")
    columns = {name: np.full(n, np.nan) for name in names}
    for name, value in values.items():
        columns[name][:] = np.asarray(value, dtype=np.float64)
    return columns
