"""Whether machines without accelerators, as parameter servers, are worth their money."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["SpareMachines", "best_value", "spare_machines", "spare_machines_in_words"]

_LITTLE = 0.03  # of a step; less than a model of a network can tell


@dataclass(frozen=True, slots=True)
class SpareMachines:
    """What some spare machines bring.

    Attributes:
        servers: How many.
        step_seconds: Of a step with them.
        gain: How many times as fast a step is as with an all-reduce.
        worth: The price of one of them, in workers, up to which the same money trains more than without: k machines at
            price c make n workers ``gain`` times as fast for ``(n + kc) / n`` times the money.
    """

    servers: int
    step_seconds: float
    gain: float
    worth: float


def spare_machines(step_on: Callable[[LinkModel], float], link: LinkModel) -> tuple[SpareMachines, ...]:
    """Try a quarter, half and as many spare machines as there are workers, and as many as ``link`` has.

    Args:
        step_on: Seconds of a step on a link.
        link: The network; with any architecture.
    """
    workers = link.workers
    if workers < 2:
        return ()
    alone = step_on(link.without_servers)
    counts = {workers // 4, workers // 2, workers, min(link.servers, workers)} - {0}
    found = []
    for count in sorted(counts):
        seconds = step_on(replace(link, architecture="ps", servers=count))
        gain = alone / seconds
        found.append(SpareMachines(count, seconds, gain, max(gain - 1, 0.0) * workers / count))
    return tuple(found)


def best_value(tried: Sequence[SpareMachines]) -> SpareMachines | None:
    """Those that may cost most each; ``None`` if none brings anything that shows."""
    helpful = [one for one in tried if one.gain >= 1 + _LITTLE]
    return max(helpful, key=lambda one: (one.worth, one.servers), default=None)


def spare_machines_in_words(tried: Sequence[SpareMachines]) -> str:
    """A sentence that says when they are worth their money."""
    best = best_value(tried)
    if best is None:
        return "Spare machines as parameter servers (architecture='ps') bring nothing here that shows."
    most = max(tried, key=lambda one: one.gain)
    text = f"{_count(best)} as parameter servers (architecture='ps') make a step {best.gain:.2f}x as fast, and are "
    text += f"worth their money where each costs less than {best.worth:.0%} of a worker"
    if most.servers != best.servers and most.gain > best.gain + _LITTLE:
        text += f"; {_count(most)} make it {most.gain:.2f}x, at less than {most.worth:.0%} each"
    return f"{text}."


def _count(machines: SpareMachines) -> str:
    return f"{machines.servers:,} spare machine{'s' if machines.servers > 1 else ''}"
