"""Sizes as laws in batch and sequence length, from their values at a few points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from thrifty.planner.program import FEATURES, features


def _product(batch: bool, shift: int) -> np.ndarray:
    """B * (S + shift), or without B, in terms of `FEATURES`."""
    out = np.zeros(len(FEATURES))
    out[FEATURES.index("BS" if batch else "S")] = 1
    out[FEATURES.index("B" if batch else "1")] = shift
    return out


_SHIFTED = [_product(batch, shift) for batch in (True, False) for shift in (1, -1)]


class Laws:
    """Fitted laws: `coefficients` (rows, features), and `exact` (rows,) whether the law holds at every point."""

    def __init__(self, coefficients: np.ndarray, exact: np.ndarray) -> None:
        self.coefficients, self.exact = coefficients, exact


def fit_laws(points: Sequence[tuple[int, int]], values: np.ndarray) -> Laws:
    """Finds for every row of values the simplest combination of `FEATURES` that gives it at all points.

    Single products are tried first (also with S + 1 and S - 1, as class tokens and shifted labels make them), then sums
    of two, then of three as far as there are more points than terms; what is left gets a least-squares fit and is
    reported as not exact.

    Args:
        points: (batch, seq) of each column.
        values: (rows, points) numbers.
    """
    x = features(*np.array(points, np.int64).T)
    distinct, inverse = np.unique(values, axis=0, return_inverse=True)
    coefficients = np.zeros((len(distinct), len(FEATURES)))
    exact = np.zeros(len(distinct), bool)
    # Where B or S never varies, its products are multiples of simpler ones: the first of each kind will do.
    usable = [i for i in range(len(FEATURES)) if not any(_parallel(x[:, i], x[:, j]) for j in range(i))]
    identity = np.eye(len(FEATURES))

    def attempt(columns: np.ndarray) -> None:
        """Columns: (terms, features)."""
        open_rows = np.flatnonzero(~exact)
        basis = x @ columns.T
        found = np.linalg.lstsq(basis, distinct[open_rows].T, rcond=None)[0].T
        off = np.abs(found @ basis.T - distinct[open_rows]).max(axis=1, initial=0.0)
        rows = open_rows[off <= 1e-9 * np.abs(distinct[open_rows]).max(axis=1, initial=0.0)]
        coefficients[rows] = found[np.isin(open_rows, rows)] @ columns
        exact[rows] = True

    for one in [identity[[i]] for i in usable] + [product[None] for product in _SHIFTED]:
        attempt(one)
    for terms in range(2, min(4, len(points))):
        for chosen in itertools.combinations(usable, terms):
            if not exact.all():
                attempt(identity[list(chosen)])
    rest = np.flatnonzero(~exact)
    if len(rest):
        scale = x.max(axis=0)
        coefficients[rest] = np.linalg.lstsq(x / scale, distinct[rest].T, rcond=None)[0].T / scale
        left = np.abs(coefficients[rest] @ x.T - distinct[rest]).max(axis=1)
        exact[rest] = (left < 0.5) & (len(points) > len(FEATURES))
    return Laws(coefficients[inverse.ravel()], exact[inverse.ravel()])


def _parallel(left: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.allclose(left * right[0], right * left[0], rtol=1e-12))
