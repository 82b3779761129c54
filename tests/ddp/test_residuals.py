"""What error feedback has left, wherever a process group takes tensors from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.ddp.residuals import Residuals, add_up_on_first


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_sum_is_formed_where_the_group_takes_tensors_from(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's has none for tensors of a CPU, and residuals are there."""
    device, there = torch.device("cpu" if on_cpu else "cuda"), list[Tensor]()

    def to(tensor: Tensor, where: Any) -> Tensor:
        assert where == device
        there.append(tensor if on_cpu else tensor.clone())
        return there[0]

    def reduce(tensor: Tensor, *, dst: int) -> None:
        assert tensor is there[0]
        assert dst == 0
        tensor.mul_(2)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(dist, "reduce", reduce)
    left = torch.arange(3.0)
    add_up_on_first(left, device)
    assert left.tolist() == [0.0, 2.0, 4.0]


def test_residuals_are_in_host_memory_whatever_the_default_is() -> None:
    with torch.device("meta"):
        made = Residuals().of("weight", 4)
    assert made.device.type == "cpu"
    assert made.tolist() == [0.0] * 4
