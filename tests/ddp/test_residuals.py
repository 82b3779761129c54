"""What error feedback has left."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_bytescheduler.ddp.residuals import Residuals


def test_residuals_are_in_host_memory_whatever_the_default_is() -> None:
    with torch.device("meta"):
        made = Residuals().of("weight", 4)
    assert made.device.type == "cpu"
    assert made.tolist() == [0.0] * 4


def begin_step(
    residuals: Residuals, loss_scale: float | None = None, dropped: Iterable[str] = (), pending: Iterable[str] = ()
) -> None:
    """Begin a step after one whose gradients were applied, but for those that were ``dropped`` or are ``pending``."""
    parameters = residuals._may_be_dropped
    for name, parameter in parameters.items():
        parameter.grad = None if name in dropped else torch.ones(2)
    applied = [p for name, p in parameters.items() if name not in {*dropped, *pending}]
    if applied:
        residuals.stepped(torch.optim.SGD(applied, lr=1.0))
    residuals.before_backward()
    residuals.begin_step(loss_scale)


def kept(*, loss_scale: float | None = None) -> Residuals:
    """Those of two parameters, of which a step has left something."""
    residuals = Residuals({name: nn.Parameter(torch.zeros(2)) for name in ("one", "other")})
    begin_step(residuals, loss_scale)
    for name in ("one", "other"):
        residuals.to_change(name, 2).fill_(5.0)
    return residuals


def test_nothing_is_left_of_a_dropped_gradient() -> None:
    residuals = kept()
    begin_step(residuals, dropped=["one"])
    assert residuals.of("one", 2).tolist() == [0.0, 0.0]
    assert residuals.of("other", 2).tolist() == [5.0, 5.0]


def test_nothing_is_left_of_a_gradient_that_was_set_to_zero() -> None:
    residuals = kept()
    for parameter in residuals._may_be_dropped.values():
        parameter.grad = torch.zeros(2)
    residuals.before_backward()
    residuals.begin_step(None)
    assert residuals.of("one", 2).tolist() == [0.0, 0.0]


def test_a_step_past_the_strategy_is_a_step() -> None:
    """Such as that of an optimizer which Lightning has not wrapped: it writes the parameter."""
    residuals = kept()
    with torch.no_grad():
        residuals._may_be_dropped["one"].add_(1.0)
    for parameter in residuals._may_be_dropped.values():
        parameter.grad = None
    residuals.before_backward()
    residuals.begin_step(None)
    assert residuals.of("one", 2).tolist() == [5.0, 5.0]
    assert residuals.of("other", 2).tolist() == [0.0, 0.0]


def test_what_waits_for_a_step_is_not_dropped() -> None:
    residuals = kept()
    begin_step(residuals, pending=["one"])
    assert residuals.of("one", 2).tolist() == [5.0, 5.0]


def test_a_parameter_without_a_gradient_in_a_step_keeps_what_was_left_before() -> None:
    residuals = kept()
    begin_step(residuals)
    residuals.of("one", 2)  # no rank has used it in this step
    residuals.to_change("other", 2)
    begin_step(residuals, dropped=["one"])
    assert residuals.of("one", 2).tolist() == [5.0, 5.0]


def test_residuals_go_along_with_the_loss_scale() -> None:
    residuals = kept(loss_scale=8.0)
    begin_step(residuals, 4.0)
    assert residuals.of("one", 2).tolist() == [2.5, 2.5]


def test_nothing_is_left_of_other_weights() -> None:
    residuals = kept()
    residuals.clear()
    begin_step(residuals, dropped=["one"])
    assert residuals.of("one", 2).tolist() == residuals.of("other", 2).tolist() == [0.0, 0.0]
