"""What one worker alone has at a moment between two rounds, as a checkpoint keeps it: all that is not the global state.

That is its optimizer, schedules and loss scale, its progress, its place in the epoch, its buffers and random numbers;
with fragments or overlap its own weights too, and what compressed pseudo-gradients have left to be sent. Tensors and
primitives only, in host memory.

The worker that writes the checkpoint has its own in Lightning's places. Where it writes in the middle of a round, they
are put back to the round's begin, of which the weights are; see :func:`put_back`.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bytescheduler.diloco.epoch_shares import share_of
from lightning_bytescheduler.lightning_api import pl

_PROGRESS = "epoch_loop.batch_progress"
_COUNTS = (
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.scheduler_progress",
)
_MOVED_BY_AVERAGING = "current_model_state"  # where Lightning's WeightAveraging puts what was in "state_dict"
_LARGE = ("optimizers", "unsent", "weights")


class Moment(NamedTuple):
    """A moment of which a checkpoint can be, the same for all workers.

    Attributes:
        rounds: How many are over.
        halted: Whether all workers stand still; else the next round has begun.
    """

    rounds: int
    halted: bool


def take(
    trainer: pl.Trainer,
    *,
    full: bool,
    after_batch: bool,
    halted: bool,
    numbers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What this worker has now, by the Trainer; on the training thread, with weights that are up to date.

    Args:
        trainer: Whose fit it is.
        full: Also the state of optimizers, which takes memory.
        after_batch: Whether this is where Lightning has counted a batch, and not yet a step.
        halted: See :class:`Moment`.
        numbers: What :func:`random_numbers` gave, if the present ones are later.
    """
    module = trainer.lightning_module
    share = share_of(trainer)
    precision = trainer.precision_plugin.state_dict()
    taken: dict[str, Any] = {
        "global_step": trainer.global_step,
        "loops": _progress(trainer, after_batch=after_batch, halted=halted),
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "buffers": {name: _kept(buffer) for name, buffer in _buffers(module).items()},
        "random": random_numbers(trainer.strategy.root_device) if numbers is None else dict(numbers),
        "position": None if share is None else share[1].position,
    }
    if precision:
        taken["precision"] = {type(trainer.precision_plugin).__qualname__: _kept(precision)}
    if full:
        taken["optimizers"] = [_kept(optimizer.state_dict()) for optimizer in trainer.strategy.optimizers]
    return taken


def give(taken: Mapping[str, Any], checkpoint: dict[str, Any], *, halted: bool) -> None:
    """Put what a worker had into Lightning's places of a checkpoint that another worker wrote; others stay.

    Args:
        taken: Of this worker.
        checkpoint: Is changed.
        halted: See :class:`Moment`: then epochs ended for all as they did for who wrote it.
    """
    loops: dict[str, Any] = checkpoint["loops"]["fit_loop"]
    if halted:
        own: Mapping[str, Any] = taken["loops"]
        loops[_PROGRESS] = {**own[_PROGRESS], "is_last_batch": loops[_PROGRESS]["is_last_batch"]}
        loops.update({name: own[name] for name in _COUNTS if name in own})
        if "combined_loader" in own.get("state_dict", {}):
            loops["state_dict"] = own["state_dict"]
        _put_states(taken, checkpoint)
    else:
        put_back(taken, checkpoint)


def put_back(taken: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
    """Have a checkpoint be of the begin of its round, when ``taken`` was taken."""
    checkpoint["loops"]["fit_loop"] = copy.deepcopy(taken["loops"])
    _put_states(taken, checkpoint)


def _put_states(taken: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
    checkpoint["global_step"] = taken["global_step"]
    checkpoint["lr_schedulers"] = taken["schedulers"]
    checkpoint.update(taken.get("precision", {}))
    if "optimizers" in taken:
        checkpoint["optimizer_states"] = taken["optimizers"]
    model = checkpoint.get(_MOVED_BY_AVERAGING, checkpoint["state_dict"])
    model.update({name: value for name, value in taken["buffers"].items() if name in model})


def random_numbers(device: torch.device) -> dict[str, Any]:
    """The states of the generators that torch, Python and NumPy draw from."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        if kind == "MT19937":
            states["numpy"] = (torch.tensor(keys.tolist(), device="cpu"), int(position), int(has_gauss), float(gauss))
    return states


def set_random_numbers(states: Mapping[str, Any], device: torch.device) -> None:
    """Draw on from what :func:`random_numbers` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        keys, *others = states["numpy"]
        numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), *others))


def _progress(trainer: pl.Trainer, *, after_batch: bool, halted: bool) -> dict[str, Any]:
    """Lightning's, as if nothing of the next batch had begun."""
    loops: dict[str, Any] = copy.deepcopy(trainer.fit_loop.state_dict())
    progress = loops[_PROGRESS]
    for counts in (progress["total"], progress["current"]):
        done = counts["processed"]
        counts.update(ready=done, started=done, completed=done)
    if not halted:
        progress["is_last_batch"] = False
    if after_batch:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return loops


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        name if not prefix else f"{prefix}.{name}": buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def _kept(state: Any) -> Any:
    """The same in host memory, with copies of its tensors, which training would go on changing."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _kept(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_kept(value) for value in state) if type(state) in (list, tuple) else state
    return state
