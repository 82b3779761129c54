"""``weighting="samples"``: a rank whose training data is used up continues with empty batches until all ranks' is.

*How long.* If every rank's loader has a reliable length, the longest counts, without messages. Otherwise each rank
posts with every batch that it draws whether it has one (``number_exchange.py``). A rank that has one goes on at once. A
rank that has none waits for the others' numbers: if any rank has a batch, this one gets an empty one; otherwise the
epoch is over. The wait ends, as a rank draws and posts its next batch before it trains on the present one, and ranks
step together.

*What an empty batch is.* ``training_step`` is not called, so nothing is computed twice, no metric counts a sample
twice, no buffer changes, and no random number is drawn. A function of all trained parameters with gradients of 0 runs
instead, in DDP's own forward pass. Hooks around the step run as usual, with the rank's last batch. Values that a step
logs for all ranks (``sync_dist=True``) are awaited by the other ranks, so they are also logged here, with as little
effect as possible (:func:`log_nothing`). They are known from the rank's own batches: it must have had one, and all
batches must log the same values in one order on all ranks.

*Which batch is empty.* Lightning may draw a batch ahead. So the loader records for each batch whether it is empty, and
the strategy reads this when Lightning moves the batch to its device, in the same order.

*A resume after an epoch's last batch.* Lightning makes the loader go on where it stood, where no rank has a batch. If
Lightning goes on with the next epoch, the data begins anew. If it has to end the epoch first, as after a validation, it
gets no batch.

*Fabric.* A user's own loop computes on whatever it is given. So a loader that is used up repeats its last batch
(:class:`DrawnBatches`), which counts 0 samples and leaves buffers unchanged. It does so only if it has trained, up to
the length of the longest loader of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.sample_weights import SampleCounter
from lightning_bytescheduler.ddp.sparse_gradients import sparse_layers
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import pl

_USED_UP = "lightning_bytescheduler.used_up"
_UNKNOWN = -1


class UnevenLoader:
    """A rank's loader of training data that lasts until all ranks' are used up.

    All other attributes are those of the wrapped loader.

    Args:
        length: Length of the longest loader of all ranks; ``None`` if a rank does not know its own.
        runtime: Returns this rank's runtime, which exchanges whether ranks have a batch.
        loaded: Training loaders that are used together; several loaders are left unchanged.
    """

    handed_out: deque[bool]
    at_end: bool

    def __init__(
        self,
        loader: Any,
        *,
        length: int | None,
        trusted: bool,
        runtime: Callable[[], SchedulerRuntime],
        loaded: list[object],
        progress: Any,
    ) -> None:
        self.__dict__.update(loader=loader, length=length, trusted=trusted, runtime=runtime, loaded=loaded)
        # Whether each batch that was handed out and has not begun is empty, and whether the present one is.
        self.__dict__.update(handed_out=deque(), is_empty=False)
        self.__dict__.update(progress=progress, is_used_up=False, at_end=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if len(self.loaded) > 1:
            return len(self.loader)
        if self.length is None:
            raise TypeError("Not every rank knows how many batches it has.")
        return int(self.length)

    def __iter__(self) -> Iterator[Any]:
        self.is_empty, self.is_used_up, self.handed_out = False, False, deque()
        if len(self.loaded) > 1:
            return iter(self.loader)
        if self.at_end:
            next(iter(self.loader), None)  # a generator drops its state only when its first item is requested
            self.at_end, batches = False, self.progress.current
            if batches.completed == batches.processed:
                return iter(())
        return self._until_all_end(iter(self.loader), self.handed_out)

    def _until_all_end(self, batches: Iterator[Any] | None, handed_out: deque[bool]) -> Iterator[Any]:
        """Yield this rank's batches, then empty ones as long as another rank has one."""
        drawn, last = 0, ()
        while not (self.trusted and drawn == self.length):
            if batches is not None:
                try:
                    last = next(batches)
                except StopIteration:
                    batches = None
            if not self.trusted:
                said = self.runtime().weights.has_batch(batches is not None)
                if batches is None:
                    said.wait(self.runtime().failure)
                    if not any(row[0] for row in said.rows):
                        break
            drawn += 1
            self.is_used_up = batches is None and not (self.trusted and drawn == self.length)
            handed_out.append(batches is None)
            yield () if last is None and batches is None else last
        self.is_used_up = False

    def begin_batch(self) -> None:
        """Begin the next of the batches that were handed out."""
        self.is_empty = bool(self.handed_out) and self.handed_out.popleft()


class _StatefulUnevenLoader(UnevenLoader):
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {_USED_UP: True} if self.is_used_up else self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Lightning's loops.

        Raises:
            UnsupportedError: If it does not say where all ranks' data stood.
        """
        self.at_end = self.progress.is_last_batch
        if _USED_UP not in state:
            self.loader.load_state_dict(state)
        elif not self.at_end:
            raise UnsupportedError(
                "The checkpoint was saved in the middle of an epoch, when rank 0's training data was used up and other "
                "ranks' was not: the state of its data loader does not say where theirs stood. Go on from a checkpoint "
                "of an epoch's end, or from one that was saved while rank 0 had batches."
            )


def stateful_or_not(loader: Any) -> type[UnevenLoader]:
    """Return the class for ``loader``: Lightning calls both state methods of loaders that have them."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return _StatefulUnevenLoader if stateful else UnevenLoader


def gather_lengths(loader: object, device: torch.device) -> tuple[int | None, int | None, bool]:
    """Return the least and the most batches of a rank, and whether they are reliable; all ranks call it together.

    They are ``None`` if a rank does not know its number. The length of an iterable data set is not reliable.
    """
    try:
        own = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        own = _UNKNOWN
    guessed = own == _UNKNOWN or isinstance(getattr(loader, "dataset", None), IterableDataset)
    message = torch.tensor([own, -own, guessed], device=device)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    most, least, guessed = int(message[0]), -int(message[1]), bool(message[2])
    return (None, None, False) if least == _UNKNOWN else (least, most, not guessed)


class _Nothing(torch.autograd.Function):
    """A loss of all parameters with gradients of 0 that reads none of them."""

    @staticmethod
    def forward(ctx: Any, makers: list[Callable[[], torch.Tensor | None]], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.makers = makers
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(make() for make in ctx.makers)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_of_nothing(model: nn.Module, module: nn.Module, *, may_be_unused: bool) -> torch.Tensor:
    """Run a forward pass of DDP that computes nothing; its backward pass gives all parameters gradients of 0.

    Args:
        model: DDP's model.
        module: The module inside it.
        may_be_unused: Whether DDP looks for parameters that no rank uses, which get no gradient. Then this rank uses
            none, except where the user's hooks expect a gradient.
    """
    sparse = {id(module.get_submodule(name).weight) for name in sparse_layers(module)}
    parameters = [p for p in module.parameters() if p.requires_grad]

    def maker(parameter: nn.Parameter) -> Callable[[], torch.Tensor | None]:
        if id(parameter) in sparse:
            return lambda: torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64), parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape
            )
        hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if may_be_unused and not hooked:
            return lambda: None
        return lambda: torch.zeros_like(parameter)

    makers, forward = [maker(p) for p in parameters], module.forward
    module.forward = lambda *_, **__: _Nothing.apply(makers, *parameters)  # type: ignore[no-untyped-call]
    try:
        loss: torch.Tensor = model()
    finally:
        module.forward = forward
    return loss


def log_nothing(trainer: pl.Trainer) -> None:
    """Take part in what ``training_step`` logs for all ranks, without a value of its own.

    Sums, minima and maxima do not change. A mean of ranks gets this rank's last value again. The mean of an epoch is
    weighted by samples, and this adds none.
    """
    for result in trainer.fit_loop.epoch_loop._results.values():
        meta = result.meta
        if meta.fx != "training_step" or not (meta.sync.should or not result.is_tensor):
            continue
        if result.is_tensor and meta.on_step:
            default = result._defaults["value"]
            value = default if not meta.is_mean_reduction or result._forward_cache is None else result._forward_cache
            result._forward_cache = meta.sync(value.clone())
            if not meta.on_epoch:
                result.value = result._forward_cache
        result.has_reset = False


class DrawnBatches(SampleCounter):
    """Counts the samples of the batch that a loop in Fabric drew before the forward pass.

    Batches drawn without gradients, as in a validation under ``torch.no_grad()``, do not count.
    """

    def __init__(self, samples: Callable[[Any], Any] | None, rank: int) -> None:
        super().__init__(samples, rank)
        # Samples of each batch; None for a repeated one.
        self._drawn: list[int | None] = []  # since the last forward pass
        self._present: list[int | None] = []
        self._passes = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers with their earlier values

    @property
    def has_batch(self) -> bool:
        """Whether the last batch drawn is not a repeated one."""
        return None not in (self._drawn or self._present)[-1:]

    def hand_out(self, loader: Any, length: int | None) -> Iterator[Any]:
        """Yield the batches of ``loader``; if they have been trained on, then repeat the last one.

        Args:
            loader: This rank's loader.
            length: Length of the longest loader of all ranks; ``None`` if unknown.

        Raises:
            UnsupportedError: If this rank has no batch, and another rank has one.
        """
        began, number, batch = self._passes, 0, None
        for batch in loader:
            number += 1
            if torch.is_grad_enabled():
                self._drawn.append(super().count(batch))
            yield batch
        if length and not number and torch.is_grad_enabled():
            raise UnsupportedError(
                f"weighting='samples': this rank's loader has no batch, and another rank's has {length}: there is none "
                "to compute on. Give each rank one at least; or draw under torch.no_grad() where nothing is trained."
            )
        for _ in range(number, length or 0) if self._passes > began else ():
            self._drawn.append(None)
            yield batch

    def begin_forward(self, module: nn.Module) -> None:
        """Begin a forward pass that a backward pass may follow.

        Raises:
            UnsupportedError: If several batches were drawn for it.
        """
        drawn, self._drawn = self._drawn, []
        if len(drawn) > 1:
            raise UnsupportedError(
                f"weighting='samples': {len(drawn)} batches were drawn before one forward pass, and it cannot be told "
                "which one it is of. Draw a batch when the one before has been trained on, have one loader give what "
                "belongs together, and draw what is not trained on under torch.no_grad()."
            )
        if drawn:
            self.end_backward()
            self._present = drawn
        if not self.has_batch and not self._kept:
            self._kept = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def count(self, batch: Any = None) -> int:
        """Return the samples of the batch that is trained on.

        Raises:
            UnsupportedError: If there is none.
        """
        if not self._present:
            raise UnsupportedError(
                "weighting='samples': fabric.backward was called before a loader has handed out a batch, so that it is "
                "not known how many samples count. Draw batches from what fabric.setup_dataloaders returns."
            )
        self._passes += 1
        return self._present[0] or 0

    def end_backward(self) -> None:
        """Restore buffers after a repeated batch."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class DrawnLoader:
    """A loader of Fabric whose batches are counted by samples.

    All other attributes are those of the wrapped loader.
    """

    def __init__(self, loader: Any, batches: DrawnBatches, length: int | None) -> None:
        self.__dict__.update(loader.__dict__)  # Fabric's own wrapper does the same
        self._loader, self._batches, self._length = loader, batches, length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches.hand_out(self._loader, self._length)
