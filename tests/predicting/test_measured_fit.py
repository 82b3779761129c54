"""Measurements match the training, and measuring changes nothing."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import OptionError, UnsupportedError
from lightning_bytescheduler.predicting.predict import BETWEEN_STEPS, UNUSED, measure_step, repeated
from lightning_bytescheduler.predicting.prediction import MeasuredStep
from tests.ddp.stepping import Batches, Clock, Stepping
from tests.support.models import Tower

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.install(monkeypatch)
    return clock


def measure(module: Any, data: Any = None, *, steps: int = 3, **trainer_options: Any) -> MeasuredStep:
    return measure_step(module, data, device=CPU, steps=steps, trainer_options=trainer_options)


def layers(measured: MeasuredStep) -> list[tuple[str, int, float, float]]:
    return [
        (x.name, x.parameter_bytes, round(x.forward_seconds, 9), round(x.backward_seconds, 9))
        for x in measured.profile.layers
    ]


class Given:
    """One batch, over and over; a list would be taken for a collection of loaders."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        yield self.batch


# What is measured.


def test_layers_bytes_and_times(clock: Clock) -> None:
    measured = measure(Stepping(clock), Batches(clock))
    assert layers(measured) == [
        (BETWEEN_STEPS, 0, 0.5, 0.0),
        ("a", 8, round(1.0 + 5.0 * 2 / 20, 9), 10.0),
        ("b", 24, round(2.0 + 5.0 * 6 / 20, 9), 20.0),
        ("c", 48, round(3.0 + 5.0 * 12 / 20, 9), 30.0),
    ]
    assert measured.profile.compute_seconds == pytest.approx(71.5)
    assert measured.profile.name == "Stepping"
    assert measured.between_steps == 0.5
    assert measured.compressed_share == 0.5
    assert measured.synchronised_because == measured.norm_needed_by == ()


class OneLayerTwice(Stepping):
    order = ("a", "b", "c", "a2")
    seconds: ClassVar = {**Stepping.seconds, "a2": (4.0, 40.0)}

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.a2 = nn.Linear(3, 3)
        self.a2.weight = self.a.weight


def test_tied_weights_belong_to_the_first_that_uses_them(clock: Clock) -> None:
    measured = measure(OneLayerTwice(clock), Given(torch.ones(4, 3)))
    found = layers(measured)
    assert [(name, size) for name, size, _, _ in found] == [
        (BETWEEN_STEPS, 0),
        ("a", 48),
        ("b", 48),
        ("c", 48),
        ("a2", 12),  # its bias
    ]
    assert measured.profile.parameter_bytes == 4 * (3 * 9 + 4 * 3)
    assert [backward for *_, backward in found] == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_frozen_layers_take_time_and_send_nothing(clock: Clock) -> None:
    module = Stepping(clock)
    module.b.requires_grad_(False)
    assert layers(measure(module, Batches(clock))) == [
        (BETWEEN_STEPS, 0, 0.5, 0.0),
        ("a", 8, round(1.0 + 2.0 + 5.0 * 2 / 14, 9), 10.0 + 20.0),
        ("c", 48, round(3.0 + 5.0 * 12 / 14, 9), 30.0),
    ]
    module = Stepping(clock)
    module.a.requires_grad_(False)  # nothing is to be computed before b: its backward pass ends with b's gradient
    assert layers(measure(module, Batches(clock))) == [
        (BETWEEN_STEPS, 0, 0.5 + 1.0, 0.0),
        ("b", 24, round(2.0 + 5.0 * 6 / 18, 9), 20.0),
        ("c", 48, round(3.0 + 5.0 * 12 / 18, 9), 30.0),
    ]


class MadeLater(Stepping):
    def configure_model(self) -> None:
        self.c = nn.Linear(3, 5)

    def on_train_start(self) -> None:
        self.a.requires_grad_(False)


def test_layers_that_are_made_or_frozen_as_a_fit_begins_are_seen(clock: Clock) -> None:
    found = layers(measure(MadeLater(clock), Batches(clock)))
    assert [(name, size) for name, size, _, _ in found] == [(BETWEEN_STEPS, 0), ("b", 24), ("c", 80)]


class Unused(Stepping):
    order = ("a", "c")

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.c = nn.Linear(1, 3)


def test_unused_parameters_are_named_and_sent(clock: Clock) -> None:
    measured = measure(Unused(clock), Batches(clock))
    assert [(name, size) for name, size, _, _ in layers(measured)] == [
        (BETWEEN_STEPS, 0),
        ("a", 8),
        ("c", 24),
        (UNUSED, 24),
    ]


class Functional(Stepping):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.apply_layer("a", batch)
        hidden = self.apply_layer("b", hidden) * self.scale
        return (hidden @ self.c.weight).sum()


def test_parameters_that_their_module_does_not_read_have_a_place(clock: Clock) -> None:
    found = layers(measure(Functional(clock), Batches(clock)))
    # The bias of c is never read.
    assert [(name, size) for name, size, _, _ in found] == [
        (BETWEEN_STEPS, 0),
        ("a", 8),
        ("b", 24),
        ("Functional", 12),
        ("c", 36),
        (UNUSED, 12),
    ]


class Checkpointed(Stepping):
    def apply_layer(self, name: str, hidden: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().apply_layer, name, hidden, use_reentrant=False)


def test_recomputed_layers_are_first_used_in_the_forward_pass(clock: Clock) -> None:
    found = layers(measure(Checkpointed(clock), Batches(clock)))
    assert [entry[0] for entry in found] == [BETWEEN_STEPS, "a", "b", "c"]
    # Recomputing ends where all that backward needs is there, so the time of the layers is not spent again.
    assert [seconds for *_, seconds in found] == [0.0, 10.0, 20.0, 30.0]


def test_gradients_of_two_bytes_cannot_be_compressed(clock: Clock) -> None:
    module = Stepping(clock).to(torch.bfloat16)
    measured = measure(module, Given(torch.ones(4, 1, dtype=torch.bfloat16)))
    assert measured.compressed_share == 1.0
    assert measured.profile.parameter_bytes == 40


@pytest.mark.parametrize("data", [Given(torch.ones(7, 1)), DataLoader(torch.ones(6, 1), batch_size=2)])
def test_batches_of_any_kind(clock: Clock, data: Any) -> None:
    measured = measure(Stepping(clock), data)
    assert measured.profile.parameter_bytes == 80


def test_reasons_of_the_strategy_are_found(clock: Clock) -> None:
    class Hooked(Stepping):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: None)
            return optimizer

    measured = measure(Hooked(clock), Batches(clock), gradient_clip_val=1.0)
    assert any("step hooks" in reason for reason in measured.synchronised_because)
    assert measured.norm_needed_by == ("gradient norm clipping",)
    plain = measure(Stepping(clock), Batches(clock), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert plain.norm_needed_by == ()


# What is left behind: nothing.


class Noisy(Tower):
    """Draws random numbers from every source, keeps notes, and has a buffer that changes."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.norm = nn.BatchNorm1d(24)
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.kept.append((random.random(), np.random.rand(), torch.rand(())))
        self.norm(self.first(batch[0]))
        self.log("noise", torch.rand(()))
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> list[Callback]:
        raise AssertionError("callbacks of the user are not run")

    def on_train_epoch_end(self) -> None:
        raise AssertionError("nothing of the end of an epoch happens")


def test_the_module_is_as_it_was() -> None:
    module = Noisy()
    module.first(torch.ones(1, 12)).sum().backward()
    module.eval()
    module.last.train()
    before = copy.deepcopy(module.state_dict())
    gradient = module.first.weight.grad
    assert gradient is not None
    gradient_before = gradient.clone()
    parameters = list(module.parameters())
    measure(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.first.weight.grad is gradient
    assert torch.equal(gradient, gradient_before)
    assert all(p.grad is None for name, p in module.named_parameters() if not name.startswith("first"))
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in parameters)
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert [name for name, child in module.named_modules() if child.training] == ["last"]
    assert module._trainer is None
    assert module.kept == module.losses == []
    assert "train_dataloader" not in vars(module)
    assert "configure_callbacks" not in vars(module)


def random_states() -> list[Any]:
    return [
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    data = TensorDataset(torch.randn(16, 12), torch.randn(16, 3))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    module = Noisy()
    before = random_states()
    measure(module, loader)
    assert random_states() == before


def test_a_module_that_was_compiled_in_place() -> None:
    module = Noisy()
    module.compile(backend="eager")
    module.first.compile(backend="eager")
    assert measure(module).profile.parameter_bytes > 0
    assert all(p.grad is None for p in module.parameters())


def test_parts_that_are_compiled_have_a_place_too() -> None:
    """Their hooks run in compiled code, where no moment can be noted; it is one graph all the same."""

    class Compiled(Tower):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.first = torch.compile(self.first, backend="eager", fullgraph=True)  # type: ignore[assignment]

    measured = measure(Compiled())
    names = [layer.name for layer in measured.profile.layers]
    assert names[0] == BETWEEN_STEPS
    assert set(names[1:]) == {"first._orig_mod", "layers.0", "layers.1", "last"}
    assert measured.profile.parameter_bytes == sum(p.nbytes for p in Compiled().parameters())


class LogsByHand(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.logger.experiment.add_scalar("noise", 1.0, self.global_step)
        return super().training_step(batch, batch_idx)


def test_a_logger_is_there_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert measure(LogsByHand()).profile.parameter_bytes > 0
    assert not list(tmp_path.iterdir())


class Slices(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.rows: Tensor | None = None

    def setup(self, stage: str) -> None:
        self.rows = torch.randn(8, 12)

    def train_dataloader(self) -> Any:
        assert self.rows is not None
        return DataLoader(TensorDataset(self.rows, torch.randn(8, 3)), batch_size=4)

    def val_dataloader(self) -> Any:
        raise AssertionError("there is no validation")


def test_a_data_module_is_as_it_was() -> None:
    data = Slices()
    assert measure(Noisy(), data).profile.parameter_bytes > 0
    assert data.rows is None
    assert data.trainer is None
    assert "train_dataloader" not in vars(data)


class FailsInStep(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if len(self.kept) == 5:  # a step that is measured
            raise ValueError("of the user")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_user_comes_through_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = FailsInStep()
    before = random_states()
    with pytest.raises(ValueError, match="of the user"):
        measure(module)
    assert random_states() == before
    assert module._trainer is None
    assert not list(tmp_path.iterdir())


def test_a_trained_module_can_be_measured_again(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    module = Tower(depth=1)
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    weights = [p.detach().clone() for p in module.parameters()]
    measure(module)
    assert module.trainer is trainer
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))


class Scheduled(Noisy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_schedules_that_ask_how_long_training_is() -> None:
    assert measure(Scheduled(), steps=1).profile.parameter_bytes > 0


class MonitorsValidation(Noisy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validation_loss"}}


def test_metrics_of_a_validation_are_not_missed() -> None:
    assert measure(MonitorsValidation(), steps=20).profile.parameter_bytes > 0


# Misuse.


class Manual(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoLoss(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Sparse(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 1, sparse=True)


class NotCopied(Tower):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("holds a lock")


class Detached(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)


class SteppedByClosure(Tower):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


@pytest.mark.parametrize(
    ("module", "data", "error", "message"),
    [
        (nn.Linear(1, 1), None, OptionError, "module=Linear.* must be a LightningModule"),
        (Stepping(Clock()), None, OptionError, "data=None.*as the module has no train_dataloader"),
        (Tower(), 3, OptionError, "data=3"),
        (Tower(), iter(()), OptionError, "too few to measure"),
        (Tower(), [], OptionError, "data=.* one DataLoader"),
        (Tower(), {"x": Given(torch.ones(2, 1))}, OptionError, "of several, give one"),
        (Manual(), None, UnsupportedError, "Manual optimizes manually.*automatic_optimization=True"),
        (Sparse(), None, UnsupportedError, "'table' has sparse gradients"),
        (NoLoss(), None, UnsupportedError, "each has to return a loss"),
        (NotCopied(), None, UnsupportedError, "NotCopied cannot be copied.*holds a lock.*a fresh one"),
        (Detached(), None, UnsupportedError, "No parameter of the module gets a gradient"),
        (SteppedByClosure(), None, UnsupportedError, "one backward pass and one update"),
    ],
)
def test_what_cannot_be_measured(module: Any, data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(module, data)


def test_batches_begin_again() -> None:
    assert list(itertools.islice(repeated(dict.fromkeys([1, 2, 3]).keys()), 7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(("batches", "expected"), [({}.keys(), []), (iter([1, 2]), [1, 2])])
def test_batches_end_where_nothing_comes(batches: Any, expected: list[int]) -> None:
    assert list(repeated(batches)) == expected


def test_a_loader_without_a_batch_is_asked_once() -> None:
    """Each time it may start processes."""
    passes: list[int] = []

    class Empty:
        def __iter__(self) -> Iterator[Any]:
            passes.append(len(passes))
            return iter(())

    assert not list(repeated(Empty()))
    assert passes == [0]
