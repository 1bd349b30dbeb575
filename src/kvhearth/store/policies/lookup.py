"""Finds which row of a column holds a fingerprint, at about eight bytes a row: the columns that policies keep by slot
have no room for a dict's objects. It holds row numbers only; the fingerprints stay where they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Lookup:
    """Open addressing with linear probing over a uint64 column, at most half full; removal leaves no tombstones.

    Fingerprints are well mixed: their low bits are taken as they are. A row's must not change while the row is in.
    """

    def __init__(self, column: NDArray[np.uint64]) -> None:
        size = 1 << max(2 * len(column) - 1, 1).bit_length()
        self._column = column.data
        self._mask = size - 1
        self._rows = np.zeros(size, np.uint32).data  # row + 1; 0 is free

    def find(self, fingerprint: int) -> int:
        """A row with ``fingerprint``, -1 when there is none."""
        rows, column, mask = self._rows, self._column, self._mask
        at = fingerprint & mask
        while row := rows[at]:
            if column[row - 1] == fingerprint:
                return int(row) - 1
            at = (at + 1) & mask
        return -1

    def add(self, row: int) -> None:
        """Enter a row that is not in the table, under the fingerprint it has now."""
        rows, mask = self._rows, self._mask
        at = self._column[row] & mask
        while rows[at]:
            at = (at + 1) & mask
        rows[at] = row + 1

    def remove(self, row: int) -> None:
        """Take out a row that is in the table."""
        rows, column, mask = self._rows, self._column, self._mask
        hole = column[row] & mask
        while rows[hole] != row + 1:
            hole = (hole + 1) & mask
        at = hole
        while other := rows[at := (at + 1) & mask]:
            # An entry may move back into the hole unless its home lies between the hole and where it is.
            if ((at - column[other - 1]) & mask) >= ((at - hole) & mask):
                rows[hole] = other
                hole = at
        rows[hole] = 0
