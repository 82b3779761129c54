"""What became of each test, put together from what its processes noted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Outcome", "summarise"]


@dataclass
class Outcome:
    """The outcome of one test.

    Attributes:
        result: ``passed``, ``failed``, ``skipped`` (by Lightning), or ``lost``: it hung, or its process died.
        message: The traceback, or Lightning's reason to skip.
        made: Times the test made a strategy of ours.
        ranks: The most ranks on which ours scheduled gradients; 0 if it never came to that.
        steps: Optimizer steps in the run with the most.
        overlapped: Of these, steps that crossed the barrier.
    """

    result: str = "lost"
    message: str = ""
    made: int = 0
    ranks: int = 0
    steps: int = 0
    overlapped: int = 0


def summarise(events: Iterable[dict[str, Any]]) -> dict[str, Outcome]:
    """Outcomes of the tests that were begun, by id."""
    outcomes: dict[str, Outcome] = {}
    for event in events:
        kind, test = event["kind"], event["test"]
        if kind == "started":
            outcomes[test] = Outcome()
            continue
        outcome = outcomes.get(test)
        if outcome is None:
            continue
        if kind in ("passed", "skipped", "failed"):
            if outcome.result != "failed":
                outcome.result, outcome.message = kind, event["message"]
        elif kind == "made":
            outcome.made += 1
        elif kind == "scheduled":
            outcome.ranks = max(outcome.ranks, event["ranks"])
        elif kind == "trained" and event["steps"] >= outcome.steps:
            outcome.steps, outcome.overlapped = event["steps"], event["overlapped"]
    return outcomes
