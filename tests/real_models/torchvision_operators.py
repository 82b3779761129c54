"""torchvision where its compiled operators cannot be loaded: those of its usual wheel want torch for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["why_no_torchvision"]

_MISSING: list[torch.library.Library] = []  # what is registered goes when its library does
_KEPT_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def why_no_torchvision() -> str | None:
    """Import torchvision, and say why it cannot be imported; the operators it cannot do without are made here."""
    try:
        try:
            import torchvision
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            _define_operators()
            import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _define_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    library.define(f"nms{_KEPT_BOXES}")
    library.define(f"qnms{_KEPT_BOXES}")
    library.impl("nms", _non_maximum_suppression, "CPU")
    _MISSING.append(library)


def _non_maximum_suppression(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes that overlap none with a better score by more than ``threshold``, best first."""
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    remaining, kept = scores.argsort(descending=True, stable=True), []
    while len(remaining):
        best, remaining = remaining[0], remaining[1:]
        kept.append(best)
        corner = torch.maximum(boxes[best, :2], boxes[remaining, :2])
        opposite = torch.minimum(boxes[best, 2:], boxes[remaining, 2:])
        common = (opposite - corner).clamp(min=0).prod(1)
        remaining = remaining[common <= threshold * (areas[best] + areas[remaining] - common)]
    return torch.stack(kept) if kept else scores.new_empty(0, dtype=torch.int64)
