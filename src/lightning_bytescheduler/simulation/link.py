"""The cost of reducing gradients over a network.

Every worker has one link of ``bandwidth`` bytes per second in each direction. Reducing ``s`` bytes over ``n`` workers
occupies that link

- with an all-reduce, for ``2(n-1)/n × s/bandwidth``: a reduce-scatter and an all-gather of equal cost around a ring,
  whose ``2(n-1)`` hops follow each other;
- with parameter servers, for a push and a pull, two messages deep, each at ``2n(n-1)/(n² + kn − 2k) × s/bandwidth``
  with ``k`` servers beside the workers (BytePS, section 4.1). That is the rate at which both can run at once, when one
  partition is pulled while the next is pushed. For ``k = n`` it is exact. With fewer servers, workers push and serve
  over one link, and a lone partition would be a little faster than modelled. In a simulated step the links of servers
  and workers also wait for each other for a share of the time, see ``LinkModel.idle``.

A collective also has a *latency*: its hops take time in which the link is free for other collectives in flight. So a
window that covers bandwidth × latency hides it.

Where gradients are compressed, each rank compresses each one once (others' shards as they are, its own when it is
summed) and reads it twice (what it sums, and all sums). Codecs work beside the link and beside the training, so a byte
takes as long as the slower of link and codecs. On a processor with other work they take longer than modelled.

Limits: workers are alike, links are dedicated, and there is no congestion or loss. The time of a simulation does not
depend on the number of workers.

Rates and times may be written as people write them: ``10Gbit/s``, ``10GbE``, ``1.25GB/s``, ``20ms``. A small ``b`` is a
bit and a capital ``B`` a byte. A text that could be either, such as ``1GB`` or ``1gb/s``, is refused with a question,
as the answers differ by a factor of eight. Prefixes are decimal, as for networks; ``Ki``, ``Mi`` and ``Gi`` are binary.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_bytescheduler.checks import options_by_name, require_positive, require_seconds, require_whole
from lightning_bytescheduler.exceptions import OptionError

_IDLE_WITH_SPARE_SERVERS = 0.08
"""So that steps played are those measured within 5%: 4 workers, 0, 2 and 4 servers, see docs/parameter_servers.md."""


@options_by_name
@dataclass(frozen=True, init=False, slots=True)
class LinkModel:
    """A network, and how gradients are reduced over it.

    Rates and times may be given as text, such as ``bandwidth="10Gbit/s"`` and ``latency="0.1ms"``; they are kept as
    numbers.

    Attributes:
        workers: How many take part.
        bandwidth: Bytes per second of each worker's link, in each direction.
        latency: Seconds of one hop, from one worker to another.
        servers: Number of parameter servers on separate machines; with 0 there is one beside each worker. More servers
            than workers change nothing, as the workers' own links are the limit then. ``None`` for an all-reduce.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    workers: int
    bandwidth: float
    latency: float = 0.0
    servers: int | None = None

    def __init__(
        self, *, workers: int, bandwidth: float | str, latency: float | str = 0.0, servers: int | None = None
    ) -> None:
        object.__setattr__(self, "workers", require_whole("workers", workers, 1))
        object.__setattr__(self, "bandwidth", require_rate("bandwidth", bandwidth))
        object.__setattr__(self, "latency", require_duration("latency", latency))
        object.__setattr__(self, "servers", servers if servers is None else require_whole("servers", servers, 0))

    @property
    def architecture(self) -> str:
        """Who averages: ``"allreduce"``, the workers among themselves, or ``"ps"``, parameter servers."""
        return "allreduce" if self.servers is None else "ps"

    @property
    def stages(self) -> int:
        """How many parts of the network each message passes, one after the other: with servers, a push and a pull."""
        return 1 if self.servers is None else 2

    @property
    def without_servers(self) -> LinkModel:
        """The same network, on which workers reduce among themselves."""
        return replace(self, servers=None)

    @property
    def seconds_per_byte(self) -> float:
        """How long reducing one byte occupies the link; with servers, in each of its two stages."""
        n = self.workers
        if n == 1:
            return 0.0
        if self.servers is not None:
            k = min(self.servers, n)
            return 2 * n * (n - 1) / (n * n + k * n - 2 * k) / self.bandwidth
        return 2 * (n - 1) / n / self.bandwidth

    @property
    def idle(self) -> float:
        """Of the time in which gradients are under way, what this package's links wait for each other.

        Without a plan of who sends to whom and when, senders meet at one receiver, and sums wait for the last push.
        """
        return _IDLE_WITH_SPARE_SERVERS if self.servers and self.workers > 1 else 0.0

    @property
    def latency_seconds(self) -> float:
        """Latency of a whole collective: what it takes beyond occupying the link."""
        if self.workers == 1:
            return 0.0
        return 2 * self.latency * (self.workers - 1 if self.servers is None else 1)


def network_in_words(link: LinkModel) -> str:
    """For example ``4 workers and 2 servers, 500 Mbit/s each way, 0.2 ms a hop``."""
    hop = f", {duration_in_words(link.latency)} a hop" if link.latency else ""
    servers = f" and {_count(link.servers, 'spare server')}" if link.servers is not None else ""
    idle = f", idle for {link.idle:.0%} of the time" if link.idle else ""
    return f"{_count(link.workers, 'worker')}{servers}, {rate_in_words(link.bandwidth)} each way{hop}{idle}"


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"


class Codec(NamedTuple):
    """How small and how fast a compressor is.

    Attributes:
        ratio: How many times smaller fp32 gradients get.
        seconds_per_byte: Of fp32 gradient, on one core of each rank: compressed once, with error feedback, read twice.
    """

    ratio: float
    seconds_per_byte: float


CODECS = {"int8": Codec(3.94, 0.83e-9), "int4": Codec(7.53, 1.14e-9)}
"""As ``python -m benchmarks codecs`` measured them on one core with AVX-512, rounded to nearest."""


def compressed_link(link: LinkModel, codec: Codec) -> LinkModel:
    """A link on which gradients as they are take as long as compressed ones on ``link``."""
    exact = link.seconds_per_byte
    if not exact:
        return link
    return replace(link, bandwidth=link.bandwidth * exact / max(exact / codec.ratio, codec.seconds_per_byte))


# ── Rates and times as texts ────────────────────────────────────────────────────────────────────────

RATES = "10Gbit/s, 500Mbps, 25GbE or 1.25GB/s"
"""Examples of rates, for help and errors."""

TIMES = "20ms, 0.5ms or 200us"
"""Examples of times."""

_NUMBER = r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
_RATE = re.compile(
    rf"{_NUMBER}\s*(?P<prefix>kilo|mega|giga|tera|[kmgt])?(?P<binary>i)?[ -]?(?P<unit>bits?|bytes?|b)?"
    r"(?P<per>\s*/\s*s(?:ec(?:ond)?)?|\s*per\s*s(?:ec(?:ond)?)?|\s*a second|ps)?",
    re.IGNORECASE,
)
_ETHERNET = re.compile(r"([mg])(?:be|e|ige)$", re.IGNORECASE)
_TIME = re.compile(rf"{_NUMBER}\s*(?P<prefix>micro|milli|n|u|µ|μ|m)?(?:seconds?|secs?|s)", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_FRACTIONS = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3, "micro": 1e-6, "milli": 1e-3}
_LEAST_BARE_BITS = 1e6  # who writes a smaller number without a unit means megabits or gigabits


def require_rate(option: str, value: object) -> float:
    """Bytes per second: a number of them, or a text such as ``10Gbit/s``.

    Args:
        option: Its name.
        value: What was given. A text without a unit, such as ``1e9``, is in bits per second, as networks are.

    Raises:
        OptionError: If it is no rate above 0, or could be in bits or in bytes; names ``option``.
    """
    if not isinstance(value, str):
        return require_positive(option, value, of="bytes per second")
    found = _RATE.fullmatch(_ETHERNET.sub(r"\1bps", value.strip()))
    bits = 0.0
    if found is not None:
        prefix = (found["prefix"] or "")[:1].lower()
        factor = 1024.0 ** " kmgt".index(prefix or " ") if found["binary"] else _PREFIXES[prefix]
        bits = float(found["number"]) * factor * _bits_of_unit(option, value, found)
    if not bits or not math.isfinite(bits):
        above = "above 0 " if found else ""
        raise OptionError(option, value, f"a rate {above}such as {RATES}")
    return bits / 8


def _bits_of_unit(option: str, value: str, found: re.Match[str]) -> int:
    """How many bits the unit has.

    Raises:
        OptionError: If that cannot be told.
    """
    number, unit, prefix, per = found["number"], found["unit"] or "", found["prefix"] or "", found["per"] or ""
    if not unit and not prefix and float(number) < _LEAST_BARE_BITS:
        raise OptionError(option, value, f"a rate with its unit, such as {number}Gbit/s or {number}Mbit/s")
    # An author who distinguishes b from B does so everywhere; "GBPS" and "gb/s" show no such distinction.
    if (unit == "B" and per in ("", "PS")) or (unit == "b" and prefix in ("m", "g", "t") and per.lower() != "ps"):
        letters = prefix.upper().replace("K", "k") + (found["binary"] or "")
        choices = f"{number}{letters}bit/s or {number}{letters}B/s"
        raise OptionError(option, value, f"{choices} (is it in bits or in bytes a second?)")
    return 8 if unit == "B" or unit.lower().startswith("byte") else 1


def require_duration(option: str, value: object) -> float:
    """Seconds: a number of them, or a text such as ``20ms``.

    Raises:
        OptionError: If it is no time, 0 or more; names ``option``.
    """
    if not isinstance(value, str):
        return require_seconds(option, value)
    found = _TIME.fullmatch(value.strip())
    seconds = 0.0
    if found is not None:
        seconds = float(found["number"]) * _FRACTIONS[(found["prefix"] or "").lower()]
    elif value.strip() != "0":
        raise OptionError(option, value, f"a time with its unit, such as {TIMES}")
    return require_seconds(option, seconds)


def rate_in_words(bandwidth: float) -> str:
    """For example ``500 Mbit/s``, of bytes per second."""
    rate = bandwidth * 8
    unit, size = next((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 0.0)) if rate >= s)
    return f"{rate / (size or 1e3):,.4g} {unit}"


def duration_in_words(seconds: float) -> str:
    """For example ``0.2 ms``, or ``5 µs`` where that is little."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 or not seconds else f"{seconds * 1e6:.3g} µs"
