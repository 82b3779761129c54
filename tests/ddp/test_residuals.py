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
    residuals: Residuals, loss_scale: float | None, dropped: Iterable[str] = (), not_applied: Iterable[str] = ()
) -> None:
    """Begin a step after one whose gradients were applied, but for those that were ``dropped`` or ``not_applied``."""
    parameters = residuals._parameters
    for name, parameter in parameters.items():
        parameter.grad = None if name in dropped else torch.ones(2)
    applied = [p for name, p in parameters.items() if name not in {*dropped, *not_applied}]
    if applied:
        residuals.stepped(torch.optim.SGD(applied, lr=1.0))
    residuals.before_backward()
    residuals.begin_step(loss_scale)


def kept(*, loss_scale: float | None = None, may_be_dropped: bool = False) -> Residuals:
    """Those of two parameters, of which a step has left other things than there were before."""
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("one", "other")}
    residuals = Residuals(parameters if may_be_dropped else {}, may_drop=may_be_dropped)
    begin_step(residuals, loss_scale, not_applied=())
    for name in ("one", "other"):
        residuals.to_change(name, 2).fill_(5.0)
    return residuals


def test_what_a_dropped_gradient_left_is_taken_back() -> None:
    residuals = kept(may_be_dropped=True)
    assert set(residuals.changed) == {"one", "other"}
    begin_step(residuals, None, ["one"])
    assert residuals.of("one", 2).tolist() == [0.0, 0.0]
    assert residuals.of("other", 2).tolist() == [5.0, 5.0]


def send(residuals: Residuals, name: str, left: float) -> None:
    """What a step sends of a parameter, and leaves."""
    residuals.to_change(name, 2).fill_(left)


def test_what_is_kept_is_of_this_step_also_where_it_does_not_change() -> None:
    residuals = kept(loss_scale=8.0)
    begin_step(residuals, 8.0)
    residuals.to_change("one", 2)
    begin_step(residuals, 4.0)  # the step was left out
    assert residuals.of("one", 2).tolist() == [2.5, 2.5]


def test_what_parts_of_a_step_change_one_by_one_is_taken_back_as_a_whole() -> None:
    residuals = kept(loss_scale=8.0)
    begin_step(residuals, 8.0)
    for part in range(2):
        residuals.to_change("one", 2)[part] = 9.0
    begin_step(residuals, 4.0)
    assert residuals.of("one", 2).tolist() == [2.5, 2.5]


def test_what_is_pending_is_taken_back_as_a_whole() -> None:
    """Two backward passes, whose sum is dropped: what there was before the first is what is to be sent."""
    residuals = kept(may_be_dropped=True)
    begin_step(residuals, None)
    send(residuals, "one", 6.0)
    begin_step(residuals, None, not_applied={"one"})
    send(residuals, "one", 7.0)
    send(residuals, "other", 7.0)
    assert residuals.changed == {"one", "other"}
    begin_step(residuals, None, {"one", "other"})
    assert residuals.of("one", 2).tolist() == residuals.of("other", 2).tolist() == [5.0, 5.0]
    assert not residuals.changed


def test_accumulated_gradients_that_overflow_are_taken_back_as_a_whole() -> None:
    """What was kept before goes along with the loss scale."""
    residuals = kept(loss_scale=8.0, may_be_dropped=True)
    begin_step(residuals, 8.0)
    send(residuals, "one", 6.0)
    begin_step(residuals, 16.0, not_applied={"one"})
    send(residuals, "one", 7.0)
    begin_step(residuals, 4.0, not_applied={"one"})
    assert residuals.of("one", 2).tolist() == [2.5, 2.5]
    assert residuals.of("other", 2).tolist() == [2.5, 2.5]
    assert not residuals.changed


def test_nothing_is_left_of_other_weights() -> None:
    residuals = kept(may_be_dropped=True)
    residuals.clear()
    begin_step(residuals, None, ["one"])
    assert residuals.of("one", 2).tolist() == residuals.of("other", 2).tolist() == [0.0, 0.0]
