"""Where tuning looks first: what the simulator says for a model of which only the sizes are known.

How long each layer computes is not known before the first step. It is taken to be in proportion to its gradients, and
all of it to be as long as the communication, where order matters most. What counts on most links is the link, which was
measured: how much must be in flight to fill it, and how small a message may be. A guess costs a trial, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_bytescheduler.simulation import LayerProfile, LinkModel, ModelProfile, Schedule, simulate
from lightning_bytescheduler.tuning.first_guesses import distance, first_guesses
from lightning_bytescheduler.tuning.link import LinkEstimate
from lightning_bytescheduler.tuning.point import TuningPoint
from lightning_bytescheduler.tuning.search_space import SearchSpace

__all__ = ["likely_points"]

_MOST_LAYERS = 24  # neighbours are joined beyond; it takes milliseconds to play a step of so many
_NEAR = 0.5  # octaves
_BACKWARD = 2.0  # times the forward pass
_MESSAGES_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # threads of one, streams of the other


def likely_points(
    space: SearchSpace,
    *,
    layer_bytes: Sequence[int],
    bucket_bytes: int,
    link: LinkEstimate,
    workers: int,
    backend: str,
    start: TuningPoint,
) -> tuple[TuningPoint, ...]:
    """The points that a simulation of a typical model of this size likes best.

    Args:
        space: Where to look.
        layer_bytes: Sizes of the layers' gradients, in the order of the forward pass.
        bucket_bytes: Size at which DDP closes a bucket.
        link: As measured.
        workers: How many train together.
        backend: What reduces gradients.
        start: What is measured anyway; what is near it is left out.
    """
    profile = _typical(layer_bytes, seconds=link.beta * sum(layer_bytes))
    network = replace(
        LinkModel.measured(workers=workers, alpha=link.alpha, beta=link.beta),
        messages_in_flight=_MESSAGES_IN_FLIGHT.get(backend),
    )
    width = 4  # of a parameter on the wire; only ratios matter

    def seconds(point: TuningPoint) -> float:
        credit, partition = point.sizes
        schedule = Schedule.scheduled(
            partition_bytes=width * partition, credit_bytes=width * credit, bucket_bytes=bucket_bytes
        )
        return simulate(profile, network, schedule, steps=1).step_seconds

    return tuple(point for point in first_guesses(space, seconds) if distance(point, start) >= _NEAR)


def _typical(layer_bytes: Sequence[int], *, seconds: float) -> ModelProfile:
    """A model that computes for ``seconds``, each layer in proportion to its size."""
    joined: list[int] = []
    least = sum(layer_bytes) / _MOST_LAYERS
    for size in layer_bytes:
        if joined and joined[-1] + size <= least:
            joined[-1] += size
        else:
            joined.append(size)
    layers = tuple(
        LayerProfile(
            name=str(index), parameter_bytes=size, forward_seconds=float(size), backward_seconds=_BACKWARD * size
        )
        for index, size in enumerate(joined)
    )
    return ModelProfile(name="typical", layers=layers).scaled_to(seconds)
