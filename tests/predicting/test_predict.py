"""A step of a user's module is measured, and predicted from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_bytescheduler
from lightning_bytescheduler import LinkModel, OptionError, Prediction, predict
from lightning_bytescheduler.predicting.predict import _device
from lightning_bytescheduler.predicting.prediction import BYTESCHEDULER, DDP
from tests.ddp.stepping import Batches, Clock, Stepping
from tests.support.models import Tower

# Sending the 80 bytes of a Stepping takes four workers 60 seconds; its step takes 71.5.
SLOW = LinkModel(workers=4, bandwidth=2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.install(monkeypatch)
    return clock


def test_it_is_public() -> None:
    assert {"Prediction", "LinkModel", "predict"} <= set(lightning_bytescheduler.__all__)


def test_a_model_on_a_link(clock: Clock) -> None:
    given = predict(Stepping(clock), Batches(clock), link=SLOW, steps=2)
    assert isinstance(given, Prediction)
    assert given.link == SLOW
    assert given.compute_seconds == pytest.approx(71.5)
    assert given.communication_seconds == pytest.approx(60.0)
    # All gradients are in one bucket: nothing is hidden.
    assert given.of(DDP).step_seconds == pytest.approx(131.5)
    assert given.of(DDP).step_seconds > given.of(BYTESCHEDULER).step_seconds >= given.ceiling_seconds
    assert "A step takes 71,500.0 ms on one worker (cpu)" in str(given)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _device() == torch.device("cuda", 3)


def test_clipping_is_as_for_the_trainer(clock: Clock) -> None:
    given = predict(Stepping(clock), Batches(clock), link=SLOW, gradient_clip_val=1.0, steps=1)
    assert given.measured.norm_needed_by == ("gradient norm clipping",)


def test_precision_is_as_for_the_trainer() -> None:
    seen = []

    class Module(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

        def __deepcopy__(self, memo: Any) -> Any:
            return Module()

    assert predict(Module(), link=SLOW, precision="bf16-mixed", steps=1).measured.compressed_share == 0.5
    assert set(seen) == {True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "500mbit"}, "link='500mbit' .* a LinkModel, such as"),
        ({"link": SLOW, "steps": 0}, "steps=0"),
        ({"link": SLOW, "steps": True}, "steps=True"),
    ],
)
def test_bad_options_are_named_before_anything_is_trained(options: dict[str, Any], message: str) -> None:
    class Untouched(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("trained")

    with pytest.raises(OptionError, match=message):
        predict(Untouched(), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    given = predict(Tower(depth=2, width=512), link=LinkModel(workers=4, bandwidth=1e9), steps=3)
    assert given.measured.device == "cuda"
    assert given.compute_seconds > 0
    names = [layer.name for layer in given.measured.profile.layers]
    assert names == ["(between steps)", "first", "layers.0", "layers.1", "last"]
