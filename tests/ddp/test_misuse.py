"""Bad input fails when the strategy is made, and the message names option, value and way out."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler import ByteSchedulerStrategy, OptionError, UnsupportedError
from lightning_bytescheduler.ddp.ddp_arguments import check_module


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
@pytest.mark.parametrize("value", ["0", "-3", "lots", "", "nan", "inf"])
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


def test_a_misspelt_option_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match=r"'partition'.*partition_size.*static_graph"):
        ByteSchedulerStrategy(partition=4)


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
    with pytest.raises(UnsupportedError, match=r"'0'.*FSDP.*strategy='fsdp'"):
        check_module(nn.Sequential(Wrapped()))


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.tensor as tensor_module

    class Sharded(nn.Parameter):
        pass

    monkeypatch.setattr(tensor_module, "DTensor", Sharded)
    module = nn.Linear(2, 2)
    module.weight = Sharded(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match="'weight' is a DTensor"):
        check_module(module)
