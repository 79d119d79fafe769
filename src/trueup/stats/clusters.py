"""Sums a cluster, the unit that is resampled: mergeable, in bounded memory.

Tokens of one prompt are not independent, so no interval in trueup treats them as if they were: statistics are kept
as sums a cluster (usually a prompt group), and clusters are what a bootstrap draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """``sums[G, ...]`` by ``keys[G]`` (sorted, unique), with at most ``capacity`` clusters.

    Beyond the capacity, clusters are pooled at random (by a hash of the key) into ``capacity`` buckets. Buckets
    are independent when clusters are, so intervals stay valid: they are those of a bootstrap with fewer units.
    """

    keys: Keys
    sums: Sums
    capacity: int
    pooled: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def from_rows(cls, keys: Keys, rows: Sums, *, capacity: int) -> ClusterSums:
        """Sum ``rows[n, ...]`` that share a key."""
        unique, row_of, pooled = dense_rows(keys, capacity=capacity)
        return cls(unique, _sum_by_row(rows, row_of), capacity, pooled)

    def merge(self, other: ClusterSums) -> ClusterSums:
        """The sums of both; associative, and symmetric up to rounding."""
        pooled = self.pooled or other.pooled
        left, right = (pool(self), pool(other)) if pooled else (self, other)
        if np.array_equal(left.keys, right.keys):
            return ClusterSums(left.keys, left.sums + right.sums, self.capacity, pooled)
        keys = np.union1d(left.keys, right.keys)
        if len(keys) > self.capacity:
            return pool(self).merge(pool(other))
        sums = np.zeros((len(keys), *left.sums.shape[1:]))
        sums[np.searchsorted(keys, left.keys)] += left.sums
        sums[np.searchsorted(keys, right.keys)] += right.sums
        return ClusterSums(keys, sums, self.capacity, pooled)

    def total(self) -> Sums:
        """The sums over all clusters."""
        total: Sums = self.sums.sum(axis=0)
        return total


def dense_rows(keys: Keys, *, capacity: int) -> tuple[Keys, npt.NDArray[np.int64], bool]:
    """Number the distinct keys: (sorted unique keys, row of each key, whether they had to be pooled)."""
    unique, row_of = np.unique(keys, return_inverse=True)
    if len(unique) <= capacity:
        return unique, row_of.astype(np.int64), False
    unique, row_of = np.unique(_bucket(keys, capacity), return_inverse=True)
    return unique, row_of.astype(np.int64), True


def pool(clusters: ClusterSums) -> ClusterSums:
    """The same sums with clusters pooled into buckets."""
    if clusters.pooled:
        return clusters
    buckets = _bucket(clusters.keys, clusters.capacity)
    keys, row_of = np.unique(buckets, return_inverse=True)
    return ClusterSums(keys, _sum_by_row(clusters.sums, row_of), clusters.capacity, pooled=True)


def _sum_by_row(rows: Sums, row_of: npt.NDArray[np.int64]) -> Sums:
    """Sum the rows that go to each of the numbers 0, 1, … (all of which occur)."""
    if len(rows) == 0:
        return rows
    order = np.argsort(row_of, kind="stable")
    first = np.flatnonzero(np.diff(row_of[order], prepend=-1))
    sums: Sums = np.add.reduceat(rows[order], first, axis=0)
    return sums


def _bucket(keys: Keys, capacity: int) -> Keys:
    return (mix(keys) % np.uint64(capacity)).astype(np.int64)


def mix(keys: Keys) -> npt.NDArray[np.uint64]:
    """Scatter 64-bit keys evenly, the same way everywhere (the finaliser of splitmix64, Steele et al. 2014)."""
    z = keys.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
