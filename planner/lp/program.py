"""A linear or integer program as flat lists: variables are numbers, rows are lists of terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import inf

Variable = int  # position of a variable in the program's lists

Terms = list[tuple[Variable, float]]  # Σ factor · variable. A variable may occur more than once.


def steps(curve: Iterable[Variable | None]) -> Iterator[tuple[int, Terms]]:
    """Yield by how much a share grows at each position of its curve, but for those where it stays as it is. None stands for 0."""
    previous: Variable | None = None
    for position, variable in enumerate(curve):
        if variable is not None and variable != previous:
            yield position, [(variable, 1.0)] if previous is None else [(variable, 1.0), (previous, -1.0)]
        previous = variable


def scaled(terms: Iterable[tuple[Variable, float]], factor: float) -> Terms:
    """Return factor · terms."""
    return [(variable, each * factor) for variable, each in terms]


class Program:
    """min Σ costs · x, where each row is between `least` and `most`, and each x between `lower` and `upper`.

    By variable: `costs`, `lower`, `upper`, and `whole` (x is a whole number). Row r has the `columns` and `factors` from
    `starts[r]` to `starts[r + 1]`.
    """

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.starts: list[int] = [0]
        self.columns: list[Variable] = []
        self.factors: list[float] = []

    def variable(self, upper: float = 1.0, *, whole: bool = False) -> Variable:
        """Add a variable from 0 to `upper`."""
        self.costs.append(0.0)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def minimise(self, terms: Iterable[tuple[Variable, float]]) -> None:
        """Add the terms to the objective."""
        for variable, factor in terms:
            self.costs[variable] += factor

    def at_most(self, terms: Terms, right: float) -> None:
        """Add the row Σ terms ≤ right."""
        self._add(terms, -inf, right)

    def at_least(self, terms: Terms, right: float) -> None:
        """Add the row Σ terms ≥ right."""
        self._add(terms, right, inf)

    def equal(self, terms: Terms, right: float) -> None:
        """Add the row Σ terms = right."""
        self._add(terms, right, right)

    def ascend(self, curve: Iterable[Variable | None]) -> None:
        """Add a row for each two neighbours of a curve: the later one is no less. None stands for 0."""
        for lower, upper in pairwise(curve):
            if lower is not None and upper is not None and lower != upper:
                self.at_least([(upper, 1.0), (lower, -1.0)], 0)

    def levels(self, rows: Iterable[Terms], most: Iterable[float]) -> None:
        """Add Σ row ≤ most for each row, where neighbours have most terms in common.

        Each sum is a variable, and its row holds only the difference to the one before, so that solvers have far fewer terms.
        """
        before: dict[Variable, float] = {}
        for row, right in zip(rows, most, strict=True):
            level = self.variable(right)
            self.lower[level] = -inf
            terms = {level: -1.0}
            for variable, factor in row:
                terms[variable] = terms.get(variable, 0.0) + factor
            changed = dict(terms)
            for variable, factor in before.items():
                changed[variable] = changed.get(variable, 0.0) - factor
            self.equal([(variable, factor) for variable, factor in changed.items() if factor], 0)
            before = terms

    def _add(self, terms: Terms, least: float, most: float) -> None:
        factors = dict(terms)
        if len(factors) < len(terms):
            factors = dict.fromkeys(factors, 0.0)
            for variable, factor in terms:
                factors[variable] += factor
        self.columns += factors.keys()
        self.factors += factors.values()
        self.starts.append(len(self.columns))
        self.least.append(least)
        self.most.append(most)
