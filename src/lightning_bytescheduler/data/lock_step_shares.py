"""How many samples each rank gets so that all of them take the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LockStepShares"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockStepShares:
    """Shares of ranks that step together.

    Attributes:
        batch_sizes: Of each rank, in samples.
        steps: Of every rank.
        samples: Of each rank: in every step at least one, at most its batch size.
        padded: Samples that are trained on twice so that each rank has one in every step.
        dropped: Samples left out for the same reason.
    """

    batch_sizes: tuple[int, ...]
    steps: int
    samples: tuple[int, ...]
    padded: int
    dropped: int

    @classmethod
    def of(cls, samples: int, batch_sizes: Sequence[int], *, shortage: str) -> LockStepShares:
        """Share samples out, in proportion to the batch sizes.

        All steps but the last are full where that leaves each rank a sample in the last; otherwise the steps before it
        give some up. Only where even one sample a step is too much to ask (as with fewer samples than ranks), samples
        are padded or dropped, fewer than there are ranks.

        Args:
            samples: To share.
            batch_sizes: Of each rank, 1 or more.
            shortage: ``"pad"`` or ``"drop"``.
        """
        ranks, together = len(batch_sizes), sum(batch_sizes)
        steps = -(-samples // together)
        padded = dropped = 0
        if samples < steps * ranks:
            if shortage == "pad":
                padded = steps * ranks - samples
            else:
                # As many samples as the last step has are fewer than ranks here: see _apportion.
                steps -= 1
                dropped = samples - steps * together
        given = samples + padded - dropped
        shares = _apportion(given, batch_sizes, steps)
        return cls(batch_sizes=tuple(batch_sizes), steps=steps, samples=shares, padded=padded, dropped=dropped)

    def samples_until(self, rank: int, step: int) -> int:
        """Samples of a rank in its first ``step`` steps."""
        return min(step * self.batch_sizes[rank], self.samples[rank] - (self.steps - step))

    def batch(self, rank: int, step: int) -> int:
        """Samples of a rank in a step, counted from 0."""
        return self.samples_until(rank, step + 1) - self.samples_until(rank, step)


def _apportion(samples: int, batch_sizes: Sequence[int], steps: int) -> tuple[int, ...]:
    """Shares of ``samples``, from ``steps`` to ``steps * batch size`` each."""
    if not steps:
        return tuple(0 for _ in batch_sizes)
    full = (steps - 1) * sum(batch_sizes)
    last = samples - full
    if last >= len(batch_sizes):
        # One for each rank in the last step, and what else there is by batch size, rounded down.
        spare, room = last - len(batch_sizes), sum(batch_sizes) - len(batch_sizes)
        tails = [1 + (spare * (size - 1) // room if room else 0) for size in batch_sizes]
        missing = last - sum(tails)
        for rank in sorted(range(len(tails)), key=lambda rank: (tails[rank] - batch_sizes[rank], rank)):
            if not missing:
                break
            if tails[rank] < batch_sizes[rank]:
                tails[rank] += 1
                missing -= 1
        return tuple((steps - 1) * size + tail for size, tail in zip(batch_sizes, tails, strict=True))
    # One for each rank in the last step; the full steps before it give up what that takes, the largest batches first.
    shares = [(steps - 1) * size + 1 for size in batch_sizes]
    excess = sum(shares) - samples
    while excess:
        for rank in sorted(range(len(shares)), key=lambda rank: (-batch_sizes[rank], rank)):
            if excess and shares[rank] > steps:
                shares[rank] -= 1
                excess -= 1
    return tuple(shares)
