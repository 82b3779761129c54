"""The cost of reducing gradients over a network.

Every worker has one link of ``bandwidth`` bytes per second in each direction. An all-reduce of ``s`` bytes over ``n``
workers occupies that link for ``2(n-1)/n × s/bandwidth``: a reduce-scatter and an all-gather of equal cost around a
ring, whose ``2(n-1)`` hops follow each other. It also has a *latency*: its hops take time in which the link is free for
other collectives in flight. So a window that covers bandwidth × latency hides it.

With ``k`` parameter servers on spare machines a push and a pull, which overlap, occupy the link for
``2n(n-1)/(n² + kn − 2k) × s/bandwidth`` (BytePS, section 4.1), and for the time in which links wait for each other:
senders meet at one receiver, and sums wait for the last push.

Where gradients are compressed, each rank encodes each one once (others' shards before the sum, its own shard after it)
and decodes it twice (what it sums, and all sums). Codecs work beside the link and beside the training, so a byte
takes as long as the slower of link and codecs. On a processor with other work they take longer than modelled.

Limits: workers are alike, links are dedicated, and there is no congestion or loss.
The time of a simulation does not depend on the number of workers.

Rates and times may be written with their unit: ``10Gbit/s``, ``10GbE``, ``1.25GB/s``, ``20ms``. A text that could be in
bits or in bytes, such as ``1GB`` or ``1gb/s``, is refused, as the answers differ by a factor of eight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_bytescheduler.checks import options_by_name, require_positive, require_seconds, require_whole
from lightning_bytescheduler.exceptions import OptionError

_IDLE_WITH_SERVERS = 0.08
"""So that simulated steps are those measured within 5%: 4 workers, 2 and 4 servers, see docs/parameter_servers.md."""


@options_by_name
@dataclass(frozen=True, init=False, slots=True)
class LinkModel:
    """A network, over which gradients are all-reduced, or averaged by parameter servers.

    Rates and times may be given as text, such as ``bandwidth="10Gbit/s"`` and ``latency="0.1ms"``; they are kept as
    numbers.

    Attributes:
        workers: How many take part, 2 or more.
        bandwidth: Bytes per second of each worker's link, in each direction.
        latency: Seconds of one hop, from one worker to another.
        servers: Number of parameter servers on spare machines, at most one for each worker; ``None`` without any.

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
        object.__setattr__(self, "workers", require_whole("workers", workers, 2))
        object.__setattr__(self, "bandwidth", require_rate("bandwidth", bandwidth))
        object.__setattr__(self, "latency", require_duration("latency", latency))
        if servers is not None and require_whole("servers", servers, 1) > workers:
            raise OptionError("servers", servers, f"{workers} or less: more than one for each worker bring nothing")
        object.__setattr__(self, "servers", servers)

    @property
    def without_servers(self) -> LinkModel:
        """The same network, without servers."""
        return replace(self, servers=None)

    @property
    def seconds_per_byte(self) -> float:
        """How long reducing one byte occupies the link."""
        n, k = self.workers, self.servers
        if k is not None:
            return 2 * n * (n - 1) / (n * n + k * n - 2 * k) / self.bandwidth / (1 - _IDLE_WITH_SERVERS)
        return 2 * (n - 1) / n / self.bandwidth

    @property
    def latency_seconds(self) -> float:
        """Latency of a whole all-reduce, or of a push and a pull: what they take beyond occupying the link."""
        return 2 * self.latency * (self.workers - 1 if self.servers is None else 1)


def network_in_words(link: LinkModel) -> str:
    """For example ``4 workers, 500 Mbit/s each way, 0.2 ms a hop``."""
    hop = f", {duration_in_words(link.latency)} a hop" if link.latency else ""
    servers = "" if link.servers is None else f" and {link.servers:,} spare server{'s' * (link.servers > 1)}"
    return f"{link.workers:,} workers{servers}, {rate_in_words(link.bandwidth)} each way{hop}"


class Codec(NamedTuple):
    """How small and how fast a compressor is.

    Attributes:
        ratio: How many times smaller fp32 gradients get.
        seconds_per_byte: Per byte of fp32 gradients, on one core: encoded once with error feedback, decoded twice.
    """

    ratio: float
    seconds_per_byte: float


CODECS = {"int8": Codec(3.94, 0.83e-9), "int4": Codec(7.53, 1.14e-9)}
"""As ``python -m benchmarks codecs`` measured them on one core with AVX-512, rounded to nearest."""


def compressed_link(link: LinkModel, codec: Codec) -> LinkModel:
    """Return a link on which uncompressed gradients take as long as compressed ones on ``link``."""
    exact = link.seconds_per_byte
    return replace(link, bandwidth=link.bandwidth * exact / max(exact / codec.ratio, codec.seconds_per_byte))


# ── Rates and times as texts ────────────────────────────────────────────────────────────────────────

RATES = "10Gbit/s, 500Mbps, 25GbE or 1.25GB/s"
"""Examples of rates, for help and errors."""

TIMES = "20ms, 0.5ms or 200us"
"""Examples of times."""

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([^\W\d]\S*)")
_RATE_UNITS = {
    f"{prefix}{unit}": size * share
    for prefix, size in (("k", 1e3), ("m", 1e6), ("g", 1e9))
    for unit, share in (*((bits, 1 / 8) for bits in ("bit/s", "bit", "bps", "bE")), ("B/s", 1.0))
}
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "\u03bcs": 1e-6}  # the micro sign, and the Greek letter


def require_rate(option: str, value: object) -> float:
    """Return bytes per second, given as a number, or as a text such as ``10Gbit/s``.

    Raises:
        OptionError: If it is no rate above 0, or could be in bits or in bytes; names ``option``.
    """
    if not isinstance(value, str):
        return require_positive(option, value, of="bytes per second")
    rate = _in_units(value, _RATE_UNITS)
    if not rate:
        raise OptionError(option, value, f"a rate above 0 such as {RATES}: in bits, or with a capital B in bytes")
    return rate


def require_duration(option: str, value: object) -> float:
    """Return seconds, given as a number, or as a text such as ``20ms``.

    Raises:
        OptionError: If it is no time, 0 or more; names ``option``.
    """
    if not isinstance(value, str):
        return require_seconds(option, value)
    seconds = 0.0 if value.strip() == "0" else _in_units(value, _TIME_UNITS)
    if seconds is None:
        raise OptionError(option, value, f"a time with its unit, such as {TIMES}")
    return seconds


def _in_units(text: str, units: Mapping[str, float]) -> float | None:
    """What a number with its unit comes to. The case of a prefix and of ``bit`` does not matter."""
    found = _QUANTITY.fullmatch(text.strip())
    unit = "" if found is None else f"{found[2][0].lower()}{found[2][1:].replace('Bit', 'bit')}"
    return None if found is None or unit not in units else float(found[1]) * units[unit]


def rate_in_words(bandwidth: float) -> str:
    """Return bytes per second as a text such as ``500 Mbit/s``."""
    rate = bandwidth * 8
    unit, size = next((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 0.0)) if rate >= s)
    return f"{rate / (size or 1e3):,.4g} {unit}"


def duration_in_words(seconds: float) -> str:
    """Return a text such as ``0.2 ms``, or ``5 µs`` for a short time."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 or not seconds else f"{seconds * 1e6:.3g} µs"
