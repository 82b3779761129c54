"""Few rows in which every allowed pair of values of two factors occurs: a greedy covering array of strength two."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["covering_array", "pairs_in", "possible_pairs"]

Value = tuple[str, str]
"""(factor, value)."""

Allowed = Callable[[Value, Value], bool]


def covering_array(
    factors: Mapping[str, Iterable[str]],
    allowed: Allowed,
    *,
    seed: int = 0,
    candidates: int = 12,
    after: Iterable[Mapping[str, str]] = (),
) -> list[dict[str, str]]:
    """Choose rows until every allowed pair occurs; the same ones each time.

    Each row starts from a pair that has not occurred yet and takes, factor by factor in a random order, the value that
    brings most new pairs, any of them where several do. Of some such rows the one with most new pairs is kept.

    Args:
        factors: Values by factor.
        allowed: Whether two values may be in one row.
        seed: Of the orders in which factors are filled in.
        candidates: How many rows are made for each one that is kept.
        after: Rows that there are already; none of them is returned.

    Raises:
        ValueError: If a pair is allowed, but no row with it is.
    """
    values = {factor: list(of_factor) for factor, of_factor in factors.items()}
    generator = random.Random(seed)
    missing = possible_pairs(values, allowed).difference(*(pairs_in(row.items()) for row in after))
    rows = []
    while missing:
        start = sorted(min(missing, key=sorted))
        best: tuple[Value, ...] = ()
        gain = 0
        for _ in range(candidates):
            order = [factor for factor in values if factor not in dict(start)]
            generator.shuffle(order)
            row = _filled(tuple(start), order, values, allowed, missing, generator)
            if row is None:
                raise ValueError(f"No row may have {start}.")
            new = len(pairs_in(row) & missing)
            if new > gain:
                best, gain = row, new
        missing -= pairs_in(best)
        chosen = dict(best)
        rows.append({factor: chosen[factor] for factor in values})
    return rows


def possible_pairs(factors: Mapping[str, Iterable[str]], allowed: Allowed) -> set[frozenset[Value]]:
    """All allowed pairs of values of two factors."""
    by_factor = [[(factor, value) for value in values] for factor, values in factors.items()]
    return {
        frozenset((one, other))
        for first, second in itertools.combinations(by_factor, 2)
        for one, other in itertools.product(first, second)
        if allowed(one, other)
    }


def pairs_in(row: Iterable[Value]) -> set[frozenset[Value]]:
    """The pairs that occur in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


def _filled(
    row: tuple[Value, ...],
    order: Sequence[str],
    values: Mapping[str, Sequence[str]],
    allowed: Allowed,
    missing: set[frozenset[Value]],
    generator: random.Random,
) -> tuple[Value, ...] | None:
    """``row`` with a value for each factor of ``order``; goes back where a choice leaves a later factor none."""
    if not order:
        return row
    factor, *rest = order
    options = [(factor, value) for value in values[factor]]
    options = [option for option in options if all(allowed(option, taken) for taken in row)]
    generator.shuffle(options)
    options.sort(key=lambda option: -sum(frozenset((option, taken)) in missing for taken in row))
    for option in options:
        filled = _filled((*row, option), rest, values, allowed, missing, generator)
        if filled is not None:
            return filled
    return None
