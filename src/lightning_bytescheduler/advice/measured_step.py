"""What was measured of a user's model, before any network comes into it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.simulation import ModelProfile

__all__ = ["MeasuredStep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A training step on one worker that talks to nobody.

    Attributes:
        profile: Its layers; they take as long as the step.
        waiting: Seconds of the step spent waiting for data.
        batch_size: Samples in a batch, or ``None`` if the batch does not show it.
        device: Where it was measured, such as ``cpu`` or ``cuda``.
        compressed_share: Bytes of the gradients as bf16, as a share of what they are.
        unused: Names of parameters that got no gradient.
        synchronised_because: Why ``bytescheduler`` cannot carry updates across steps here, with the way out.
        norm_needed_by: What needs to know all gradients before an update, such as norm clipping.
    """

    profile: ModelProfile
    waiting: float = 0.0
    batch_size: int | None = None
    device: str = "cpu"
    compressed_share: float = 0.5
    unused: tuple[str, ...] = ()
    synchronised_because: tuple[str, ...] = ()
    norm_needed_by: tuple[str, ...] = ()
