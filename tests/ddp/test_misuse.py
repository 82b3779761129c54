"""Bad input fails when the strategy is made, and the message names option, value and way out."""

import inspect
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed import is_nccl_available
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler import (
    ByteSchedulerFabricStrategy,
    ByteSchedulerStrategy,
    DiLoCoStrategy,
    OptionError,
    UnsupportedError,
)
from lightning_bytescheduler.ddp import rank_strategy
from lightning_bytescheduler.ddp.ddp_arguments import check_hooks, check_module
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
        ("trials", "option of the callback CreditTuner"),
        ("inner_steps", r"DiLoCoStrategy\(inner_steps=...\)"),
    ],
)
def test_a_misspelt_option_is_refused_at_once(option: str, says: str) -> None:
    with pytest.raises(OptionError, match=rf"^ByteSchedulerStrategy has no option '{option}'.*{says}.*static_graph"):
        ByteSchedulerStrategy(**{option: 4})


def test_a_size_without_its_name_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^accelerator=131072 .*as in ByteSchedulerStrategy\(partition_size="):
        ByteSchedulerStrategy(131072)  # type: ignore[arg-type]
    ByteSchedulerStrategy("cpu")  # type: ignore[arg-type]  # as DDPStrategy takes it


LAUNCH = [
    ("accelerator", 8.0, "an Accelerator"),
    ("parallel_devices", 2, "a list of torch.device"),
    ("parallel_devices", ["cpu"], "a list of torch.device"),
    ("cluster_environment", "slurm", "an instance of ClusterEnvironment"),
    ("checkpoint_io", "file", "an instance of CheckpointIO"),
    ("precision_plugin", "16-mixed", r"an instance of Precision, or left out. Trainer has precision="),
    ("process_group_backend", "tcp", "'gloo'"),
    ("process_group_backend", "cpu:goo", r"'gloo'.* or None\. Did you mean 'gloo'"),
    ("process_group_backend", 3, "'gloo'"),
    pytest.param(
        "process_group_backend",
        "cpu:gloo,cuda:nccl",
        "'gloo'",
        marks=pytest.mark.skipif(is_nccl_available(), reason="this PyTorch has NCCL"),
    ),
    ("timeout", 30, r"a datetime.timedelta above 0, or None. Write timeout=timedelta\(seconds=30\)"),
    ("timeout", timedelta(0), "a datetime.timedelta above 0"),
    ("start_method", "thread", "one of 'popen', 'spawn', 'fork', 'forkserver'"),
    ("start_method", None, "one of 'popen'"),
]


@pytest.mark.parametrize(("option", "value", "allowed"), LAUNCH)
@pytest.mark.parametrize("strategy", [ByteSchedulerStrategy, DiLoCoStrategy])
def test_how_processes_start_is_checked(strategy: Any, option: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError, match=rf"^{option}=.* must be {allowed}"):
        strategy(**{option: value})


@pytest.mark.parametrize("strategy", [ByteSchedulerStrategy, DiLoCoStrategy])
def test_what_lightning_takes_is_let_through(strategy: Any) -> None:
    strategy(
        None,
        [torch.device("cpu")] * 2,
        LightningEnvironment(),
        TorchCheckpointIO(),
        Precision(),
        process_group_backend="cpu:gloo",
        timeout=timedelta(seconds=5),
        start_method="forkserver",
    )
    strategy(timeout=None, process_group_backend="GLOO")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("find_unused_parameters", "yes", "True or False"),
        ("static_graph", "no", "True or False"),
        ("broadcast_buffers", "all", "True or False"),
        ("init_sync", None, "True or False"),
        ("check_reduction", 1, "True or False"),
        ("gradient_as_bucket_view", "yes", "True or False"),
        ("dim", 1.5, "a whole number, 0 or more"),
        ("device_ids", [0], "left out"),
        ("output_device", 0, "left out"),
        ("module", nn.Linear(2, 2), "left out"),
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
@pytest.mark.parametrize("value", [3, [], [1, "a"], [1, -1]])
def test_lists_of_buckets_are_checked(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^bucket_cap_mb_list=.* must be a list of megabytes"):
        ByteSchedulerStrategy(bucket_cap_mb_list=value)


def test_what_a_config_names_without_need_does_not_reach_ddp() -> None:
    """LightningCLI hands over all that DDP's constructor has."""
    options = ByteSchedulerStrategy(module=None, device_ids=None, output_device=None, process_group=None)._ddp_kwargs
    assert not {"module", "device_ids", "output_device", "process_group"} & set(options)


def test_a_variable_that_nothing_reads_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_strategy, "_said", set())
    monkeypatch.setenv("BYTESCHEDULER_CREDITS", "4")
    with pytest.warns(UserWarning, match="BYTESCHEDULER_CREDITS has no meaning here. Did you mean 'BYTESCHEDULER_CRE"):
        ByteSchedulerStrategy()
    DiLoCoStrategy()  # a second warning would be an error


def test_a_coordinator_is_for_diloco(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("BYTESCHEDULER_COORDINATOR", "http://127.0.0.1:7077")
    with caplog.at_level("INFO"):
        ByteSchedulerStrategy()
        assert caplog.text.count("BYTESCHEDULER_COORDINATOR is ignored: it is for strategy='diloco'") == 1
        DiLoCoStrategy()
    assert caplog.text.count("is ignored") == 1


def test_a_size_that_may_have_been_meant_in_megabytes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ByteSchedulerStrategy(partition_size=25, credit=1024)
    assert "partition_size=25 is in parameters: 100 bytes" in caplog.text
    assert "25 MB of fp32 = 6,250,000 parameters" in caplog.text
    assert "credit=1024" not in caplog.text


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


def test_an_optimizer_in_the_backward_pass_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.bias._in_backward_optimizers = [torch.optim.SGD([module.bias])]  # type: ignore[attr-defined]  # as torch's
    with pytest.raises(UnsupportedError, match=r"'bias' is stepped in the backward pass.* or use strategy='ddp'"):
        check_hooks(module)


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


def test_hooks_after_accumulation_are_warned_of_once() -> None:
    module = nn.Linear(2, 2)
    for parameter in module.parameters():
        handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.warns(UserWarning, match=r"'weight' has a hook after accumulation .* 2 parameters have") as said:
        check_hooks(module)
    assert len(said) == 1
    handle.remove()
    module.weight = nn.Parameter(torch.zeros(2, 2))
    check_hooks(module)


def test_a_checkpoint_of_diloco_is_said_to_leave_something_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints: list[dict[str, Any]] = [{"lightning_bytescheduler.diloco": {}}, {}]
    for checkpoint in checkpoints:
        torch.save(checkpoint, tmp_path / "last.ckpt")
        caplog.clear()
        with caplog.at_level("INFO"):
            assert ByteSchedulerStrategy().load_checkpoint(tmp_path / "last.ckpt") == checkpoint
        assert ("its outer optimizer is left out" in caplog.text) == bool(checkpoint)


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
