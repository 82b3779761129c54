"""Says what figures mean, in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_bytescheduler.advice.expectations import (
    ALONE,
    AUTO,
    BF16,
    BYTESCHEDULER,
    DDP,
    DDP_BEST,
    DILOCO,
    DILOCO_OVERHEAD,
    FIXED,
    AdviceFigures,
)
from lightning_bytescheduler.simulation.compressed_steps import CODECS, break_even_bandwidth
from lightning_bytescheduler.simulation.link import network_in_words
from lightning_bytescheduler.simulation.quantities import rate_in_words

__all__ = ["sentences", "table"]

_LITTLE = 0.03  # of a step; less than a model of a network can tell
_UNEVEN = 1.1  # slowest over fastest worker
_LONG_HOP_SECONDS = 1e-3
_NAMES_SHOWN = 3


def table(advice: AdviceFigures) -> list[tuple[str, ...]]:
    """Rows of text: a heading, one worker alone, each strategy, the ceiling."""

    def row(name: str, seconds: float, workers: int) -> tuple[str, ...]:
        efficiency = advice.efficiency(seconds)
        cells = (name, _ms(seconds), f"{workers * efficiency:.2f}x", f"{efficiency:.0%}")
        samples = advice.measured.batch_size
        return cells if samples is None else (*cells, _count(workers * samples / seconds))

    workers = advice.link.workers
    heading = ("", "a step", f"speed of {workers}", "efficiency")
    rows: list[tuple[str, ...]] = [heading if advice.measured.batch_size is None else (*heading, "samples/s")]
    rows.append(row(ALONE, advice.compute_seconds, 1))
    for expected in advice.expectations:
        name = expected.strategy
        if expected.inner_steps is not None:
            name += f", every {expected.inner_steps} steps" if expected.inner_steps > 1 else ", every step"
        rows.append(row(name, expected.step_seconds, workers))
    rows.append(row("ceiling of ddp's training", advice.ceiling_seconds, workers))
    return rows


def sentences(advice: AdviceFigures) -> Iterator[str]:
    """Paragraphs; the first says what to do."""
    yield _recommendation(advice)
    yield _measured(advice)
    yield from _uneven(advice)
    yield _ddp(advice)
    yield _bytescheduler(advice)
    yield _limit(advice)
    yield from _servers(advice)
    yield _compression(advice)
    yield from _auto(advice)
    yield _diloco(advice)
    yield from _remarks(advice)


def _ms(seconds: float) -> str:
    """For example ``12.3 ms``."""
    return f"{seconds * 1e3:,.1f} ms"


def _measured(advice: AdviceFigures) -> str:
    measured, exchange = advice.measured, advice.communication_seconds
    size = f" of {measured.batch_size} samples" if measured.batch_size is not None else ""
    text = f"Measured: a step{size} takes {_ms(advice.compute_seconds)} on one worker ({measured.device})"
    if measured.waiting > _LITTLE * advice.compute_seconds:
        text += f", of which {_ms(measured.waiting)} wait for data"
    megabytes = f"{measured.profile.parameter_bytes / 1e6:,.4g} MB"
    return (
        f"{text}. Exchanging its {megabytes} of gradients takes {_ms(exchange)}, "
        f"{exchange / advice.compute_seconds:.2f} times as long ({network_in_words(advice.link)})."
    )


def _uneven(advice: AdviceFigures) -> Iterator[str]:
    if advice.worker_seconds and max(advice.worker_seconds) > _UNEVEN * min(advice.worker_seconds):
        times = max(advice.worker_seconds) / min(advice.worker_seconds)
        yield (
            f"Uneven workers: the slowest takes {times:.2f}x as long for a step as the fastest. Where every step is "
            "taken together all wait for the slowest, whose time is used here."
        )


def _ddp(advice: AdviceFigures) -> str:
    default, best = advice.of(DDP), advice.of(DDP_BEST)
    text = f"ddp: {_ms(default.step_seconds)} a step, {_speed(advice, default.step_seconds)}."
    saved = 1 - best.step_seconds / default.step_seconds
    if saved > _LITTLE and best.bucket_bytes is not None:
        text += f" With bucket_cap_mb={best.bucket_bytes / 2**20:g} it takes {saved:.0%} less."
    return text


def _bytescheduler(advice: AdviceFigures) -> str:
    default, best, expected = (advice.of(name).step_seconds for name in (DDP, DDP_BEST, BYTESCHEDULER))
    measured = advice.measured
    if measured.synchronised_because:
        return (
            f"bytescheduler: {_ms(expected)} a step. Its updates could not cross the step boundary here: "
            f"{'; '.join(measured.synchronised_because)}."
        )
    text = f"bytescheduler: the same training in {_ms(expected)} a step, {_speed(advice, expected)}"
    if default / expected < 1 + _LITTLE:
        text += "; nothing to gain over ddp"
    else:
        text += f"; {default / expected:.2f}x as fast as ddp"
        if best / expected < default / expected - 0.005:
            text += f", {best / expected:.2f}x as fast as ddp with its best bucket size"
    if measured.norm_needed_by:
        text += f". Updates wait for the norm of all gradients, because of {' and '.join(measured.norm_needed_by)}"
    return text + "."


def _limit(advice: AdviceFigures) -> str:
    waiting = 1 - advice.efficiency(advice.ceiling_seconds)
    if advice.limited_by == "compute":
        return (
            "What limits: computing. The link is fast enough for all communication to be hidden; a faster one brings "
            "nothing, faster devices do."
        )
    return (
        f"What limits: the link. The ceiling is {_ms(advice.ceiling_seconds)} a step, "
        f"{_speed(advice, advice.ceiling_seconds)}: in whatever order these bytes are sent, workers wait for "
        f"{waiting:.0%} of each step. Only fewer bytes, larger batches or a faster link get below it."
    )


def _servers(advice: AdviceFigures) -> Iterator[str]:
    servers, workers = advice.link.servers, advice.link.workers
    if servers > workers:
        yield f"{servers} servers count as {workers}: more than one for each worker change nothing."


def _compression(advice: AdviceFigures) -> str:
    default, expected = advice.of(DDP).step_seconds, advice.of(BF16).step_seconds
    share = advice.measured.compressed_share
    if share >= 1:
        return "Compression: gradients have 2 bytes a value already, so bf16 on the wire changes nothing."
    text = f"Compression: bf16 on the wire sends {share:.0%} of the bytes"
    if default / expected < 1 + _LITTLE:
        return f"{text}, which saves ddp nothing that shows."
    return (
        f"{text} and makes a step of ddp {_ms(expected)}, {_speed(advice, expected)}. It rounds each gradient "
        "to 8 bits of precision: compare the losses."
    )


def _auto(advice: AdviceFigures) -> Iterator[str]:
    if advice.measured.device != "cpu" or advice.link.workers == 1:
        return
    expected, exact = advice.of(AUTO), advice.of(BYTESCHEDULER)
    below = ", ".join(
        f"{codec.name} below {rate_in_words(break_even_bandwidth(advice.link, codec))}" for codec in CODECS
    )
    fixed = " and ".join(f"{_ms(advice.of(name).step_seconds)} with {codec!r}" for codec, name in FIXED.items())
    all_of_it = f"All gradients compressed: {fixed}."
    if not expected.compressed_share:
        yield (
            "bytescheduler with compression='auto' compresses nothing here. One core's codecs pay on links: "
            f"{below}. {all_of_it}"
        )
        return
    yield (
        f"bytescheduler with compression='auto': {_ms(expected.step_seconds)} a step instead of "
        f"{_ms(exact.step_seconds)}, with {expected.compressed_share:.0%} of the bytes compressed. Codecs of one core "
        f"pay on links: {below}. {all_of_it} The weights are not ddp's: compare the losses."
    )


def _diloco(advice: AdviceFigures) -> str:
    expected = advice.of(DILOCO)
    if expected.inner_steps == 1:
        added = advice.communication_seconds / advice.compute_seconds
        return f"diloco: not needed. Even an exchange after every step, with nothing hidden, adds just {added:.1%}."
    return (
        "diloco: each worker trains for H steps by itself, then all exchange once, so communication per step is 1/H. "
        f"From H = {expected.inner_steps} on it adds {DILOCO_OVERHEAD:.0%} at most: "
        f"{_ms(expected.step_seconds)} a step, {_speed(advice, expected.step_seconds)}. It is another "
        "training, whose loss has to be compared."
    )


def _remarks(advice: AdviceFigures) -> Iterator[str]:
    measured = advice.measured
    if measured.unused:
        names = ", ".join(map(repr, measured.unused[:_NAMES_SHOWN]))
        more = len(measured.unused) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        yield (
            f"Unused: {names}{rest} got no gradient. ddp sends zeros for them and needs find_unused_parameters=True; "
            "requires_grad=False would spare both."
        )
    contention = (
        " Communication over gloo takes processor time from training on a CPU, which makes all of these steps longer."
        if measured.device == "cpu"
        else ""
    )
    if advice.link.latency >= _LONG_HOP_SECONDS and not advice.worker_seconds:
        yield (
            "Long hops: with a round trip of 20 ms, gloo's handshakes and TCP's windows were seen to make steps about "
            "twice as long as the model says. Measure the link, with torchrun, rather than describe it."
        )
    yield f"Not modelled: links shared with others, losses of packets, what compressing costs.{contention}"


def _recommendation(advice: AdviceFigures) -> str:
    chosen, workers = advice.recommended, advice.link.workers
    speed = advice.speedup(chosen.step_seconds)
    if advice.alone_is_faster:
        diloco = advice.of(DILOCO)
        faster = f"{advice.speedup(diloco.step_seconds):.2f}x as fast as one"
        less = f"diloco, every {diloco.inner_steps} steps, would be {faster}, with another training"
        return (
            f"Recommended: train on one machine. Over this network {workers} workers are slower than one alone "
            f"({speed:.2f}x with {chosen.strategy}). What helps is to send less ({less}), larger batches or a faster "
            "network."
        )
    default = advice.of(DDP).step_seconds
    if chosen.strategy == DDP:
        why = "nothing else gains more than 3% with the same training"
    else:
        why = f"{default / chosen.step_seconds:.2f}x as fast as ddp, with the same training"
    text = f"Recommended: {advice.line}  # {workers} workers {speed:.2f}x as fast as one; {why}"
    if advice.efficiency(chosen.step_seconds) < 0.7:
        text += "\nMore than that needs fewer bytes: larger batches for each worker, bf16 on the wire or diloco."
    return text


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _speed(advice: AdviceFigures, step_seconds: float) -> str:
    speed = advice.speedup(step_seconds)
    workers = advice.link.workers
    if speed < 1:
        return f"{workers} workers slower than one alone ({speed:.2f}x)"
    return f"{workers} workers {speed:.2f}x as fast as one"
