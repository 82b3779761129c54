"""Predictions for a model on a network: the step time with each strategy, what limits it, and what to write.

DDP is given its best bucket size, not only its default. ByteScheduler is given the sizes that the strategy chooses
itself. A model is a profile, or a measured step (:class:`MeasuredStep`).
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.predicting.link import CODECS, LinkModel, compressed_link, network_in_words
from lightning_bytescheduler.predicting.profiles import ModelProfile
from lightning_bytescheduler.predicting.simulator import Schedule, lower_bound, simulate
from lightning_bytescheduler.timeline.picture import INK, headed, page, ruled
from lightning_bytescheduler.tuning.sizes import LinkEstimate, default_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DDP = "ddp"
DDP_BEST = "ddp, best buckets"
BF16 = "ddp, bf16"
BYTESCHEDULER = "bytescheduler"
SERVERS = "bytescheduler, servers"
FIXED = {codec: f"bytescheduler, {codec}" for codec in CODECS}
"""Strategies that compress all gradients, and the format of each."""
DILOCO = "diloco"
ALONE = "one worker alone"

_MIB = 1024 * 1024
_DDP_BUCKETS = tuple(size * _MIB for size in (1, 2, 5, 10, 25, 50, 100, 250))
_WIDTH = 4  # bytes of a parameter
_EQUAL = 1.03  # steps that differ by less count as equal, given how exact a model of a network is
_DILOCO_OVERHEAD = 0.05  # of the computation, that exchanges may add to it
_POINTS = 6  # on either side of the given bandwidth
_DRAWN = {
    DDP_BEST: "#9aa7b2",
    BYTESCHEDULER: "#3f86d1",
    SERVERS: "#8456b5",
    FIXED["int8"]: "#e58f2a",
    DILOCO: "#2e8b57",
}
_LINE_LENGTH = 100  # letters


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A training step on one worker, without communication.

    Attributes:
        profile: Its layers, which together take as long as the step.
        between_steps: Seconds of it between two steps, such as waiting for data.
        device: Where it was measured, such as ``cpu`` or ``cuda``; empty if it was not.
        compressed_share: Bytes of the gradients as bf16, relative to their actual bytes.
        synchronised_because: Why ``bytescheduler`` cannot carry updates across steps here, with the way out.
        norm_needed_by: What needs to know all gradients before an update, such as norm clipping.
    """

    profile: ModelProfile
    between_steps: float = 0.0
    device: str = ""
    compressed_share: float = 0.5
    synchronised_because: tuple[str, ...] = ()
    norm_needed_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """The prediction for one strategy on the link.

    Attributes:
        strategy: Its name.
        step_seconds: Seconds of a step.
        same_training: Whether the weights are those of ``ddp``.
        schedule: The simulated schedule, if there is a single one.
        inner_steps: Steps between two exchanges, for ``diloco``.
    """

    strategy: str
    step_seconds: float
    same_training: bool = True
    schedule: Schedule | None = None
    inner_steps: int | None = None

    @property
    def bucket_bytes(self) -> int | None:
        """The bucket size it takes; ``None`` for DDP's default."""
        if self.schedule is None or self.schedule.first_bucket_bytes is not None:
            return None
        return self.schedule.bucket_bytes

    @property
    def label(self) -> str:
        """The strategy with its choices, for a table."""
        text = self.strategy
        if self.inner_steps is not None:
            text += f", every {self.inner_steps} steps" if self.inner_steps > 1 else ", every step"
        return text if self.same_training else f"{text} *"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions for a model on a network. Prints as text, draws as a picture.

    Attributes:
        measured: The model's step on one worker.
        link: The network.
        expectations: One for each strategy.
    """

    measured: MeasuredStep
    link: LinkModel
    expectations: tuple[Expectation, ...]

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step on one worker, without communication."""
        return self.measured.profile.compute_seconds

    @property
    def communication_seconds(self) -> float:
        """Seconds of an all-reduce of all gradients, without computing."""
        return _exchange_seconds(self.measured.profile, self.link.without_servers)

    @property
    def ceiling_seconds(self) -> float:
        """Least seconds of a step with these bytes all-reduced, in any order."""
        return lower_bound(self.measured.profile, self.link.without_servers)

    @property
    def limited_by(self) -> str:
        """``"link"`` if communication cannot be hidden whatever the order, else ``"compute"``."""
        return "link" if self.ceiling_seconds > _EQUAL * self.compute_seconds else "compute"

    @property
    def recommended(self) -> Expectation:
        """The simplest of the strategies that train as ``ddp`` does and are within 3% of the fastest."""
        exact = [expected for expected in self.expectations if expected.same_training]
        fastest = min(expected.step_seconds for expected in exact)
        return next(expected for expected in exact if expected.step_seconds <= _EQUAL * fastest)

    @property
    def alone_is_faster(self) -> bool:
        """Whether one worker trains faster than all of them, with any strategy that trains as ``ddp`` does."""
        return self.speedup(self.recommended.step_seconds) < 1

    @property
    def line(self) -> str:
        """The line of Python for the recommendation."""
        recommended = self.recommended
        if self.alone_is_faster:
            argument = "devices=1"
        elif recommended.strategy == DDP_BEST and recommended.bucket_bytes is not None:
            argument = f"strategy=DDPStrategy(bucket_cap_mb={recommended.bucket_bytes / _MIB:g})"
        elif recommended.strategy == SERVERS:
            argument = f"strategy=ByteSchedulerStrategy(servers={self.link.servers})"
        else:
            argument = f'strategy="{"bytescheduler" if recommended.strategy == BYTESCHEDULER else "ddp"}"'
        return f"trainer = L.Trainer({argument})"

    def of(self, strategy: str) -> Expectation:
        """The prediction for a strategy.

        Raises:
            OptionError: If there is no strategy with this name.
        """
        by_name = {expected.strategy: expected for expected in self.expectations}
        return by_name[require_one_of("strategy", strategy, by_name)]

    def speedup(self, step_seconds: float) -> float:
        """How many times as many samples all workers process as one worker alone, in the same time."""
        return self.link.workers * self.compute_seconds / step_seconds

    def draw(self, out: str | os.PathLike[str]) -> None:
        """Draw the strategies' speeds over a tenth to ten times the bandwidth.

        Args:
            out: The file to write; its suffix names the format (png, svg, pdf, ...). Parent directories are created.

        Raises:
            ImportError: If matplotlib is not installed; the message names the extra to install.
            OptionError: If matplotlib does not know the suffix.
            OSError: If the file cannot be written.
        """
        profile, link = self.measured.profile, self.link
        size = f"{profile.parameter_bytes / 1e6:,.4g} MB of gradients"
        subject = f"{profile.name} ({size}, computes {_ms(self.compute_seconds)} a step); {network_in_words(link)}"
        with page(out, "Drawing a prediction", 9.5, 5.6) as figure:
            ax = figure.subplots()
            self._draw_speeds(ax)
            ax.set_title("\n".join(textwrap.wrap(subject, _LINE_LENGTH)), loc="left", fontsize=10, color=INK)
            headed(figure, "\n".join(textwrap.wrap(self._answer(), _LINE_LENGTH)), 11)

    def _draw_speeds(self, ax: Axes) -> None:
        """Draw the speedup over one worker against bandwidth, one line for each strategy."""
        from matplotlib.ticker import LogLocator

        factors = [10 ** (exponent / _POINTS) for exponent in range(-_POINTS, _POINTS + 1)]
        found = [predict(self.measured, replace(self.link, bandwidth=self.link.bandwidth * one)) for one in factors]
        unit, bits = ("Gbit/s", 1e9) if self.link.bandwidth * 8 >= 1e9 else ("Mbit/s", 1e6)
        rates, here = [one.link.bandwidth * 8 / bits for one in found], self.link.bandwidth * 8 / bits
        for one in self.expectations:
            if one.strategy in _DRAWN:
                speeds = [at.speedup(at.of(one.strategy).step_seconds) for at in found]
                label = one.strategy if one.same_training else f"{one.strategy} *"
                ax.plot(rates, speeds, color=_DRAWN[one.strategy], linewidth=2.2, label=label)
                ax.plot([here], [self.speedup(one.step_seconds)], "o", color=_DRAWN[one.strategy], markeredgecolor=INK)
        ceiling = [at.speedup(at.ceiling_seconds) for at in found]
        ax.plot(rates, ceiling, color=INK, linestyle=":", linewidth=1, label="no order of ddp's bytes can do better")
        ax.axhline(1, color=INK, linestyle="--", linewidth=0.8, label="one worker alone")
        ax.axvline(here, color=INK, linewidth=0.8, alpha=0.4)
        ax.set_xscale("log")
        ax.set_ylim(0, 1.25 * self.link.workers)
        ax.set_xlabel(f"bandwidth of each worker's link ({unit}); * is another training than ddp's")
        ax.set_ylabel("times as fast as one worker")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        ax.legend(loc="upper left", edgecolor="none", framealpha=0.9, ncols=2)
        ruled(ax)

    def table(self) -> list[tuple[str, ...]]:
        """The figures as rows of text, headings first."""
        best = self.of(DDP_BEST).step_seconds

        def row(name: str, seconds: float, workers: int = self.link.workers) -> tuple[str, ...]:
            speed = workers * self.compute_seconds / seconds
            return (name, _ms(seconds), f"{speed:.2f}x", f"{best / seconds:.2f}x" if workers > 1 else "")

        return [
            ("", "a step", f"speed of {self.link.workers:,}", "over ddp"),
            row(ALONE, self.compute_seconds, 1),
            *(row(expected.label, expected.step_seconds) for expected in self.expectations),
            row("ceiling of ddp's training", self.ceiling_seconds),
        ]

    def text(self) -> str:
        """The meaning of the figures, one paragraph per line; the first says what to do."""
        return "\n".join([self._answer(), self._of_what(), *self._remarks()])

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [(name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])) for name, *cells in rows]
        table = [self.measured.profile.name, *("  ".join(row).rstrip() for row in aligned)]
        answer, *paragraphs = self.text().splitlines()
        return "\n\n".join([answer, "\n".join(table), *paragraphs])

    def _answer(self) -> str:
        chosen, workers = self.recommended, self.link.workers
        speed = self.speedup(chosen.step_seconds)
        diloco = self.of(DILOCO)
        if self.alone_is_faster:
            return (
                f"Recommended: train on one machine. Over this network {workers:,} workers are slower than one alone "
                f"({speed:.2f}x with {chosen.strategy}). What helps is to send less (diloco, every "
                f"{diloco.inner_steps} steps, would be {self.speedup(diloco.step_seconds):.2f}x as fast as one, with "
                "another training), larger batches or a faster network."
            )
        gain = self.of(DDP).step_seconds / chosen.step_seconds
        why = "nothing with the same training gains more" if chosen.strategy == DDP else f"{gain:.2f}x as fast as ddp"
        return f"Recommended: {self.line}  # {workers:,} workers {speed:.2f}x as fast as one; {why}"

    def _of_what(self) -> str:
        measured, exchange = self.measured, self.communication_seconds
        text = f"A step takes {_ms(self.compute_seconds)} on one worker"
        if measured.device:
            text += f" ({measured.device})"
        if measured.between_steps > (_EQUAL - 1) * self.compute_seconds:
            text += f", of which {_ms(measured.between_steps)} pass between steps, as in waiting for data"
        return (
            f"{text}. Exchanging its {measured.profile.parameter_bytes / 1e6:,.4g} MB of gradients takes "
            f"{_ms(exchange)}, {exchange / self.compute_seconds:.2f} times as long "
            f"({network_in_words(self.link.without_servers)})."
        )

    def _remarks(self) -> Iterator[str]:
        measured = self.measured
        if self.limited_by == "compute":
            yield "What limits: computing. All communication can be hidden; a faster link brings nothing."
        else:
            waiting = 1 - self.compute_seconds / self.ceiling_seconds
            yield (
                f"What limits: the link. In whatever order these bytes are sent, workers wait for {waiting:.0%} of "
                "each step. Only fewer bytes, larger batches or a faster link get below that."
            )
        if measured.synchronised_because:
            because = "; ".join(measured.synchronised_because)
            yield f"Updates of bytescheduler cannot cross the step boundary: {because}."
        elif measured.norm_needed_by:
            yield f"Updates wait for the norm of all gradients, because of {' and '.join(measured.norm_needed_by)}."
        if self.link.servers is not None:
            gain = self.of(BYTESCHEDULER).step_seconds / self.of(SERVERS).step_seconds
            yield f"Spare servers: with {self.link.servers}, bytescheduler is {gain:.2f}x as fast as without."
        yield "* Another training than ddp's: compare the losses."
        contention = "; over gloo, the processor time that communication takes" if measured.device == "cpu" else ""
        yield f"Not modelled: links shared with others, losses of packets{contention}."


def predict(model: ModelProfile | MeasuredStep, link: LinkModel) -> Prediction:
    """Predict the step time of a model on a network with each strategy.

    ``diloco`` exchanges all parameters at once, uncompressed, as often as adds at most 5% to the computation.

    Args:
        model: The model, or a measured step of it.
        link: The network. With parameter servers, they get a line of their own; all others reduce without them.
    """
    measured = MeasuredStep(profile=model) if isinstance(model, ModelProfile) else model
    return Prediction(measured=measured, link=link, expectations=tuple(_expectations(measured, link)))


def _expectations(measured: MeasuredStep, given: LinkModel) -> Iterator[Expectation]:
    profile, link = measured.profile, given.without_servers
    yield _best(DDP, profile, link, [Schedule.ddp()])
    # DDP with the best of several bucket sizes, its default among them.
    buckets = [Schedule.ddp(), *(Schedule.ddp(bucket_bytes=size) for size in _DDP_BUCKETS)]
    yield _best(DDP_BEST, profile, link, buckets)
    yield _scheduled(BYTESCHEDULER, measured, link)
    if given.servers is not None:
        yield _scheduled(SERVERS, measured, given)
    half = replace(link, bandwidth=link.bandwidth / measured.compressed_share)
    yield replace(_best(BF16, profile, half, [Schedule.ddp()]), same_training=False)
    for name, strategy in FIXED.items() if measured.device != "cuda" else ():  # on a GPU nothing is compressed
        # Gradients of two bytes shrink half as much as fp32 ones.
        codec = CODECS[name]._replace(ratio=CODECS[name].ratio * 0.5 / measured.compressed_share)
        yield replace(_scheduled(strategy, measured, compressed_link(link, codec)), same_training=False)
    # Rounded before it is rounded up, so that 1.0000000001 exchanges per allowance are 1.
    exchanges = _exchange_seconds(profile, link) / (_DILOCO_OVERHEAD * profile.compute_seconds)
    inner = max(1, math.ceil(round(exchanges, 6)))
    seconds = profile.compute_seconds + _exchange_seconds(profile, link) / inner
    yield Expectation(strategy=DILOCO, step_seconds=seconds, same_training=False, inner_steps=inner)


def _scheduled(strategy: str, measured: MeasuredStep, link: LinkModel) -> Expectation:
    """With the sizes that the strategy chooses, or as plain DDP if that is faster, as the strategy then keeps it."""
    # With servers, an update that needs the norm waits for all gradients.
    waits = bool(measured.synchronised_because or (measured.norm_needed_by and link.servers))
    in_shards = bool(measured.norm_needed_by) and not waits
    own = chosen_schedule(measured.profile, link, in_shards=in_shards, busy_processor=measured.device == "cpu")
    found = _best(strategy, measured.profile, link, [replace(own, barrier=waits)])
    kept = _best(strategy, measured.profile, link.without_servers, [Schedule.ddp()])
    return found if waits or found.step_seconds <= kept.step_seconds else kept


def chosen_schedule(
    profile: ModelProfile, link: LinkModel, *, in_shards: bool = False, busy_processor: bool = False
) -> Schedule:
    """The schedule that the strategy would choose for this model if it measured this link.

    Args:
        profile: The model.
        link: The network.
        in_shards: Whether the norm of all gradients is needed, so that they are reduced in shards.
        busy_processor: Whether the model computes on the processor.
    """
    sizes = default_sizes(
        parameters=profile.parameter_bytes // _WIDTH,
        bytes_per_parameter=_WIDTH,
        link=LinkEstimate(alpha=link.latency_seconds, beta=link.seconds_per_byte),
        busy_processor=busy_processor,
        in_shards=in_shards,
        architecture="allreduce" if link.servers is None else "ps",
    )
    return Schedule(
        partition_bytes=sizes.partition_size * _WIDTH,
        credit_bytes=sizes.credit * _WIDTH,
        bucket_bytes=sizes.bucket_bytes,
    )


def _best(strategy: str, profile: ModelProfile, link: LinkModel, schedules: Iterable[Schedule]) -> Expectation:
    timed = ((simulate(profile, link, schedule), schedule) for schedule in schedules)
    seconds, schedule = min(timed, key=lambda entry: entry[0])
    return Expectation(strategy=strategy, step_seconds=seconds, schedule=schedule)


def _exchange_seconds(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds of sending all gradients at once, without computing."""
    return profile.parameter_bytes * link.seconds_per_byte + link.latency_seconds


def _ms(seconds: float) -> str:
    """For example ``12.3 ms``."""
    return f"{seconds * 1e3:,.1f} ms"
