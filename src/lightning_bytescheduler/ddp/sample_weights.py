"""``weighting="samples"``: each rank's gradient counts by its samples, as one process's on all of them would.

With n_ij samples in the j-th batch of rank i, of the batches that one step accumulates, and g_ij the gradient of that
batch's mean loss, a step's gradient is ::

    sum over i and j of n_ij g_ij / N,    N = sum of all n_ij

times whatever the accumulation makes of it besides: Lightning divides each loss by ``accumulate_grad_batches``, also
where the end of an epoch leaves a step fewer batches, and the k batches of a step are as many as they were. So a batch
counts n_ij over the *mean* number of samples of the step's batches, and where all are equal nothing differs from DDP.

It is formed in two places. Among the batches of one rank, the gradient that enters a backward pass is multiplied with
n_ij / c_i, where c_i is the number of the first batch that has samples: known at once, and 1 where they are equal.
Among ranks, the reduction multiplies with c_i k / N in place of 1 / ranks, before it sums. Both are quotients of whole
numbers, rounded once: where counts are equal that is 1 / ranks exactly as DDP has it, and the bits are DDP's.

*When N is known.* A rank posts its number when a batch begins, before the forward pass (``number_exchange.py``). Tasks
of a step become ready when their gradient exists and N is known, the last of the two on whichever thread it happens:
the training thread goes on. It waits for N only where it would wait for gradients next, at the end of a synchronised
backward pass past the scheduler.

*Why ranks agree on the step.* A step's batches are those since the last backward pass that communicated, which DDP
wants to be the same on all ranks. The factors of all ranks come from the same numbers, so they add up to k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from lightning_bytescheduler.checks import did_you_mean, gone, is_whole
from lightning_bytescheduler.collectives.number_exchange import NumberExchange, PostedNumbers
from lightning_bytescheduler.ddp.balance import Balance
from lightning_bytescheduler.ddp.device_time import DeviceTime
from lightning_bytescheduler.exceptions import OptionError

NUMBERS = 3
"""What a rank posts with a batch: its samples, and samples and nanoseconds of the batch before where that is known."""

NOTHING = object()
"""In place of a batch of a rank that has none."""

_WEIGHTINGS = ("ranks", "samples")
_LENGTHS_SHOWN = 4
_MOST = 1 << 40  # samples of a batch: sums stay far below what 64 bits hold
_WAY_OUT = "Give weighting= a function of the batch that returns how many samples it has: a whole number, 0 or more."


class BatchSizes(Protocol):
    """Who draws this rank's part of batches that are shared."""

    def size_of(self, batch: int) -> int | None:
        """Samples of this rank in a batch of the epoch, 0 if it computes on another's; ``None`` if it is not known."""

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """How much a batch counts among the ``accumulated`` ones of its step: 1 if all are equally large."""


def tensors_in(batch: Any) -> Iterator[torch.Tensor | int]:
    """The tensors of a batch, in order, however they are nested; of a batch of graphs, how many those are."""
    graphs: Any = getattr(batch, "num_graphs", None)  # torch_geometric: its tensors have a row for each node or edge
    if isinstance(batch, torch.Tensor) or is_whole(graphs):
        yield batch if isinstance(batch, torch.Tensor) else graphs
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, Iterable) and not (isinstance(batch, (str, bytes, Iterator)) or hasattr(batch, "__array__")):
        for value in batch:
            yield from tensors_in(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from tensors_in(getattr(batch, field.name))


def samples_in(batch: Any) -> int:
    """How many samples a batch has: the length that all of its tensors have in common.

    Tensors without a dimension do not count, unless there are no others.

    Raises:
        ValueError: If there is no tensor, or their lengths differ; says so.
    """
    found = list(tensors_in(batch))
    lengths = {one if isinstance(one, int) else len(one) for one in found if isinstance(one, int) or one.ndim}
    if len(lengths) == 1:
        return lengths.pop()
    if lengths:
        shown = ", ".join(map(str, sorted(lengths)[:_LENGTHS_SHOWN]))
        raise ValueError(f"its tensors have different lengths ({shown}), so that none says how many samples there are")
    if found:
        return 1
    raise ValueError(f"it is a {type(batch).__name__} without a tensor")


class SampleCounter:
    """Says how many samples a batch of this rank has.

    Args:
        samples: The user's function of the batch; :func:`samples_in` if there is none.
        rank: For messages.
    """

    def __init__(self, samples: Callable[[Any], Any] | None, rank: int) -> None:
        self._samples = samples
        self._rank = rank
        self._batches = 0

    def count(self, batch: Any) -> int:
        """Of the next batch.

        Raises:
            OptionError: If that cannot be told; names option, rank and value, and the way out.
        """
        self._batches += 1
        if isinstance(batch, Iterator):  # to look into it would use it up
            raise self._error("samples", "training_step(dataloader_iter) has no batch to count samples of")
        if self._samples is None:
            try:
                return samples_in(batch)
            except (ValueError, RecursionError, TypeError) as error:
                raise self._error("samples", f"its batch has no size: {error}") from error
        try:
            number = self._samples(batch)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise self._error(name_of(self._samples), f"the function failed with {said}") from error
        one = number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
        try:
            whole = -1 if isinstance(one, bool) or int(one) != one else int(one)
        except (TypeError, ValueError, OverflowError):
            whole = -1
        if not 0 <= whole < _MOST:
            shown = f"{number!r} of type {type(number).__name__}"
            raise self._error(name_of(self._samples), f"the function returned {shown}")
        return whole

    def _error(self, value: str, fact: str) -> OptionError:
        where = f"on rank {self._rank}, in training batch {self._batches} of this fit"
        return OptionError("weighting", value, "", says=f"weighting={value!r}: {where}, {fact}. {_WAY_OUT}")


class Weighting:
    """What a rank's gradient counts by, as the user said.

    Args:
        weighting: ``"ranks"`` or ``"samples"``, counted by :func:`samples_in`; or a function that says how many samples
            a batch has.
        batch_size: ``"balanced"`` for batches that follow each rank's pace, ``"global"`` for a DataLoader whose batch
            size is that of all ranks; or ``{"balanced": most}``, with the most samples that a rank may have in a batch:
            one number, or one for each rank.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(self, weighting: object, batch_size: object = None) -> None:
        self.samples = weighting if callable(weighting) else None
        if self.samples is None and weighting not in _WEIGHTINGS:
            hint = did_you_mean(weighting, _WEIGHTINGS)
            raise OptionError("weighting", weighting, "'ranks', 'samples', or a function of the batch", hint)
        self.by_samples = weighting != "ranks"
        self.facts = {"weighting": "a function" if self.samples else weighting, "batch_size": batch_size}
        self._given = batch_size
        self._most: int | Sequence[int] | None = None
        if isinstance(batch_size, Mapping) and set(batch_size) == {"balanced"}:
            self._most = batch_size["balanced"]
            batch_size = "balanced"
            limits = self._most if isinstance(self._most, (list, tuple)) else [self._most]
            if not limits or not all(is_whole(limit, 1) for limit in limits):
                allowed = "{'balanced': most}, with a whole number of samples, 1 or more, or one for each rank"
                raise OptionError("batch_size", self._given, allowed)
        if batch_size not in (None, "balanced", "global"):
            of_others = "A number is an option of DiLoCoStrategy(batch_size=...), or the DataLoader's."
            hint = gone("batch_size", batch_size) or of_others
            raise OptionError("batch_size", batch_size, "'balanced', 'global', {'balanced': most}, or left out", hint)
        self.batch_size = batch_size
        if batch_size is not None and not self.by_samples:
            hint = "Batches of unequal size need weighting='samples': else their samples would not count alike."
            raise OptionError("batch_size", self._given, "left out, unless weighting='samples'", hint)

    def batch_of_all(self, size: int, ranks: int) -> int | None:
        """Samples of a batch of all ranks, where they share batches out of data of which a batch has ``size``."""
        if self.batch_size == "global":
            return size
        return size * ranks if self.batch_size == "balanced" and ranks > 1 else None

    def limits(self, ranks: int, total: int) -> list[int]:
        """The most samples that each rank may have in a balanced batch of ``total``.

        Raises:
            OptionError: If they were given for another number of ranks, or allow fewer together.
        """
        most = list(self._most) if isinstance(self._most, Sequence) else [self._most or total] * ranks
        if len(most) != ranks:
            raise OptionError("batch_size", self._given, f"one number, or one for each of {ranks} ranks")
        if sum(most) < total:
            raise OptionError("batch_size", self._given, f"{total} or more together, as a batch of all ranks has")
        return most


class StepWeight:
    """What this rank's gradient of one step is multiplied with, once all ranks' numbers are here.

    Args:
        batches: Of the step, each as this rank's number of samples and what all ranks posted.
    """

    def __init__(self, batches: Sequence[tuple[int, PostedNumbers]]) -> None:
        self._batches = batches

    @property
    def known(self) -> bool:
        """Whether :attr:`factor` can be asked for."""
        return all(posted.known for _, posted in self._batches)

    @cached_property
    def factor(self) -> float:
        """In place of 1 / ranks; 0 if this rank has no sample. If no rank has one, the step's gradient is 0."""
        total = sum(row[0] for _, posted in self._batches for row in posted.rows)
        return _first(self._batches) * len(self._batches) / total if total else 0.0

    def when_known(self, then: Callable[[], None]) -> None:
        """See :meth:`PostedNumbers.when_known`."""
        self._batches[-1][1].when_known(then)  # the last that was posted, and they arrive in order

    def wait(self, failure: Callable[[], BaseException | None]) -> None:
        """See :meth:`PostedNumbers.wait`."""
        self._batches[-1][1].wait(failure)


class SampleWeights:
    """Keeps the numbers of one rank's batches, and weighs its backward passes; for the training thread.

    Args:
        counter: Says how many samples a batch has.
        exchange: To all ranks.
        parameters: That are trained.
        exposed: For how many seconds the training thread has waited for gradients so far.
        clock: Seconds.
        device_time: Takes the time of batches on a GPU, which the clock does not tell.
    """

    def __init__(
        self,
        counter: SampleCounter,
        exchange: NumberExchange,
        *,
        parameters: Iterable[nn.Parameter] = (),
        exposed: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
        device_time: DeviceTime | None = None,
    ) -> None:
        self._device_time = device_time
        self._own = 0  # samples of the present batch that are this rank's
        self._parameters = list(parameters)
        self._counter = counter
        self._exchange = exchange
        self._exposed = exposed
        self._clock = clock
        self._began = 0.0  # this batch, by a clock that stands still while the training thread waits
        self._took = [0, 0]  # the last batch: samples and nanoseconds
        self._sizes: BatchSizes | None = None
        self._shares: Balance | None = None
        self._position: Callable[[], int] = lambda: 0
        self._added = -1  # the batch whose numbers were added last
        self._batch: tuple[int, PostedNumbers] | None = None
        self._step: list[tuple[int, PostedNumbers]] = []  # batches since the last pass that communicated
        self._in_backward = False
        self._is_empty = False

    def has_batch(self, has: bool) -> PostedNumbers:
        """Tell all ranks whether this one has drawn a batch, and hear whether they have."""
        return self._exchange.post([int(has), *[0] * (NUMBERS - 1)])

    def begin_batch(self, batch: Any) -> None:
        """A forward pass of ``batch`` begins: tell its number of samples to all ranks, and do not wait for theirs.

        Raises:
            OptionError: If the number cannot be told. Nothing was sent then.
        """
        size = None if self._sizes is None else self._sizes.size_of(self._position())
        number = 0 if size == 0 or batch is NOTHING else self._counter.count(batch)
        self._is_empty = batch is NOTHING
        if self._device_time is not None:
            self._took = self._device_time.latest()
        posted = self._exchange.post([number, *self._took])
        if self._shares is not None and self._added != self._position():
            self._added = self._position()  # a closure may run more than once for a batch
            self._shares.add(posted)
        self._batch = number, posted
        self._own = size or 0
        self._took = [self._own, 0]
        self.begin_computing()

    def begin_computing(self) -> None:
        """What this rank has waited for since the batch began is no pace of its own."""
        self._began = self._clock() - self._exposed()
        if self._device_time is not None:
            self._device_time.begin()

    def gradient_exists(self) -> None:
        """A gradient is computed, and is to be sent; it may still be under way on a GPU."""
        if self._device_time is not None:
            self._device_time.gradient_exists()

    def end_backward(self) -> None:
        """A backward pass has ended, and what it waited for is accounted for."""
        self._took[1] = max(int(1e9 * (self._clock() - self._exposed() - self._began)), 0)
        if self._device_time is not None:
            self._device_time.end(self._own)

    def begin_epoch(self) -> None:
        """An epoch begins: what the last one has left of a step, Lightning drops too."""
        self._step.clear()
        self._added = -1

    def share_out(self, shares: Balance, sizes: BatchSizes, position: Callable[[], int]) -> None:
        """Batches are shared out from here on.

        Args:
            shares: Told what all ranks post.
            sizes: Knows how many samples of a batch are this rank's own.
            position: Number of the present batch in its epoch.
        """
        self._shares, self._sizes, self._position, self._added = shares, sizes, position, -1

    def leaves_out(self, *, communicates: bool) -> bool:
        """Whether a backward pass of this batch, which has no sample, is better not begun.

        What is accumulated from it counts nothing, and the mean over no sample is not a number. A pass that
        communicates has to be begun, as the other ranks wait for it.
        """
        if self._batch is None or self._batch[0] or communicates:
            return False
        self._step.append(self._batch)
        return True

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around a backward pass of this batch: its gradient counts by its samples among those of this rank's step."""
        if self._batch is None:
            yield
            return
        self._step.append(self._batch)
        number, first = self._batch[0], _first(self._step)
        share = number / first if first else 1.0
        hooks = []
        if share != 1.0 and loss.requires_grad:
            hooks.append(loss.register_hook(lambda gradient: gradient * share))
        if first and not number and not self._is_empty:  # zero times a mean over no sample is not zero
            with torch._C.DisableTorchFunctionSubclass():  # not opening gates
                hooks += [p.register_hook(torch.zeros_like) for p in self._parameters if p.requires_grad]
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            for hook in hooks:
                hook.remove()

    def begin_step(self) -> StepWeight | None:
        """A backward pass communicates; returns what its gradients count. ``None`` for as much as any other rank's."""
        batches, self._step = self._step, []
        if not self._in_backward and self._batch is not None:  # loss.backward() that Lightning does not know of
            batches.append(self._batch)
        return StepWeight(batches) if batches else None


def _first(batches: Sequence[tuple[int, PostedNumbers]]) -> int:
    """Samples of the first batch that has any; 0 if none has."""
    return next((number for number, _ in batches if number), 0)


def name_of(function: Any) -> str:
    """What a function is called in messages."""
    return str(getattr(function, "__qualname__", type(function).__name__))
