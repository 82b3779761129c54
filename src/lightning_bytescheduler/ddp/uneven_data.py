"""``weighting="samples"``: a rank whose training data is used up takes part with empty batches until all ranks' is.

*Until when.* Where every rank's loader has a length that is to be trusted, the longest counts, and nothing is said.
Else each rank says with every batch that it draws whether it has one (``number_exchange.py``). One that has goes on at
once. One that has none waits for the word of the others: if any has one, this is a batch of all, an empty one here;
else the epoch is over. Why that wait ends: a rank draws its next batch, and says so, before it trains on the one that
it has, and gets to draw it as ranks step together.

*What an empty batch is.* ``training_step`` is not called: nothing is computed twice, no metric counts a sample twice,
no buffer changes, and no random number is drawn. A function of all trained parameters takes its place, in DDP's own
forward pass, whose gradients are 0. Hooks around the step run as ever, and are given the rank's last batch. What a
step logs for all ranks at once (``sync_dist=True``) the others wait for, so it is logged here, too, so that it changes
as little as can be (:func:`log_nothing`). Which values these are is known from the rank's own batches: so it has to
have had one, and each of them has to log the same values, in one order on all ranks.

*Who is without a batch.* Lightning may draw a batch ahead. So the loader notes of each that it hands out whether it is
empty, and the strategy asks when Lightning moves a batch to its device, which is the same order.

*A resume after an epoch's last batch.* Lightning has the loader go on where it stood. There it has no batch, on any
rank: where Lightning goes on with the next epoch, the data begins anew. Where it has to end the epoch first, as after
a validation, it is given none.

*Fabric.* A loop of the user's own computes on whatever it is given. So a loader that is used up hands out its last
batch again (:class:`DrawnBatches`), which counts 0 samples, and leaves buffers as they are. It does so where it has
trained, and as long as the longest of all ranks.
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
    """A rank's loader of training data that goes on until all ranks' are used up.

    Whatever else is asked of it, or set, is the loader's.

    Args:
        loader: This rank's own.
        length: Of the longest of all ranks; ``None`` if a rank does not know its own.
        trusted: Whether all know theirs for certain.
        runtime: Returns this rank's, which says to all ranks whether this one has a batch, and what they say.
        loaded: Training data that is loaded at once; several loaders are left as they are.
        progress: Lightning's, in the epoch.
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
        # Of the batches that were handed out, and have not begun, whether each is empty; and of the one that has.
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
            next(iter(self.loader), None)  # a generator begins, and so forgets its state, when it is first asked
            self.at_end, batches = False, self.progress.current
            if batches.completed == batches.processed:
                return iter(())
        return self._until_all_end(iter(self.loader), self.handed_out)

    def _until_all_end(self, batches: Iterator[Any] | None, handed_out: deque[bool]) -> Iterator[Any]:
        """This rank's batches, and empty ones as long as another rank has one."""
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
        """The next of the batches that were handed out is trained on."""
        self.is_empty = bool(self.handed_out) and self.handed_out.popleft()


class _StatefulUnevenLoader(UnevenLoader):
    def state_dict(self) -> dict[str, Any]:
        """See Lightning's loops. Rank 0's is saved, and counts for all."""
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
    """The class for ``loader``: Lightning asks loaders for their states that have both methods."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return _StatefulUnevenLoader if stateful else UnevenLoader


def gather_lengths(loader: object, device: torch.device) -> tuple[int | None, int | None, bool]:
    """The least and the most batches that ranks have, and whether that is certain; all ranks at once.

    ``None`` for a number that a rank does not know. What a data set without numbered samples says is a guess.
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
    """A loss of all parameters whose gradients are 0, and which reads none of them."""

    @staticmethod
    def forward(ctx: Any, makers: list[Callable[[], torch.Tensor | None]], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.makers = makers
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(make() for make in ctx.makers)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_of_nothing(model: nn.Module, module: nn.Module, *, may_be_unused: bool) -> torch.Tensor:
    """A forward pass of DDP's that computes nothing, for a backward pass that brings all parameters gradients of 0.

    Args:
        model: DDP's.
        module: Inside of it.
        may_be_unused: Whether DDP looks for parameters that no rank uses. They are to have no gradient: then this
            brings none, as a rank that does not use them, but where the user's hooks expect one.
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
    """Take part in what ``training_step`` logs for all ranks at once, with nothing to say.

    In a sum, a minimum or a maximum this rank changes nothing. A mean of ranks has its last value again; the mean of an
    epoch goes by numbers of samples, of which it adds none.
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
    """Counts the samples of what a loop of Fabric trains on: of the batch that was drawn before the forward pass.

    What is drawn without gradients, as in a validation under ``torch.no_grad()``, does not count.

    Args:
        samples: See :class:`SampleCounter`.
        rank: For messages.
    """

    def __init__(self, samples: Callable[[Any], Any] | None, rank: int) -> None:
        super().__init__(samples, rank)
        # Samples of each batch; None for one that is there again.
        self._drawn: list[int | None] = []  # since the last forward pass
        self._present: list[int | None] = []
        self._passes = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, and what they held

    @property
    def has_batch(self) -> bool:
        """Whether what was drawn last is a batch of this rank's own."""
        return None not in (self._drawn or self._present)[-1:]

    def hand_out(self, loader: Any, length: int | None) -> Iterator[Any]:
        """The batches of ``loader``; then, where they have been trained on, the last one again.

        Args:
            loader: This rank's.
            length: Of the longest of all ranks; ``None`` if that is not known.

        Raises:
            UnsupportedError: If there is none to hand out, and another rank has one.
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
        """A forward pass begins that a backward pass may follow.

        Raises:
            UnsupportedError: If it cannot be told which batch it is of.
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
        """Of the batch that is trained on.

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
        """A batch that is there again leaves buffers as they were."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class DrawnLoader:
    """A loader of Fabric whose batches count by their samples.

    Whatever else is asked of it is the loader's.

    Args:
        loader: This rank's own.
        batches: Those of all loaders.
        length: See :meth:`DrawnBatches.hand_out`.
    """

    def __init__(self, loader: Any, batches: DrawnBatches, length: int | None) -> None:
        self.__dict__.update(loader.__dict__)  # as Fabric's own wrapper, which takes these
        self._loader, self._batches, self._length = loader, batches, length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches.hand_out(self._loader, self._length)
