"""What a user may say of compression, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.compression.dense import Dense
from lightning_bytescheduler.compression.powersgd import PowerSGD
from lightning_bytescheduler.compression.sparse import TopK
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.wire import ServerOptions
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError


def rules(compression: Any, min_size: int | None = None) -> CompressionRules:
    made = CompressionRules.resolve(compression, min_size)
    assert made is not None
    return made


def spec_of(compression: Any, name: str, parameter: torch.Tensor) -> str | None:
    codec = rules(compression).codec_for(name, nn.Parameter(parameter, requires_grad=False))
    return None if codec is None else codec.spec


@pytest.mark.parametrize(
    ("compression", "says"),
    [
        ("int9", "compression='int9' is not allowed"),
        (8, "compression=8 is not allowed"),
        ({"*": 3}, "None, the name of a compressor such as 'int8', or a Compressor"),
        ("topk", "'topk' takes 1 to 2 parameters"),
        ({"*": "randomk:0.1"}, "must be one of 'bf16'"),
        ({"*": ["topk", 0.01]}, "the name of a compressor such as 'int8'"),
        ({}, "patterns of parameter names"),
        ({"*.weight": "int3"}, "compression['*.weight']='int3' is not allowed"),
        ({3: "int8"}, "patterns of parameter names"),
    ],
)
def test_what_is_not_allowed_is_said_at_once(compression: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        ByteSchedulerStrategy(compression=compression)
    assert says in str(caught.value)


@pytest.mark.parametrize("options", [{"compression_min_size": 5}, {"compression": "int8", "compression_min_size": -1}])
def test_a_size_that_means_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="compression_min_size"):
        ByteSchedulerStrategy(**options)


def test_nothing_is_compressed_unless_somebody_says_so() -> None:
    for nothing in (None, "none", {"*": None}):
        assert CompressionRules.resolve(nothing) is None


def test_the_first_pattern_that_fits_counts() -> None:
    by_name = {"head.*": None, "*.weight": "bf16", "layers.*": TopK(0.01)}
    large = torch.zeros(40, 40)
    assert spec_of(by_name, "head.weight", large) is None
    assert spec_of(by_name, "layers.0.weight", large) == "bf16"
    assert spec_of(by_name, "layers.0.scale", large) == "topk:0.01"
    assert spec_of(by_name, "other", large) is None
    assert rules(by_name).spec == "head.*: none, *.weight: bf16, layers.*: topk:0.01 (min_size 1024)"


_OWN = ["head.weight", "head.bias", "layers.0.weight", "layers.0.scale", "embedding.weight"]
_NAMES = {**{name: name for name in _OWN}, "output.weight": "embedding.weight"}


@pytest.mark.parametrize(
    ("compression", "says"),
    [
        ({"haed.*": None, "*": "int8"}, "compression['haed.*']='none' is not allowed"),
        ({"haed.*": None, "*": "int8"}, "it fits no name. Did you mean 'head.*'?"),
        ({"layers.0.weights": "int8"}, "Did you mean 'layers.0.weight'?"),
        ({"output.*": None, "*": "int8"}, "'output.weight' is tied to 'embedding.weight', and goes by that name."),
        ({"zzz": "int8"}, "Leave it out, or see model.named_parameters()"),
        ({"*": "int8", "head.*": None}, "must be before '*' in the dict"),
        ({"*": "int8", "head.*": None}, "Put 'head.*' first."),
        ({"*weight": "int8", "embedding.*": "bf16"}, "must be before '*weight' in the dict"),
        ({"*": "int8", "*e*": "int4"}, "compression['*e*'] must be before '*' in the dict"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(compression: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        rules(compression).check_patterns(_NAMES)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "compression",
    [
        "int8",
        {"head.*": None, "*": "int8"},
        {"head.*": "int8", "layers.*": "bf16", "embedding.*": None, "*": "int4"},  # all that is left, if there is any
        {"*.weight": "powersgd", "head.*": None, "*": "powersgd:1"},
        {"*": "powersgd", "*bias": None},  # for which there are no factors
    ],
)
def test_patterns_that_may_count(compression: Any) -> None:
    rules(compression).check_patterns(_NAMES)


def test_what_has_no_factors_is_for_the_next_pattern() -> None:
    by_name = {"*.weight": "powersgd", "norm.*": None, "*": "powersgd:1"}
    assert spec_of(by_name, "a.weight", torch.zeros(100, 50)) == "powersgd:4"
    assert spec_of(by_name, "a.weight", torch.zeros(40, 30)) == "powersgd:4"
    assert spec_of(by_name, "a.weight", torch.zeros(8, 150)) == "powersgd:1"
    assert spec_of(by_name, "norm.weight", torch.zeros(5000)) is None
    assert spec_of({"*": "powersgd"}, "a.weight", torch.zeros(5000)) is None


def test_what_would_not_shrink_travels_as_it_is() -> None:
    assert spec_of("int8", "small", torch.zeros(1023)) is None
    assert spec_of("int8", "large", torch.zeros(1024)) == "int8:nearest"
    assert spec_of(Dense("fp32"), "large", torch.zeros(2000)) is None
    assert spec_of(Dense("fp32"), "double", torch.zeros(2000, dtype=torch.float64)) == "fp32", "with error feedback"
    assert spec_of("bf16", "half", torch.zeros(2000, dtype=torch.bfloat16)) is None
    assert spec_of("int8", "half", torch.zeros(2000, dtype=torch.bfloat16)) == "int8:nearest"
    assert spec_of("int8", "complex", torch.zeros(2000, dtype=torch.complex64)) is None
    assert spec_of("int8", "whole", torch.zeros(2000, dtype=torch.int64)) is None
    assert spec_of("int8:stochastic", "large", torch.zeros(2000)) == "int8"


def test_matrices_travel_as_factors_and_all_else_as_it_is() -> None:
    large = torch.zeros(100, 50, 2)
    assert spec_of("powersgd", "large", large) == "powersgd:4"
    assert spec_of(PowerSGD(2), "large", large) == "powersgd:2"
    assert spec_of("powersgd:4", "flat", torch.zeros(10_000)) is None
    assert spec_of("powersgd:25", "narrow", large) is None, "its factors would be half as large"
    assert spec_of("powersgd:4", "small", torch.zeros(31, 33)) is None
    assert rules("powersgd:4").whole_matrices
    assert not rules("int8").whole_matrices
    parameters = {"large": nn.Parameter(large), "flat": nn.Parameter(torch.zeros(1000))}
    assert rules("powersgd:4").ratio(parameters) == 11_000 / (4 * (100 + 100) + 1000)


def test_ranks_begin_with_the_same_factors() -> None:
    first, second = (Residuals().right_of("m", 5, PowerSGD(2)) for _ in range(2))
    assert torch.equal(first, second)


def test_factors_of_matrices_are_not_for_part_of_the_compressed() -> None:
    with pytest.raises(
        OptionError, match=r"a dict of 'powersgd' and None.* What is no matrix, or for None, travels as"
    ):
        CompressionRules.resolve({"embedding.*": "int8", "*": "powersgd"})


@pytest.mark.parametrize("compression", ["int8", "topk:0.1", {"head*": "bf16"}, "powersgd:2"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_gradients_on_a_cpu_or_a_gpu_are_compressed(compression: Any, device: str) -> None:
    made = rules(compression)
    if device != "mps":
        made.check_training(torch.device(device), automatic=True)
        return
    with pytest.raises(UnsupportedError, match=r"gradients on a CPU or a CUDA GPU, and these are on mps"):
        made.check_training(torch.device(device), automatic=True)


def test_servers_take_gradients_of_cpus_and_of_cuda_gpus() -> None:
    nothing: Any = None
    place: Any = SimpleNamespace(root_device=torch.device("mps"))
    options = ServerOptions.resolve(0)
    with pytest.raises(UnsupportedError, match=r"a CPU or a CUDA GPU, and these are on mps. Leave servers out"):
        options.join(nothing, nothing, place, timeout=None)
