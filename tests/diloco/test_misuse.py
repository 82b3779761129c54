"""Bad input fails when the strategy is made, and the message names option, value and way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bytescheduler import (
    ByteSchedulerStrategy,
    DiLoCoStrategy,
    OptionError,
    PerformanceMonitor,
    UnsupportedError,
)
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.options import common_options
from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, SampleTarget
from lightning_bytescheduler.diloco.strategy import refuse_searches


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples_per_round", 0),
        ("samples_per_round", 1.5),
        ("inner_steps", 0),
        ("inner_steps", True),
        ("equal_steps", "yes"),
        ("outer_steps", 0),
        ("outer_lr", -1.0),
        ("outer_lr", float("nan")),
        ("outer_momentum", 2.0),
        ("fragments", 0),
        ("overlap_steps", -1),
        ("overlap_steps", True),
        ("overlap_steps", "auto"),
        ("overlap_steps", 1.5),
        ("wire_dtype", "fp16"),
        ("wire_dtype", "sparse:2"),
        ("wire_dtype", "int8:0.1"),
        ("partition_size", 1000),
        ("credit", 1000),
        ("inner", "fsdp"),
        ("inner", {"size": 2}),
        ("inner", [1]),
    ],
)
def test_values_are_named(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        DiLoCoStrategy(**{option: value})
    assert option in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_round": 100, "inner_steps": 10},
        {"samples_per_round": 100, "equal_steps": True},
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="left out where"):
        DiLoCoStrategy(**options)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("inner_step", "Did you mean 'inner_steps'"),
        ("outer_learning_rate", "Did you mean 'outer_lr'"),
        ("local_steps", "Did you mean 'inner_steps'"),
        ("outer_optimizer", "Nesterov SGD, with outer_lr and outer_momentum"),
        ("weighting", "derive a class from PerformanceMonitor"),
        ("batch_size", r"trainer\.strategy\.worker"),
        ("find_unused_parameters", "write inner={'strategy': ..., 'find_unused_parameters': ...}"),
        ("mode", "write inner={'strategy': ..., 'mode': ...}"),
        ("timeline", "write inner={'strategy': ..., 'timeline': ...}"),
        ("inner_size", r"Write inner={'strategy': 'ddp', 'size': ...}"),
        ("coordinator_ca", "Did you mean 'coordinator'"),
        ("samples", "Did you mean 'samples_per_round'"),
        ("num_nodes", r"It is an option of Trainer: Trainer\(num_nodes=...\)"),
    ],
)
def test_a_misspelt_option(option: str, says: str) -> None:
    with pytest.raises(OptionError, match=rf"^DiLoCoStrategy has no option '{option}'\. .*{says}.*samples_per_round"):
        DiLoCoStrategy(**{option: 1})


def test_a_number_without_its_name() -> None:
    with pytest.raises(OptionError, match=r"^DiLoCoStrategy takes its options by name, as in DiLoCoStrategy\("):
        DiLoCoStrategy(100)  # type: ignore[call-arg]


def test_what_sparse_does_not_send_acts_as_momentum_too() -> None:
    options = DiLoCoStrategy(wire_dtype="sparse")._options
    assert options.outer_step == {"lr": 1.0, "momentum": 0.5}
    options = DiLoCoStrategy(wire_dtype="sparse:0.1", outer_lr=0.5, outer_momentum=0.3)._options
    assert options.outer_step == {"lr": 0.5, "momentum": 0.3}
    assert options.run.wire.density == 0.1
    assert common_options(options)["wire_dtype"] == "sparse:0.1"  # the same on all ranks, or they are refused
    strategy = DiLoCoStrategy(wire_dtype="sparse:0.02", coordinator="http://127.0.0.1:1")
    assert strategy._options.given["wire_dtype"] == common_options(strategy._options)["wire_dtype"] == "sparse"
    assert run_options(wire_dtype="sparse:0.02").wire_dtype == "sparse"


def test_ranks_that_give_the_default_of_the_outer_step_and_ranks_that_do_not_differ() -> None:
    """A resume steps with what was given, or else with what the checkpoint has."""
    left_out, given = (
        common_options(strategy._options) for strategy in (DiLoCoStrategy(), DiLoCoStrategy(outer_lr=0.7))
    )
    assert {name for name in given if given[name] != left_out[name]} == {"outer_lr"}
    assert DiLoCoStrategy(outer_lr=0.5)._options.outer_step == {"lr": 0.5, "momentum": None}


def test_overlap_ends_before_the_next_send() -> None:
    for options in ({"inner_steps": 5}, {"inner_steps": 5, "equal_steps": True}):
        with pytest.raises(OptionError, match="less than the steps between two sends, inner_steps=5"):
            DiLoCoStrategy(overlap_steps=5, **options)
        DiLoCoStrategy(overlap_steps=4, **options)
    with pytest.raises(OptionError, match="inner_steps=100"):
        DiLoCoStrategy(overlap_steps=100)
    DiLoCoStrategy(overlap_steps=100, samples_per_round=10_000)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, FastestSteps(100)),
        ({"inner_steps": 7}, FastestSteps(7)),
        ({"inner_steps": 7, "equal_steps": True}, FixedSteps(7)),
        ({"samples_per_round": 64}, SampleTarget(64)),
    ],
)
def test_what_ends_a_round(options: dict[str, Any], target: object) -> None:
    assert DiLoCoStrategy(**options)._options.run.target == target


@pytest.mark.parametrize("suffix", ["", "_spawn", "_fork", "_notebook"])
def test_each_name_makes_the_strategy(suffix: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=f"diloco{suffix}").strategy
    assert type(strategy) is DiLoCoStrategy
    assert strategy.workers == 2
    assert strategy.world_size == 1


@pytest.mark.filterwarnings(r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS")
def test_options_come_from_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr("sys.argv", ["train.py"])
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy:\n"
        "    class_path: lightning_bytescheduler.DiLoCoStrategy\n"
        "    init_args:\n      samples_per_round: 64\n      wire_dtype: int8\n"
        "      overlap_steps: 2\n"
    )
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=1, args=["--config", str(path)])
    run = cli.trainer.strategy._options.run
    assert (run.samples_per_round, run.wire_dtype) == (64, "int8")
    assert run.overlap_steps == 2


@pytest.mark.parametrize("size", [None, 1, 0, True, 2.0, "machine"])
def test_sizes_of_workers(size: Any) -> None:
    with pytest.raises(OptionError, match=r"inner\.size=.*a whole number above 1, or 'node'"):
        DiLoCoStrategy(inner={"strategy": "ddp", "size": size})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inner": {"tuning": "credit"}}, "no option 'tuning'. Only a strategy 'bytescheduler' of the Trainer has it"),
        ({"inner": {"credit": 0}}, "credit=0"),
        ({"inner": {"static_graph": "no"}}, "static_graph='no'.*True or False"),
        ({"inner": {"timeout": 30}}, "no option 'timeout'. It is an option of DiLoCoStrategy itself"),
        ({"inner": {"devices": 2}}, "no option 'devices'. It is an option of Trainer"),
    ],
)
def test_options_of_workers_of_several_ranks(options: dict[str, Any], says: str) -> None:
    inside = {"strategy": "bytescheduler", "size": 2, **options.pop("inner", {})}
    with pytest.raises(OptionError, match=says):
        DiLoCoStrategy(inner=inside, **options)


@pytest.mark.parametrize(
    ("inner", "option", "known"),
    [
        ("ddp", "partition_size", "bucket_cap_mb"),
        ("ddp", "process_group", "ddp_comm_hook"),
        ("bytescheduler", "nonsense", "partition_size"),
        ("bytescheduler", "device_ids", "find_unused_parameters"),
    ],
)
def test_an_unknown_option_of_workers_of_several_ranks(inner: str, option: str, known: str) -> None:
    with pytest.raises(OptionError, match=f"inner has no option '{option}'.*{known}"):
        DiLoCoStrategy(inner={"strategy": inner, "size": 2, option: 1})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("mode", "ddp", "no option 'mode'. Only strategy 'bytescheduler' has it"),
        ("find_unused_parameters", "yes", "find_unused_parameters='yes'.*True or False"),
    ],
)
def test_options_of_workers_that_train_with_ddp(option: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        DiLoCoStrategy(inner={"strategy": "ddp", "size": 2, option: value})


def test_ddp_options_that_the_scheduler_cannot_honour() -> None:
    with pytest.raises(UnsupportedError, match="ddp_comm_hook"):
        DiLoCoStrategy(inner={"strategy": "bytescheduler", "size": 2, "ddp_comm_hook": print})


@pytest.mark.parametrize(
    ("inner_size", "workers", "world_size"),
    [(2, 3, 2), (3, 2, 3), (6, 1, 6), ("node", 2, 3)],
)
def test_workers_of_several_ranks(inner_size: Any, workers: int, world_size: int) -> None:
    strategy = DiLoCoStrategy(inner={"strategy": "ddp", "size": inner_size})
    Trainer(accelerator="cpu", devices=3, num_nodes=2, strategy=strategy)
    assert (strategy.workers, strategy.world_size, strategy.ranks) == (workers, world_size, 6)
    strategy._options.check_ranks(ranks=6, on_node=3, rank=5, node=1)


def test_ranks_that_do_not_make_up_workers() -> None:
    with pytest.raises(OptionError, match="a number that divides that of all processes, 6"):
        DiLoCoStrategy(inner={"strategy": "ddp", "size": 4})._options.check_ranks(ranks=6, on_node=3, rank=0, node=0)
    with pytest.raises(OptionError, match=r"do not follow one another \(rank 1 is on machine 1\)"):
        DiLoCoStrategy(inner={"strategy": "ddp", "size": "node"})._options.check_ranks(
            ranks=6, on_node=3, rank=1, node=1
        )


@pytest.mark.parametrize("value", [0, 2.5, None, "4", True, torch.tensor(1.5)])
def test_samples_are_whole_numbers(value: Any) -> None:
    class Counts(PerformanceMonitor):
        def batch_samples(self, batch: Any) -> Any:
            return value

    trainer: Any = SimpleNamespace(strategy=DiLoCoStrategy())
    with pytest.raises(OptionError, match=r"^batch_samples\(batch\)=.* must be a whole number, 1 or more"):
        Counts().on_train_batch_end(trainer, None, None, torch.zeros(4, 2), 0)  # type: ignore[arg-type]


def test_a_tensor_may_say_how_many_samples() -> None:
    told: list[int] = []

    class Strategy(DiLoCoStrategy):
        def report_batch(self, *, samples: int, loss: float | None) -> None:
            told.append(samples)

    class Counts(PerformanceMonitor):
        def batch_samples(self, batch: Any) -> Any:
            return torch.tensor(3)

    trainer: Any = SimpleNamespace(strategy=Strategy(), log_every_n_steps=0, barebones=True)
    Counts().on_train_batch_end(trainer, None, None, torch.zeros(4, 2), 0)  # type: ignore[arg-type]
    assert told == [3]
    assert type(told[0]) is int


def test_one_monitor_reports() -> None:
    monitor = PerformanceMonitor()
    trainer: Any = SimpleNamespace(strategy=DiLoCoStrategy(), callbacks=[monitor])
    monitor.setup(trainer, None, "fit")  # type: ignore[arg-type]
    trainer.callbacks.append(PerformanceMonitor())
    monitor.setup(trainer, None, "validate")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="more than one PerformanceMonitor"):
        monitor.setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_a_monitor_without_rounds_is_told_of() -> None:
    monitor = PerformanceMonitor()
    trainer: Any = SimpleNamespace(strategy=ByteSchedulerStrategy(), callbacks=[monitor])
    with pytest.warns(UserWarning, match="does nothing with ByteSchedulerStrategy: leave the callback out"):
        monitor.setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_a_learning_rate_is_not_looked_for() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot look for a learning rate .*Trainer\(devices=1\)"):
        refuse_searches([LearningRateFinder()])
    refuse_searches([PerformanceMonitor()])
