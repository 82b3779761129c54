"""What keeps training right when less is sent than there is: error feedback, and momentum before it.

Wrappers are compressors, too. From outside to inside: :class:`NesterovMomentum`, :class:`ErrorFeedback`, a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_positive, require_share, require_whole
from lightning_bytescheduler.compression.compressor import Compressor, flat_fp32, is_finite
from lightning_bytescheduler.compression.dense import Dense

__all__ = ["ErrorFeedback", "FromSize", "NesterovMomentum"]


class _Around(Compressor):
    """A compressor that reads as the one inside."""

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner

    @property
    def spec(self) -> str:
        """See Compressor."""
        return self.inner.spec

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return self.inner.payload_bytes(elements)

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        return self.inner.decompress(payload, elements, out=out)

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """See Compressor."""
        self.inner.add(payload, sums)


class ErrorFeedback(_Around):
    """Sends what was not sent before together with what is new.

    Of the sum v of a part and its residual, C(v) is sent, and v - C(v) is the next residual. Whatever is lost in a step
    is so sent later: with a compressor that keeps a share of ``|x|^2``, SGD converges as fast as without compression up
    to a term of higher order (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes").

    A part that is not finite is sent without its residual, which stays as it is: the step will be skipped.

    Args:
        inner: Compresses.
    """

    def __init__(self, inner: Compressor) -> None:
        super().__init__(inner)
        self._residuals: dict[str, Tensor] = {}

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        if not is_finite(values):
            return self.inner.compress(values, seed=seed, worker=worker, key=key)
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros_like(values)
        elif residual.shape != values.shape:
            raise ValueError(
                f"Part {key!r} has {values.numel()} elements and a residual of {residual.numel()}: parts must be cut "
                "as before, or the residuals be dropped."
            )
        return self.inner.compress_with(residual, values, seed=seed, worker=worker, key=key)

    def residual(self, key: str = "") -> Tensor | None:
        """What has not been sent of a part; to be read only."""
        return self._residuals.get(key)

    def scale(self, factor: float) -> None:
        """Multiply all residuals, as when the learning rate becomes ``1/factor`` times what it was."""
        for residual in self._residuals.values():
            residual.mul_(require_positive("factor", factor))

    def state_dict(self) -> dict[str, Any]:
        """See Compressor."""
        residuals = {key: residual.clone() for key, residual in self._residuals.items()}
        return {"residuals": residuals, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Compressor."""
        self._residuals = {key: residual.clone() for key, residual in state["residuals"].items()}
        self.inner.load_state_dict(state["inner"])


class NesterovMomentum(_Around):
    """Takes momentum before compression, so that the elements that are sent rarely are sent with all their momentum.

    m = momentum * m + g, and g + momentum * m is sent (Zheng et al., "Communication-Efficient Distributed Blockwise
    Momentum SGD with Error-Feedback"): with it, the optimizer's own momentum is to be 0.

    A part that is not finite is sent as it is, and leaves no trace in the momentum: the step will be skipped.

    Args:
        inner: Compresses, with error feedback as a rule.
        momentum: From 0 to 1.

    Raises:
        OptionError: If it is not.
    """

    def __init__(self, inner: Compressor, momentum: float = 0.9) -> None:
        super().__init__(inner)
        self.momentum = require_share("momentum", momentum)
        self._momenta: dict[str, Tensor] = {}

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        if is_finite(values):
            known = self._momenta.get(key)
            own = self._momenta[key] = values.clone() if known is None else known.mul_(self.momentum).add_(values)
            values = values.add(own, alpha=self.momentum)
        return self.inner.compress(values, seed=seed, worker=worker, key=key)

    def state_dict(self) -> dict[str, Any]:
        """See Compressor."""
        momenta = {key: momentum.clone() for key, momentum in self._momenta.items()}
        return {"momenta": momenta, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Compressor."""
        self._momenta = {key: momentum.clone() for key, momentum in state["momenta"].items()}
        self.inner.load_state_dict(state["inner"])


class FromSize(Compressor):
    """Leaves small parts as they are, in fp32: what they cost is not their bytes.

    Args:
        inner: Compresses the others.
        min_size: Elements of the smallest part that is compressed.

    Raises:
        OptionError: If it is not a whole number from 0 on.
    """

    def __init__(self, inner: Compressor, min_size: int) -> None:
        self.inner = inner
        self.min_size = require_whole("min_size", min_size, 0)
        self._plain = Dense("fp32")

    @property
    def spec(self) -> str:
        """See Compressor."""
        return self.inner.spec

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return self._for(elements).payload_bytes(elements)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        return self._for(part.numel()).compress(part, seed=seed, worker=worker, key=key)

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        return self._for(elements).decompress(payload, elements, out=out)

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """See Compressor."""
        self._for(sums.numel()).add(payload, sums)

    def state_dict(self) -> dict[str, Any]:
        """See Compressor."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Compressor."""
        self.inner.load_state_dict(state)

    def _for(self, elements: int) -> Compressor:
        return self._plain if elements < self.min_size else self.inner
