"""``weighting="samples"``: each rank's gradient is weighted by its samples, as if one process had all samples.

With n_ij samples in the j-th accumulated batch of rank i, and g_ij the gradient of that batch's mean loss, a step's
gradient is ::

    sum over i and j of n_ij g_ij / N,    N = sum of all n_ij

times the factor of accumulation: Lightning divides each loss by ``accumulate_grad_batches``, also if the last step of
an epoch has fewer batches. So a batch's weight is n_ij over the *mean* number of samples of the step's batches, and
with equal batches nothing differs from DDP.

The weight is applied in two places. Within a rank, the gradient that enters a backward pass is multiplied by n_ij /
c_i, where c_i is the number of samples of the first batch that has any; this is known at once, and is 1 if batches are
equal. Among ranks, the reduction multiplies by c_i k / N instead of 1 / ranks before it sums, with k batches in the
step. Both are quotients of integers, rounded once: if numbers are equal this is exactly DDP's 1 / ranks, and the bits
are DDP's.

*When N is known.* A rank posts its number when a batch begins, before the forward pass (``number_exchange.py``). A task
of a step becomes ready when both its gradient and N are known, on whichever thread that happens. The training thread
waits for N only where it would wait for gradients next, at the end of a step as DDP's.

*Why ranks agree on the step.* A step's batches are those since the last backward pass that communicated, which is the
same on all ranks in DDP. All ranks' factors come from the same numbers, so they add up to k.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from lightning_bytescheduler.checks import did_you_mean, is_whole
from lightning_bytescheduler.collectives.number_exchange import NumberExchange, PostedNumbers
from lightning_bytescheduler.exceptions import OptionError

_UNDER_WAY = 64  # most batches that the host may be ahead of the GPU


class DeviceTime:
    """Times backward passes on one device; for the training thread and the hooks of its backward passes.

    The host runs ahead of a GPU, so its clock is of no use here. Events are recorded on the training's stream: when a
    backward pass begins, and when its last gradient is complete. All gradients of the step before have arrived by then,
    and a plain step waits for its own behind its last one, so the time in between is this rank's computing alone. It is
    read when the GPU has passed these events, a batch or more later, without waiting.

    Waits within other collectives, such as those of synchronised batch normalization, count as computing. Source: "CUDA
    semantics" in PyTorch's documentation.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._began: Any = None
        self._ended: Any = None
        self._past: deque[tuple[int, Any, Any]] = deque(maxlen=_UNDER_WAY)  # samples, and both events

    def begin(self) -> None:
        """Begin a backward pass."""
        self._began, self._ended = self._now(), None

    def gradient_exists(self) -> None:
        """Record that all work of a gradient is on the current stream."""
        self._ended = self._now()

    def end(self, samples: int) -> None:
        """Record that a backward pass has returned on the host."""
        if self._began is None:
            return
        if self._ended is None:  # gradients are accumulated and none was sent
            self.gradient_exists()
        self._past.append((samples, self._began, self._ended))
        self._began = None

    def latest(self) -> list[int]:
        """Return samples and nanoseconds of the last pass that the GPU has finished; both 0 if there is no new one."""
        found = [0, 0]
        while self._past and self._past[0][2].query():
            samples, began, ended = self._past.popleft()
            found = [samples, max(int(1e6 * began.elapsed_time(ended)), 0)]
        return found

    def _now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event


_WEIGHTINGS = ("ranks", "samples")
_LENGTHS_SHOWN = 4
_MOST = 1 << 40  # samples of a batch, so that sums fit in 64 bits
_WAY_OUT = "Give weighting= a function of the batch that returns how many samples it has: a whole number, 0 or more."


class BatchSizes(Protocol):
    """Knows this rank's part of batches that are shared."""

    def size_of(self, batch: int) -> int | None:
        """Return this rank's samples in a batch of the epoch, 0 if it computes on a copy; ``None`` if unknown."""

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """Return a batch's weight among the ``accumulated`` ones of its step; 1 if all are equally large."""


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch, in order."""
    parts: Iterable[Any] = ()
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Iterable) and not (isinstance(batch, (str, bytes, Iterator)) or hasattr(batch, "__array__")):
        parts = batch
    elif is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    for part in parts:
        yield from tensors_in(part)


def samples_in(batch: Any) -> int:
    """Return the samples of a batch: the common length of its tensors.

    Tensors without a dimension count only if there are no others.

    Raises:
        ValueError: If there is no tensor, or their lengths differ; says so.
    """
    found = list(tensors_in(batch))
    lengths = {len(tensor) for tensor in found if tensor.ndim}
    if len(lengths) > 1:
        shown = ", ".join(map(str, sorted(lengths)[:_LENGTHS_SHOWN]))
        raise ValueError(f"its tensors have different lengths ({shown}), so that none says how many samples there are")
    if found:
        return lengths.pop() if lengths else 1
    raise ValueError(f"it is a {type(batch).__name__} without a tensor")


class SampleCounter:
    """Counts the samples of this rank's batches.

    Args:
        samples: The user's function of the batch; :func:`samples_in` if ``None``.
    """

    def __init__(self, samples: Callable[[Any], Any] | None, rank: int) -> None:
        self._samples = samples or samples_in
        self.rank = rank
        self._batches = 0
        self.name = "samples" if samples is None else getattr(samples, "__qualname__", type(samples).__name__)

    def count(self, batch: Any) -> int:
        """Return the samples of the next batch.

        Raises:
            OptionError: If they cannot be counted; names option, rank and value, and the way out.
        """
        self._batches += 1
        if isinstance(batch, Iterator):  # reading it would use it up
            raise self._error("training_step(dataloader_iter) has no batch to count samples of")
        try:
            number = self._samples(batch)
            whole = int(number)
        except Exception as error:
            raise self._error(f"its samples cannot be counted: {type(error).__name__}: {error}") from error
        if whole != number or isinstance(number, bool) or not 0 <= whole < _MOST:
            raise self._error(f"the function returned {number!r} of type {type(number).__name__}")
        return whole

    def _error(self, fact: str) -> OptionError:
        where = f"on rank {self.rank}, in training batch {self._batches} of this fit"
        return OptionError("weighting", self.name, "", says=f"weighting={self.name!r}: {where}, {fact}. {_WAY_OUT}")


class Weighting:
    """The user's options for the weights of ranks.

    Args:
        weighting: ``"ranks"`` or ``"samples"``, counted by :func:`samples_in`; or a function that returns the samples
            of a batch.
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
            hint = "A number is an option of DiLoCoStrategy(batch_size=...), or the DataLoader's."
            raise OptionError("batch_size", batch_size, "'balanced', 'global', {'balanced': most}, or left out", hint)
        self.batch_size = batch_size
        if batch_size is not None and not self.by_samples:
            hint = "Batches of unequal size need weighting='samples': else their samples would not count alike."
            raise OptionError("batch_size", self._given, "left out, unless weighting='samples'", hint)

    def batch_of_all(self, size: int, ranks: int) -> int | None:
        """Return the samples of a batch of all ranks if they share batches; ``size`` is the loader's batch size."""
        if self.batch_size == "global":
            return size
        return size * ranks if self.batch_size == "balanced" and ranks > 1 else None

    def limits(self, ranks: int, total: int) -> list[int]:
        """Return the most samples that each rank may have in a balanced batch of ``total``.

        Raises:
            OptionError: If there are limits for another number of ranks, or their sum is too small.
        """
        most = list(self._most) if isinstance(self._most, Sequence) else [self._most or total] * ranks
        if len(most) != ranks:
            raise OptionError("batch_size", self._given, f"one number, or one for each of {ranks} ranks")
        if sum(most) < total:
            raise OptionError("batch_size", self._given, f"{total} or more together, as a batch of all ranks has")
        return most


class StepWeight:
    """The weight of this rank's gradient in the mean of one step: equal for each of ``ranks`` ranks, or by samples.

    Args:
        ranks: Their number.
        batches: By samples: batches of the step, each as this rank's number of samples and the numbers that all ranks
            posted.
    """

    def __init__(self, ranks: int, batches: Sequence[tuple[int, PostedNumbers]] = ()) -> None:
        self._ranks = ranks
        self._batches = batches

    @cached_property
    def factor(self) -> float:
        """The weight, once it is known; 0 if this rank has no sample, and for all ranks if none has one."""
        if not self._batches:
            return 1.0 / self._ranks
        total = sum(row[0] for _, posted in self._batches for row in posted.rows)
        return _first(self._batches) * len(self._batches) / total if total else 0.0

    def when_known(self, then: Callable[[], None]) -> None:
        """See :meth:`PostedNumbers.when_known`."""
        if self._batches:
            self._batches[-1][1].when_known(then)  # numbers arrive in order, so the last one is enough
        else:
            then()

    def wait(self, failure: Callable[[], BaseException | None]) -> None:
        """See :meth:`PostedNumbers.wait`."""
        if self._batches:
            self._batches[-1][1].wait(failure)


class SampleWeights:
    """Keeps the numbers of one rank's batches, and weights its backward passes; for the training thread.

    Args:
        counter: Counts the samples of this rank's batches; ``None`` if ranks weigh the same, whatever their batches
            are.
        exchange: Posts them; ``None`` likewise.
        ranks: Number of ranks.
        exposed: Returns the seconds that the training thread has waited for gradients so far.
        device_time: Times backward passes on a GPU, where the clock is of no use.
    """

    def __init__(
        self,
        counter: SampleCounter | None = None,
        exchange: NumberExchange | None = None,
        *,
        ranks: int = 1,
        parameters: Iterable[nn.Parameter] = (),
        exposed: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
        device_time: DeviceTime | None = None,
    ) -> None:
        self.equal = StepWeight(ranks)
        self.by_samples = counter is not None
        self._ranks = ranks
        self._device_time = device_time
        self._parameters = list(parameters)
        self._counter = counter
        self._exchange = exchange
        self._exposed = exposed
        self._clock = clock
        self._began = 0.0  # start of this batch, less the time that the training thread has waited
        self._took = [0, 0]  # samples and nanoseconds of the present batch, if batches are shared
        self._sizes: BatchSizes | None = None
        self._add: Callable[[PostedNumbers], None] | None = None
        self._position: Callable[[], int] = lambda: 0
        self._added = -1  # the batch whose numbers were added last
        self._batch: tuple[int, PostedNumbers] | None = None
        self._step: list[tuple[int, PostedNumbers]] = []  # batches since the last pass that communicated
        self._in_backward = False

    def begin_batch(self, batch: Any) -> None:
        """Begin the forward pass of ``batch``: post its number of samples, without waiting for the others'.

        Raises:
            OptionError: If the number cannot be counted. Nothing is posted then.
        """
        counter, exchange = self._counter, self._exchange
        if counter is None or exchange is None:
            return
        size = None if self._sizes is None else self._sizes.size_of(self._position())
        number = 0 if size == 0 else counter.count(batch)
        took = self._took if self._device_time is None else self._device_time.latest()
        posted = exchange.post([number, *took])
        if self._add is not None and self._added != self._position():
            self._added = self._position()  # a closure may run more than once for a batch
            self._add(posted)
        self._batch = number, posted
        self._took = [size or 0, 0]

    def begin_computing(self) -> None:
        """Restart the clock: waits since the batch began are not this rank's computing."""
        self._began = self._clock() - self._exposed()

    def gradient_exists(self) -> None:
        """Record that a gradient to be sent is computed; a GPU may still be working on it."""
        if self._device_time is not None:
            self._device_time.gradient_exists()

    def end_backward(self) -> None:
        """Record that a backward pass has ended, with its waits already counted."""
        self._took[1] = max(int(1e9 * (self._clock() - self._exposed() - self._began)), 0)
        if self._device_time is not None:
            self._device_time.end(self._took[0])

    def begin_epoch(self) -> None:
        """Begin an epoch: drop an unfinished step, as Lightning does."""
        self._step.clear()
        self._added = -1

    def share_out(self, add: Callable[[PostedNumbers], None], sizes: BatchSizes, position: Callable[[], int]) -> None:
        """Share batches out from here on.

        Args:
            add: Called with what all ranks post as a batch begins.
            sizes: This rank's part of them.
            position: Returns the number of the present batch in its epoch.
        """
        self._add, self._sizes, self._position, self._added = add, sizes, position, -1

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Wrap a backward pass of this batch: weight its gradient by samples within this rank's step."""
        if self._device_time is not None:
            self._device_time.begin()
        if self._batch is None:
            yield
            return
        self._step.append(self._batch)
        number, first = self._batch[0], _first(self._step)
        share = number / first if first else 1.0
        hooks = []
        if share != 1.0 and loss.requires_grad:
            hooks.append(loss.register_hook(lambda gradient: gradient * share))
        if not number:  # zero times a mean over no sample is NaN
            with torch._C.DisableTorchFunctionSubclass():  # opens no gate
                hooks += [p.register_hook(torch.zeros_like) for p in self._parameters if p.requires_grad]
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            for hook in hooks:
                hook.remove()

    def begin_step(self) -> StepWeight:
        """Return the weight of a step whose backward pass communicates; equal weights if no batch has begun."""
        batches, self._step = self._step, []
        if not self._in_backward and self._batch is not None:  # a loss.backward() outside of Lightning
            batches.append(self._batch)
        return StepWeight(self._ranks, batches) if batches else self.equal

    def close(self, timeout: float) -> None:
        """End the exchange of numbers within ``timeout`` seconds."""
        if self._exchange is not None:
            self._exchange.close(timeout)


def _first(batches: Sequence[tuple[int, PostedNumbers]]) -> int:
    return next((number for number, _ in batches if number), 0)


_CHANGED_AFTER = 5  # values in a row; a disturbance is shorter
_CHANGED_BY = 1.5  # times the mean is well above


class RobustMean:
    """Mean of the middle half of the last values, each 0 or more: single slow steps hardly change it.

    If several values in a row are well above the mean of the others, or well below, the change is taken to last, and
    earlier values are forgotten. Limits: a lasting change of less than half may take the whole window to show.

    Args:
        window: How many values count.
        faster: Values below the mean divided by this factor are well below.

    Attributes:
        mean: The estimate, or ``None`` before the first value.
    """

    def __init__(self, window: int = 16, *, faster: float = _CHANGED_BY) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._faster = faster
        self.mean: float | None = None

    def observe(self, value: float) -> None:
        """Record a value."""
        self._values.append(value)
        if value == self.mean and self._values.count(value) == len(self._values):
            return  # all values are equal, as most batch sizes are
        before, recent = list(self._values)[:-_CHANGED_AFTER], list(self._values)[-_CHANGED_AFTER:]
        # A cheap test first: the mean of the others is between the least and the greatest of them.
        if before and (min(recent) > min(before) * _CHANGED_BY or max(recent) < max(before) / self._faster):
            mean = _middle_mean(before)
            if min(recent) > mean * _CHANGED_BY or max(recent) < mean / self._faster:
                self._values = deque(recent, maxlen=self._values.maxlen)
        self.mean = _middle_mean(self._values)

    def forget(self) -> None:
        """Drop all values."""
        self._values.clear()
        self.mean = None

    @property
    def known(self) -> bool:
        """Whether the mean rests on enough values."""
        return len(self._values) >= _CHANGED_AFTER

    @property
    def uncertainty(self) -> float:
        """Relative standard error of the mean, estimated from the quartiles."""
        ordered, quarter = sorted(self._values), len(self._values) // 4
        spread = (ordered[-1 - quarter] - ordered[quarter]) / 1.35  # standard deviation, for a normal distribution
        return spread / math.sqrt(len(ordered)) / (self.mean or math.inf)


def _middle_mean(values: Collection[float]) -> float:
    cut = max(len(values) // 4, 1) if len(values) > 2 else 0
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
