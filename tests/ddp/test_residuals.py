"""What error feedback has left, wherever a process group takes tensors from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.ddp.residuals import Layout, Residuals, add_up_on_first
from tests.support.rank_pool import RankPool, join_default_group, let_go


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


def left_without(residuals: Residuals, *applied: str) -> None:
    """The last step was that of the ``applied`` ones alone."""
    for parameter in residuals._parameters.values():
        parameter.grad = torch.ones(2)
    residuals.stepped(torch.optim.SGD([residuals._parameters[name] for name in applied], lr=1.0))


def kept(*, loss_scale: float | None = None, may_be_dropped: bool = False) -> Residuals:
    """Those of two parameters, of which a step has left other things than there were before."""
    residuals = Residuals()
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("one", "other")}
    residuals.begin_fit(parameters if may_be_dropped else {}, may_drop=may_be_dropped)
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


def test_a_checkpoint_after_a_step_that_was_left_out_has_what_there_was_before() -> None:
    def add_up(tensor: Tensor) -> None:
        pass

    residuals = kept(loss_scale=8.0)
    assert residuals.total(add_up, keep=True, loss_scale=8.0)["residuals"]["one"].tolist() == [5.0, 5.0]  # type: ignore[index]
    state = residuals.total(add_up, keep=True, loss_scale=4.0)
    assert state is not None
    assert state["residuals"]["one"].tolist() == [0.0, 0.0]
    assert state["loss_scale"] == 4.0
    begin_step(residuals, 4.0)
    assert residuals.of("one", 2).tolist() == [0.0, 0.0]


def test_a_checkpoint_after_an_overflow_has_what_there_was_before_at_the_scale_of_now() -> None:
    """Also of those whose gradient nobody has stepped with."""
    residuals = kept(loss_scale=8.0, may_be_dropped=True)
    begin_step(residuals, 8.0)
    send(residuals, "one", 6.0)
    left_without(residuals, "other")
    state = residuals.total(lambda tensor: None, keep=True, loss_scale=4.0)
    assert state is not None
    assert state["residuals"]["one"].tolist() == [2.5, 2.5]


SHAPES: dict[str, tuple[int, ...]] = {"one": (2,), "new": (3,), "as": (3, 2)}


def test_what_was_loaded_of_others_is_left_out() -> None:
    state = {
        "format": 2,
        "loss_scale": 1.0,
        "residuals": {"one": torch.ones(2), "gone": torch.ones(2), "as": torch.ones(2, 3)},
    }
    residuals = Residuals()
    residuals.load(state, 2)
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    assert residuals.begin_fit(parameters, may_drop=False) == ["as", "gone"]
    assert residuals.of("one", 2).tolist() == [0.5, 0.5]
    assert not residuals.knows("gone")
    residuals.load(None, 2)
    assert not residuals.knows("one")


def test_a_checkpoint_has_nothing_of_gradients_that_it_does_not_have() -> None:
    residuals = kept(may_be_dropped=True)
    left_without(residuals, "other")
    state = residuals.total(lambda tensor: None, keep=True)
    assert state is not None
    assert {name: left.tolist() for name, left in state["residuals"].items()} == {"one": [0, 0], "other": [5, 5]}
    assert residuals.of("one", 2).tolist() == [5.0, 5.0], "training goes on with it"


def weight_in(memory_format: torch.memory_format) -> nn.Parameter:
    return nn.Parameter(torch.arange(48.0).view(2, 3, 4, 2).to(memory_format=memory_format))


def test_a_model_in_another_memory_format_gets_what_was_left_of_the_same_elements() -> None:
    saving, going_on = weight_in(torch.channels_last), weight_in(torch.contiguous_format)
    residuals, resumed = Residuals(), Residuals()
    residuals.begin_fit({"weight": saving}, may_drop=False)
    residuals.of("weight", 48).copy_(saving.detach().permute(0, 2, 3, 1).reshape(-1))  # as its bucket has it
    resumed.load(residuals.total(lambda tensor: None, keep=True), 1)
    assert not resumed.begin_fit({"weight": going_on}, may_drop=False)
    assert torch.equal(resumed.of("weight", 48), going_on.detach().reshape(-1))
    alike = Residuals()
    alike.load(residuals.total(lambda tensor: None, keep=True), 1)
    alike.begin_fit({"weight": saving}, may_drop=False)
    assert torch.equal(alike.of("weight", 48), residuals.of("weight", 48))


GRADIENT = torch.arange(48.0).view(2, 3, 4, 2)


class Slope(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        return (self.weight * GRADIENT).sum()


def keep_bucket(kept: list[Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    kept.append(bucket.buffer().clone())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


keep_bucket.__annotations__ = {}  # torch compares them with classes, and these are texts


def buckets_of_ddp(rank: int) -> list[bool]:
    """Whether DDP's buckets lie as layouts say, by kind of parameter."""
    join_default_group(rank)
    found = []
    try:
        for kind in KINDS.values():
            model = Slope(kind())
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            seen: list[Tensor] = []

            ddp.register_comm_hook(seen, keep_bucket)
            ddp().backward()
            wanted = GRADIENT
            layout = Layout.of(model.weight)
            found.append(torch.equal(layout.flat(wanted), seen[0]) and torch.equal(layout.shaped(seen[0]), wanted))
    finally:
        let_go()
        torch.distributed.destroy_process_group()
    return found


KINDS = {
    "contiguous": lambda: torch.zeros(2, 3, 4, 2),
    "channels last": lambda: torch.zeros(2, 3, 4, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(4, 2, 3, 2).permute(1, 2, 0, 3),
    "with gaps": lambda: torch.zeros(2, 3, 4, 4)[..., ::2],
}


def test_layouts_are_those_of_buckets(two_plain_ranks: RankPool) -> None:
    for found in two_plain_ranks.run(buckets_of_ddp):
        assert dict(zip(KINDS, found, strict=True)) == dict.fromkeys(KINDS, True)
