"""The documentation's compatibility table, made from the tests: ``python -m tests.parity.compatibility_table``."""

from __future__ import annotations

from collections.abc import Mapping

from tests.parity import rule
from tests.parity.factors import FACTORS
from tests.parity.rule import Effect, Mode

__all__ = ["BEGIN", "END", "table"]

BEGIN = "<!-- compatibility: generated -->"
END = "<!-- /compatibility -->"

_HEADINGS: Mapping[str, str] = {
    "optimizer": "optimizer",
    "groups": "parameter groups",
    "schedule": "learning-rate schedule",
    "accumulation": "gradient accumulation",
    "clipping": "gradient clipping",
    "precision": "precision",
    "model": "model",
    "ddp": "DDP options",
    "weighting": "a rank counts",
    "architecture": "who averages",
    "loop": "training loop",
}
_STEPS: Mapping[Mode, str] = {
    Mode.OVERLAPPED: "overlapped",
    Mode.PARTLY: "overlapped, but for these layers",
    Mode.READ: "gradients are waited for",
    Mode.SYNCHRONISED: "synchronised",
}
_PLAIN = Effect(Mode.OVERLAPPED, "", "", "")


def table() -> str:
    """In Markdown; a row for the values of a factor that have the same effect."""
    lines = ["| | with | steps are | because | what keeps the overlap |", "|---|---|---|---|---|"]
    for factor, values in FACTORS.items():
        heading = _HEADINGS[factor]
        for (steps, why, instead), titles in _by_effect(factor, values).items():
            cells = (heading, ", ".join(titles), steps, why, instead)
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
            heading = ""
    return "\n".join(lines) + "\n"


def _by_effect(factor: str, values: Mapping[str, str]) -> dict[tuple[str, str, str], list[str]]:
    """Titles of the values by what the table says of them; overlapped ones first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for value, title in sorted(values.items(), key=lambda item: _effect(factor, item[0]).mode):
        effect = _effect(factor, value)
        steps = _STEPS[effect.mode]
        if effect.mode is Mode.OVERLAPPED and _in_other_order(factor, title):
            steps += "; weights are DDP's within rounding"
        titles = found.setdefault((steps, effect.why, effect.instead), [])
        if title not in titles:
            titles.append(title)
    return found


def _effect(factor: str, value: str) -> Effect:
    return rule.EFFECTS.get((factor, value), _PLAIN)


def _in_other_order(factor: str, title: str) -> bool:
    """Whether this is so for any value that a user would call the same."""
    return any(name == factor and FACTORS[name][value] == title for name, value in rule.OTHER_ORDER)


if __name__ == "__main__":
    print(table(), end="")
