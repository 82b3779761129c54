"""Bad input fails when the strategy is made, and the message names option, value and way out."""

import inspect
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler import (
    ByteSchedulerFabricStrategy,
    ByteSchedulerStrategy,
    DiLoCoStrategy,
    OptionError,
    UnsupportedError,
)
from lightning_bytescheduler.ddp.ddp_arguments import check_module, refuse_steps_in_backward
from tests.support.fabric_loops import SIZES as FABRIC_SIZES
from tests.support.fabric_loops import tower
from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("option", ["partition_size", "credit"])
@pytest.mark.parametrize("value", [0, -1, 0.5, True, "many", float("nan")])
def test_sizes_must_be_positive_whole_numbers(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match="positive whole number of parameters") as caught:
        ByteSchedulerStrategy(**{option: value})
    assert option in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["DDP", "", None, 1])
def test_modes_are_named(value: Any) -> None:
    with pytest.raises(OptionError, match="mode must be one of 'auto', 'overlapped', 'ddp'"):
        ByteSchedulerStrategy(mode=value)


@pytest.mark.parametrize("variable", ["BYTESCHEDULER_PARTITION", "BYTESCHEDULER_CREDIT"])
@pytest.mark.parametrize("value", ["0", "-3", "lots", "nan", "inf"])
def test_bad_variables_are_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError, match=variable):
        ByteSchedulerStrategy()


def test_an_argument_beats_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_CREDIT", "nonsense")
    assert ByteSchedulerStrategy(credit=1000)._options.credit == 1000


def test_published_spelling_of_sizes_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_PARTITION", "8000000")
    monkeypatch.setenv("BYTESCHEDULER_CREDIT", "16e6")
    options = ByteSchedulerStrategy()._options
    assert (options.partition_size, options.credit) == (8_000_000, 16_000_000)


@pytest.mark.parametrize("value", ["yes", "2"])
def test_bad_switches_are_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BYTESCHEDULER_DEBUG", value)
    with pytest.raises(OptionError, match=r"BYTESCHEDULER_DEBUG.*0 or 1"):
        ByteSchedulerStrategy()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ddp_comm_hook", lambda state, bucket: None),
        ("ddp_comm_state", object()),
        ("ddp_comm_wrapper", lambda hook: hook),
        ("model_averaging_period", 4),
        ("process_group", object()),
        ("device_ids", [0]),
        ("output_device", 0),
        ("module", nn.Linear(2, 2)),
        ("device_mesh", object()),
        ("delay_all_reduce_named_params", [("weight", object())]),
        ("param_to_hook_all_reduce", object()),
        ("mixed_precision", object()),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(option: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=rf"cannot honour {option}=.*strategy='ddp'"):
        ByteSchedulerStrategy(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("bucket_cap_mb", 0, "megabytes above 0"),
        ("bucket_cap_mb", "25", "megabytes above 0"),
        ("bucket_cap_mb", True, "megabytes above 0"),
        ("log_metrics", "no", "True or False"),
    ],
)
def test_values_are_checked_where_they_are_given(option: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError, match=rf"{option}.*{allowed}"):
        ByteSchedulerStrategy(**{option: value})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("partition", "Did you mean 'partition_size'"),
        ("find_unused_parameter", "Did you mean 'find_unused_parameters'"),
        ("devices", r"It is an option of Trainer: Trainer\(devices=...\)"),
    ],
)
def test_a_misspelt_option_is_refused_at_once(option: str, says: str) -> None:
    with pytest.raises(OptionError, match=rf"^ByteSchedulerStrategy has no option '{option}'.*{says}.*static_graph"):
        ByteSchedulerStrategy(**{option: 4})


@pytest.mark.parametrize("strategy", [ByteSchedulerStrategy, ByteSchedulerFabricStrategy, DiLoCoStrategy])
def test_a_timeout_is_a_timedelta(strategy: Any) -> None:
    with pytest.raises(OptionError, match=r"^timeout=30 .* must be a datetime.timedelta, such as timedelta\(seconds="):
        strategy(timeout=30)
    strategy(timeout=None)
    strategy(timeout=timedelta(seconds=5))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("find_unused_parameters", "yes", "True or False"),
        ("static_graph", "no", "True or False"),
        ("init_sync", None, "True or False"),
        ("check_reduction", 1, "True or False"),
        ("gradient_as_bucket_view", "yes", "True or False"),
    ],
)
def test_what_ddp_gets_is_checked(option: str, value: object, allowed: str) -> None:
    if option not in inspect.signature(DistributedDataParallel).parameters:
        pytest.skip("not in this torch")
    with pytest.raises(OptionError, match=rf"^{option}=.* must be {allowed}"):
        ByteSchedulerStrategy(**{option: value})


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters, reason="not in this torch"
)
@pytest.mark.parametrize("value", [[1, "a"], [1, -1]])
def test_lists_of_buckets_are_checked(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^bucket_cap_mb_list=.* must be megabytes above 0"):
        ByteSchedulerStrategy(bucket_cap_mb_list=value)


def test_what_a_config_names_without_need_does_not_reach_ddp() -> None:
    """LightningCLI hands over all that DDP's constructor has."""
    options = ByteSchedulerStrategy(module=None, device_ids=None, output_device=None, process_group=None)._ddp_kwargs
    assert not {"module", "device_ids", "output_device", "process_group"} & set(options)


def test_a_variable_that_nothing_reads_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHEDULER_CREDITS", "4")
    with pytest.warns(UserWarning, match="BYTESCHEDULER_CREDITS has no meaning here. Did you mean 'BYTESCHEDULER_CRE"):
        ByteSchedulerStrategy()


def test_a_timeline_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"^timeline=.*and that is a folder"):
        ByteSchedulerStrategy(timeline=str(tmp_path))
    monkeypatch.setenv("BYTESCHEDULER_TIMELINE", str(tmp_path))
    with pytest.raises(OptionError, match=r"^BYTESCHEDULER_TIMELINE=.*and that is a folder"):
        ByteSchedulerStrategy()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_cross_barrier_is_a_switch(value: Any) -> None:
    with pytest.raises(OptionError, match="cross_barrier"):
        ByteSchedulerStrategy(cross_barrier=value)


def test_an_empty_timeline_is_refused() -> None:
    with pytest.raises(OptionError, match=r"timeline.*file path"):
        ByteSchedulerStrategy(timeline="")


def test_a_plain_module_is_accepted() -> None:
    check_module(nn.Linear(2, 2))


def test_sharded_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import fsdp

    class Wrapped(nn.Module):
        pass

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Wrapped)
    with pytest.raises(UnsupportedError, match=r"'0' is sharded, by FSDP.*strategy='fsdp'"):
        check_module(nn.Sequential(Wrapped()))


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.tensor as tensor_module

    class Sharded(nn.Parameter):
        pass

    monkeypatch.setattr(tensor_module, "DTensor", Sharded)
    module = nn.Linear(2, 2)
    module.weight = Sharded(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="'weight' is sharded, by FSDP or as a DTensor"):
        check_module(module)


def test_an_optimizer_in_the_backward_pass_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.bias._in_backward_optimizers = [torch.optim.SGD([module.bias])]  # type: ignore[attr-defined]  # as torch's
    with pytest.raises(UnsupportedError, match=r"'bias' is stepped in the backward pass.* or use strategy='ddp'"):
        refuse_steps_in_backward(module)


class StepsInBackward(Tower):
    """Comes to it when everything is set up."""

    expected_error = UnsupportedError

    def on_fit_start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch itself scripts there
            from torch.distributed.optim import _apply_optimizer_in_backward
        _apply_optimizer_in_backward(torch.optim.SGD, self.parameters(), {"lr": 0.1})


def step_in_backward(rank: int) -> str:
    return str(train(rank, Recipe(model=StepsInBackward, steps=3), Run()).error)


def test_an_optimizer_in_the_backward_pass_is_refused_at_the_first_forward_pass_too(two_ranks: RankPool) -> None:
    for said in two_ranks.run(step_in_backward):
        assert "is stepped in the backward pass, by _apply_optimizer_in_backward" in said


class Searches(Tower):
    """Fails within a search, as of a learning rate, which has callbacks of its own."""

    expected_error = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.callbacks = []  # type: ignore[attr-defined]
        raise ValueError("boom")


def search(rank: int) -> str:
    return str(train(rank, Recipe(model=Searches, steps=3), Run(network="plain")).error)


def test_an_error_within_a_search_of_lightnings_stays_what_it_is(two_ranks: RankPool) -> None:
    assert "ValueError: boom" in two_ranks.run(search)[0]


class Joins(Tower):
    """Tries what DDP has for uneven data."""

    def on_train_start(self) -> None:
        model: Any = self.trainer.model
        for enter in (lambda: Join([model]), model.join):
            with pytest.raises(UnsupportedError, match=r"Join cannot .*give all ranks as many batches"):
                enter()


def try_to_join(rank: int) -> None:
    assert train(rank, Recipe(model=Joins, steps=3), Run()).error is None
    strategy = ByteSchedulerFabricStrategy(**FABRIC_SIZES)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    wrapped: Any = fabric.setup(tower())
    with pytest.raises(UnsupportedError, match=r"give all ranks as many batches"):
        Join([wrapped._forward_module])
    strategy.end()


def test_join_is_refused_at_the_with(two_ranks: RankPool) -> None:
    two_ranks.run(try_to_join)
