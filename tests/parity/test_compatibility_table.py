"""What the documentation says about compatibility is what the tests test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import rule
from tests.parity.compatibility_table import BEGIN, END, table
from tests.parity.factors import FACTORS

PAGE = Path(__file__).parents[2] / "docs" / "overlap.md"


def test_the_documentation_has_this_table() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    between, after = rest.split(END)
    assert before
    assert after
    assert between.strip() == table().strip(), (
        f"put what `python -m tests.parity.compatibility_table` prints between {BEGIN} and {END} in docs/overlap.md"
    )


def test_every_value_is_in_it_and_has_one_line_only() -> None:
    lines = table().splitlines()
    for values in FACTORS.values():
        for title in set(values.values()) - {"none"}:
            mentions = [line for line in lines if title in line]
            assert mentions, title
    effects = {(line.split("|")[3].strip(), line.split("|")[4].strip()) for line in lines[2:]}
    assert {effect.why for effect in rule.EFFECTS.values()} == {why for _, why in effects if why}


@pytest.mark.parametrize("factor", FACTORS)
def test_values_that_look_the_same_have_the_same_effect(factor: str) -> None:
    for title in FACTORS[factor].values():
        alike = {rule.EFFECTS.get((factor, value)) for value, other in FACTORS[factor].items() if other == title}
        assert len(alike) == 1, title


def test_an_overlap_that_is_exact_within_rounding_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm_clipping() -> str:
        return next(line for line in table().splitlines() if '"norm"' in line)

    assert "overlapped; weights are DDP's within rounding" in norm_clipping()
    monkeypatch.setattr(rule, "OTHER_ORDER", frozenset())
    assert "rounding" not in norm_clipping()
