"""A scaler whose update is due answers as if it had been made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.deferred_optimizer import can_be_deferred, is_enabled, scaling_later
from lightning_bytescheduler.ddp.gradient_transforms import Unscale


class Engine:
    """Takes everything over, and knows only later whether gradients are finite."""

    def __init__(self, *, takes_over: bool = True, norm: float = 1.0) -> None:
        self.takes_over = takes_over
        self.norm = norm
        self.pending: Any = None
        self.settled = 0
        self.step = self

    def unscale(self, optimizer: Any, inverse_scale: torch.Tensor) -> Unscale | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return Unscale(inverse_scale, parameters, lambda _: self.norm) if self.takes_over else None

    def scale_later(self, pending: Any) -> None:
        self.pending = pending

    def update_scale(self) -> None:
        if self.pending is not None:
            self.settled += 1
            pending, self.pending = self.pending, None
            pending.update()


def one_step(engine: Any, scaler: torch.amp.GradScaler) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    stand_in = scaling_later(scaler, engine)
    assert isinstance(stand_in, torch.amp.GradScaler)
    stand_in.unscale_(optimizer)
    stand_in.step(optimizer)
    stand_in.update()
    return parameter


def made(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1, **options)


@pytest.mark.parametrize(("norm", "scale"), [(1.0, 2048.0), (float("inf"), 512.0), (float("nan"), 512.0)])
@pytest.mark.parametrize(
    "look",
    [
        lambda scaler: scaler.get_scale(),
        lambda scaler: scaler.state_dict()["scale"],
        lambda scaler: scaler.scale(torch.ones(())).item(),
        lambda scaler: scaler._scale.item(),
    ],
)
def test_whoever_looks_sees_the_scale_that_is_due(norm: float, scale: float, look: Any) -> None:
    engine, scaler = Engine(norm=norm), made()
    one_step(engine, scaler)
    assert engine.settled == 0
    assert look(scaler) == scale
    assert engine.settled == 1
    assert type(scaler) is torch.amp.GradScaler


def test_a_stand_in_answers_for_a_scaler_whose_update_is_due() -> None:
    engine, scaler = Engine(), made()
    one_step(engine, scaler)
    anything: Any = engine
    stand_in = scaling_later(scaler, anything)
    assert engine.settled == 0, "taking its place waits for nothing"
    assert stand_in.get_scale() == 2048.0
    assert engine.settled == 1


def test_what_has_to_be_done_now_is_torchs_own() -> None:
    engine, scaler = Engine(takes_over=False), made()
    assert one_step(engine, scaler).tolist() == [0.0, 0.0]
    assert engine.pending is None
    assert scaler.get_scale() == 2048.0


def test_a_step_that_failed_leaves_the_scale() -> None:
    engine, scaler = Engine(), made()
    one_step(engine, scaler)
    engine.pending.discard()
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 1024.0


def test_which_scalers_are_known() -> None:
    class Own(torch.amp.GradScaler):
        pass

    engine, scaler = Engine(), made()
    assert can_be_deferred(scaler)
    assert not can_be_deferred(Own("cpu"))
    one_step(engine, scaler)
    assert can_be_deferred(scaler)
    assert is_enabled(scaler)
    assert engine.settled == 0, "asking this opens no gate"
    assert not is_enabled(torch.amp.GradScaler("cpu", enabled=False))
