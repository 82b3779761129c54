"""What error feedback has left."""

from __future__ import annotations

import torch

from lightning_bytescheduler.ddp.residuals import Residuals


def test_residuals_are_in_host_memory_whatever_the_default_is() -> None:
    with torch.device("meta"):
        made = Residuals().of("weight", 4)
    assert made.device.type == "cpu"
    assert made.tolist() == [0.0] * 4


def kept() -> Residuals:
    """Those of two parameters, of which a step has left something."""
    residuals = Residuals()
    residuals.scale_to(8.0)
    for name in ("one", "other"):
        residuals.of(name, 2).fill_(5.0)
    return residuals


def test_residuals_go_along_with_the_loss_scale() -> None:
    residuals = kept()
    residuals.scale_to(4.0)
    assert residuals.of("one", 2).tolist() == [2.5, 2.5]


def test_nothing_is_left_of_other_weights() -> None:
    residuals = kept()
    residuals.clear()
    assert residuals.of("one", 2).tolist() == residuals.of("other", 2).tolist() == [0.0, 0.0]
