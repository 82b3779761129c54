"""Chooses a codec for each parameter from the user's options."""

from __future__ import annotations

import fnmatch
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.checks import did_you_mean, require_whole
from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.compression import COMPRESSORS, Codec, Compressor, PowerSGD, make_codec
from lightning_bytescheduler.compression.dense import Dense, DenseKind
from lightning_bytescheduler.ddp.fit_report import SchedulerStatistics
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["AUTO", "AllLayers", "CompressedLayers", "CompressionRules", "LayerSearch", "names_that_count"]

_BEGIN = 0.05  # of computing time: exact steps that wait for less stay exact
_STAY = 0.03  # the same, once something is compressed
_AIM = 0.01  # of computing time: the wait that a change aims at
_IDLE, _BUSY = 0.8, 0.9  # of a step: below the first share of link use, there is room up to the second
_WORTH_IT = 0.25  # of the expected gain: the least that justifies a change
_TRIES = 2  # changes until the gain has to show
_STEPS = 3  # steps that are evaluated together, by their median
_LOOKS = 2  # evaluations in a row before anything is compressed
_SETTLE = 2  # first steps after a change, which do not count
_REST = 100  # steps without a change after one was taken back; doubled for each further one
_MOST_REST = 3200
_QUIET = 8  # evaluations in a row without a change, after which ranks exchange rarely
_INTERVAL = 16  # steps between these exchanges


class LayerSearch:
    """Finds the number of buckets to compress, so that training hardly waits.

    A step that waits for the link becomes shorter by the time the link saves. So the number follows from the wait and
    from the link's time for exact gradients. A change may bring less than a quarter of the expected gain, for example
    when codecs are slow or when the wait is for another rank. If one further change does not help either, both are
    taken back. Then nothing is tried for 100 steps, and twice as long after each further failure.

    It reads no clock: the same steps give the same result.

    Attributes:
        sizes: Bytes of the buckets, from the first layer on; empty until they are known.
    """

    def __init__(self, ratio: float) -> None:
        self.sizes: Sequence[int] = ()
        self.count = 0
        self._saved = 1.0 - 1.0 / ratio
        self._link = 0.0  # seconds of link use per step with exact gradients
        self._settle = _SETTLE
        self._steps: list[tuple[float, float, float]] = []
        self._looks = 0
        self._late = 0  # evaluations in a row with too long a wait
        self._before: tuple[int, float] | None = None  # (count, seconds of a step) before the current trial
        self._saves = 0.0  # the seconds that the trial is expected to save
        self._tried = 0  # changes within the current trial
        self._rest = 0
        self._in_vain = 0  # failed trials in a row
        self._quiet = 0  # evaluations in a row without a change

    @property
    def is_settled(self) -> bool:
        """Whether no change is being tried."""
        return self._looks >= _LOOKS and self._before is None and not self._late

    @property
    def is_quiet(self) -> bool:
        """Whether no change was tried for long, so that a new value may take some steps to reach all ranks."""
        return self._quiet >= _QUIET

    def step_took(self, seconds: float, waited: float, busy: float, *, counts: bool = True) -> None:
        """Record a step.

        Args:
            seconds: From its beginning to the beginning of the next one.
            waited: Seconds of it for which training waited for gradients.
            busy: Seconds of it in which gradients were being sent.
            counts: Whether it was taken with :attr:`count` and is typical.
        """
        if not counts:
            self._steps.clear()
            self._settle = _SETTLE
            return
        self._rest = max(self._rest - 1, 0)
        if self._settle:
            self._settle -= 1
            return
        self._steps.append((seconds, waited, busy))
        if len(self._steps) == _STEPS:
            seconds, waited, busy = map(statistics.median_low, zip(*self._steps, strict=True))
            self._steps.clear()
            self._look(seconds, waited, busy)

    def _look(self, seconds: float, waited: float, busy: float) -> None:
        self._looks += 1
        computes = max(seconds - waited, 0.0)
        if not self.count:
            self._link = busy
        is_late = waited > (_STAY if self.count else _BEGIN) * computes
        if self._is_in_vain(seconds, is_late=is_late):
            self._rest = min(_REST << self._in_vain, _MOST_REST)
            self._in_vain += 1
        self._late = self._late + 1 if is_late and not self._rest else 0
        if self._late >= (1 if self.count else _LOOKS):
            self._late = 0
            self._change(waited - _AIM * computes, seconds)
        elif self.count and not is_late and not self._rest and busy < _IDLE * seconds:
            self._change(busy - _BUSY * seconds, seconds)
        else:
            self._before = None
        self._quiet = self._quiet + 1 if self.is_settled else 0

    def _is_in_vain(self, seconds: float, *, is_late: bool) -> bool:
        """Whether the trial failed; if so, it is taken back."""
        if self._before is None:
            return False
        count, took = self._before
        brings = took - seconds >= _WORTH_IT * self._saves if count < self.count else not is_late
        if not brings and is_late and count < self.count < len(self.sizes) and self._tried < _TRIES:
            return False  # one more bucket may be enough
        self._before = None
        if brings:
            self._in_vain = 0
        else:
            self.count = count
        return not brings

    def _change(self, spared: float, seconds: float) -> None:
        """Change the count so that the link's time changes by ``spared`` seconds."""
        nbytes, whole = [0, *accumulate(self.sizes)], self._saved * self._link
        if not nbytes[-1] or not whole:
            return
        now = min(self.count, len(self.sizes))
        wanted = nbytes[now] + spared / whole * nbytes[-1]
        count = next((number for number, size in enumerate(nbytes) if size >= wanted), len(self.sizes))
        if count == now:
            self._before = None
            return
        if self._before is None:
            self._before, self._saves, self._tried = (self.count, seconds), spared, 0
        self._tried += 1
        self.count = count


class AllLayers:
    """Compresses the buckets of all layers, in all steps; the base of what decides.

    Attributes:
        fold: How many times larger parts of compressed buckets are than others', at the same credit each.
        agrees: Whether ranks agree on something before a step, for which they may wait.
    """

    fold = 1
    agrees = False

    @property
    def is_settled(self) -> bool:
        """Whether rank 0 tries nothing; ``True`` on the other ranks."""
        return True

    def disturb(self) -> None:
        """Ignore the time of the present step, as something unusual such as a checkpoint is in it."""

    def before_step(self, step: int, *, counts: bool) -> None:
        """Record that a forward pass of ``step`` begins, on all ranks.

        Args:
            step: Number of the step.
            counts: Whether the last step's time shows what compression brings.
        """

    def begin_backward(self, *, exact: bool) -> None:
        """Begin a backward pass.

        Args:
            exact: Whether nothing is compressed in this step; the same on all ranks.
        """

    def include(self, bucket: int, nbytes: int) -> bool:
        """Whether a bucket of this backward pass is compressed; ``nbytes`` is its size."""
        return True

    def close(self) -> None:
        """Leave the exchange with the other ranks; bounded, idempotent."""


class CompressedLayers(AllLayers):
    """The number of compressed buckets on one rank with ``"auto"``; all ranks make it at the same point.

    These are the first layers of the forward pass: their gradients come last in the backward pass and are needed first.
    The other layers' gradients travel uncompressed. Rank 0 finds the number (:class:`LayerSearch`) from the times of
    its steps and waits. It begins with none: where exact gradients are hidden, the training equals DDP's bit for bit.

    The unit is DDP's bucket. All ranks change the number before the same step (``AgreedValues`` in
    ``collectives/number_exchange.py``), and DDP numbers the same buckets alike on all ranks, so they compress the same
    ones. Steps as DDP's are exact. So is the first step, after which DDP arranges its buckets anew.
    """

    fold = 4  # where bytes shrink eightfold, as each part has a fixed cost of codecs and threads
    agrees = True

    def __init__(
        self,
        ratio: float,
        values: AgreedValues,
        *,
        decides: bool,
        statistics: SchedulerStatistics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.count = 0
        self._search = LayerSearch(ratio) if decides else None
        self._values = values
        self._statistics = statistics
        self._clock = clock
        self._step = 0
        self._began = (0.0, 0.0, 0.0)
        self._sizes: dict[int, int] = {}  # bytes by index of the bucket, in this step so far
        self._first: frozenset[int] = frozenset()
        self._disturbed = False

    @property
    def is_settled(self) -> bool:
        """See :class:`AllLayers`."""
        return self._search is None or self._search.is_settled

    def disturb(self) -> None:
        """See :class:`AllLayers`."""
        self._disturbed = True

    def before_step(self, step: int, *, counts: bool) -> None:
        """See :class:`AllLayers`."""
        if step <= self._step:
            return
        search, wanted, interval = self._search, 0, 1
        if search is not None:
            now = self._clock(), self._statistics.exposed_s, self._statistics.communication_s
            seconds, waited, busy = (here - before for here, before in zip(now, self._began, strict=True))
            counts = counts and self._step > 0 and search.count == self.count
            if not (counts and self._disturbed):
                search.step_took(seconds, waited, busy, counts=counts)
            self._began, wanted = now, search.count
            interval = _INTERVAL if search.is_quiet and wanted == self.count else 1
        self._step, self._disturbed = step, False
        agreed = self._values.before_step(step, (wanted,), interval=interval)
        if agreed is not None:
            (self.count,) = agreed

    def begin_backward(self, *, exact: bool) -> None:
        """See :class:`AllLayers`. The buckets of the last one tell which belong to the first layers."""
        sizes = sorted(self._sizes.items(), reverse=True)
        self._first = frozenset(index for index, _ in sizes[: 0 if exact else self.count])
        if self._search is not None:
            self._search.sizes = [size for _, size in sizes]
        self._sizes = {}

    def include(self, bucket: int, nbytes: int) -> bool:
        """See :class:`AllLayers`."""
        self._sizes[bucket] = nbytes
        return bucket in self._first

    def close(self) -> None:
        """See :class:`AllLayers`."""
        self._values.close()


MIN_SIZE = 1024
"""Elements of the smallest gradient that is compressed by default: 4 kB, below which latency dominates."""

AUTO = "auto"
"""Measurements decide how many layers are compressed, see ``compression_rules.py``."""

_TO_NEAREST: dict[str, DenseKind] = {"int8": "int8", "int4": "int4"}
_AUTO = Dense("int4", "nearest")  # the codec of ``auto``


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRules:
    """Which parameters' gradients travel encoded, and in which codec.

    Attributes:
        by_pattern: Pairs of a pattern of parameter names (:mod:`fnmatch`) and a codec. The first match counts, except
            that PowerSGD is skipped where it does not apply. ``None``, or no match, means uncompressed.
    """

    by_pattern: tuple[tuple[str, Codec | None], ...]
    min_size: int = MIN_SIZE
    auto: bool = False

    @classmethod
    def resolve(cls, compression: Any, min_size: int | None = None) -> CompressionRules | None:
        """Make rules from options.

        Args:
            compression: The name of a codec, or codecs by pattern; ``None`` for none.
            min_size: See the class.

        Raises:
            OptionError: Names the option, its value and what is allowed.
        """
        if min_size is not None:
            require_whole("compression_min_size", min_size, 0)
        if compression is None:
            if min_size is not None:
                raise OptionError("compression_min_size", min_size, "left out where nothing is compressed")
            return None
        if isinstance(compression, Mapping):
            if not compression or not all(isinstance(pattern, str) and pattern for pattern in compression):
                raise OptionError(
                    "compression", compression, "a codec, or a dict of patterns of parameter names and codecs"
                )
            pairs = [(pattern, _codec(f"compression[{pattern!r}]", value)) for pattern, value in compression.items()]
        else:
            pairs = [("*", _codec("compression", compression))]
        if all(codec is None for _, codec in pairs):
            return None
        kinds = {"auto" if codec is _AUTO else isinstance(codec, PowerSGD) for _, codec in pairs if codec is not None}
        if len(kinds) > 1:
            alone, why = (
                (AUTO, "It goes by how long training waits for all that may be compressed.")
                if "auto" in kinds
                else ("powersgd", "What is no matrix, or for None, travels as it is, beside the factors of matrices.")
            )
            allowed = f"a dict of {alone!r} and None, or of other compressors and None"
            raise OptionError("compression", compression, allowed, why)
        return cls(by_pattern=tuple(pairs), min_size=MIN_SIZE if min_size is None else min_size, auto="auto" in kinds)

    def check_device(self, device: torch.device) -> None:
        """Check that gradients on ``device`` can be compressed.

        Raises:
            UnsupportedError: If they cannot be compressed there.
        """
        if device.type == "cuda" and not self.auto:
            return  # see ``collectives/device_streams.py``
        if device.type != "cpu":
            others = " Other compressors work there." if device.type == "cuda" else ""
            raise UnsupportedError(
                f"compression={self.spec!r} is for gradients on a CPU so far, and these are on {device.type}.{others} "
                "Leave compression out: partitions, priorities and overlap are the same without."
            )

    def check_patterns(self, names: Mapping[str, str]) -> None:
        """Check that each pattern matters for a model.

        Args:
            names: All names of parameters, trained or not, each with the name that counts; tied parameters have
                several.

        Raises:
            OptionError: If a pattern matches no name, or an earlier one takes all its matches. A last pattern for the
                rest, such as ``"*"``, may match nothing.
        """
        counting = set(names.values())
        fits = {
            pattern: {name for name in counting if fnmatch.fnmatchcase(name, pattern)} for pattern, _ in self.by_pattern
        }
        for at, (pattern, codec) in enumerate(self.by_pattern):
            option, own = f"compression[{pattern!r}]", fits[pattern]
            if not own:
                tied = next((name for name in names if fnmatch.fnmatchcase(name, pattern)), None)
                if tied is not None:
                    way_out = f"{tied!r} is tied to {names[tied]!r}, and goes by that name."
                else:
                    way_out = did_you_mean(pattern, {*counting, *(f"{module}.*" for module in _modules(counting))})
                way_out = way_out or "Leave it out, or see model.named_parameters() for the names there are."
                raise OptionError(option, _name(codec), "for a parameter of the model: it fits no name", way_out)
            for earlier, first in self.by_pattern[:at]:
                takes_all = own < fits[earlier] or (own == fits[earlier] and fnmatch.fnmatchcase(pattern, earlier))
                if takes_all and first is not codec and not isinstance(first, PowerSGD):
                    raise OptionError(
                        option,
                        _name(codec),
                        f"before {earlier!r} in the dict: the first pattern that fits counts, and {earlier!r} fits all "
                        f"that {pattern!r} does",
                        f"Put {pattern!r} first.",
                    )

    def codec_for(self, name: str, parameter: nn.Parameter) -> Codec | None:
        """Return the codec of a parameter's gradient; ``None`` for uncompressed."""
        with torch._C.DisableTorchFunctionSubclass():
            size, dtype = parameter.numel(), parameter.dtype
        if size < max(self.min_size, 1) or not dtype.is_floating_point:
            return None
        for pattern, codec in self.by_pattern:
            if fnmatch.fnmatchcase(name, pattern):
                if isinstance(codec, PowerSGD):
                    if codec.shape_of(parameter):
                        return codec
                    continue  # the next patterns decide where PowerSGD saves nothing
                fewer = codec is not None and codec.payload_bytes(size) < size * dtype.itemsize
                return codec if fewer else None
        return None

    def ratio(self, parameters: Mapping[str, nn.Parameter]) -> float:
        """Return how many times fewer bytes travel for all gradients; with ``auto``, if all layers are compressed."""
        plain = sent = 0
        for name, parameter in parameters.items():
            with torch._C.DisableTorchFunctionSubclass():
                size, nbytes = parameter.numel(), parameter.numel() * parameter.element_size()
            codec = self.codec_for(name, parameter)
            plain += nbytes
            if isinstance(codec, PowerSGD):
                sent += codec.payload_bytes(codec.shape_of(parameter) or (size, 1))
            else:
                sent += nbytes if codec is None else codec.payload_bytes(size)
        return plain / sent if sent else 1.0

    @property
    def whole_matrices(self) -> bool:
        """Whether some gradients travel as factors of a whole matrix, which excludes shards."""
        return any(isinstance(codec, PowerSGD) for _, codec in self.by_pattern)

    def facts(self, device: torch.device) -> dict[str, object]:
        """Return the facts that have to be the same on all ranks, by name.

        With PowerSGD each rank multiplies matrices itself, and the last bits of a product depend on these facts. Where
        they differ, weights would drift apart silently.
        """
        facts: dict[str, object] = {"compression": self.spec}
        if self.whole_matrices:
            facts["torch"] = torch.__version__
            with suppress(RuntimeError):  # raised where torch's newer options are in use
                facts["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
            if device.type == "cuda":
                facts["the GPU"] = torch.cuda.get_device_name(device)
            else:
                facts["the processor"] = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
                facts["torch.get_num_threads()"] = torch.get_num_threads()
        return facts

    @property
    def spec(self) -> str:
        """The codecs in words, for messages."""
        if len(self.by_pattern) == 1 and self.by_pattern[0][0] == "*":
            said = _name(self.by_pattern[0][1])
        else:
            said = ", ".join(f"{pattern}: {_name(codec)}" for pattern, codec in self.by_pattern)
        return f"{said} (min_size {self.min_size})"


def names_that_count(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(said, platform.machine())


def _modules(names: Collection[str]) -> set[str]:
    """Return the names of all modules that contain these parameters."""
    parts = (name.split(".") for name in names)
    return {".".join(path[:depth]) for path in parts for depth in range(1, len(path))}


def _name(codec: Codec | None) -> str:
    return "none" if codec is None else AUTO if codec is _AUTO else codec.spec


def _codec(option: str, value: Any) -> Codec | None:
    if value is None or value == "none":
        return None
    if value == AUTO:
        return _AUTO
    return value if isinstance(value, (Compressor, PowerSGD)) else _made(option, value)


def _made(option: str, value: Any) -> Codec:
    if not isinstance(value, str):
        raise OptionError(option, value, f"None, {AUTO!r}, the name of a compressor such as 'int8', or a Compressor")
    if value in _TO_NEAREST:  # with residuals, rounding to nearest leaves out less than random rounding
        return Dense(_TO_NEAREST[value], "nearest")
    if (kind := value.split(":")[0]) not in COMPRESSORS:
        names = ", ".join(map(repr, COMPRESSORS))
        hint = did_you_mean(kind, (AUTO, *COMPRESSORS))
        raise OptionError(option, value, f"{AUTO!r}, or one of {names}", hint)
    return make_codec(value, option=option)
