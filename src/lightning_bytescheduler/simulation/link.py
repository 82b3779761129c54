"""What it costs to reduce gradients over a network.

Every worker has one link of ``bandwidth`` bytes per second in each direction. Reducing ``s`` bytes over ``n``
workers then occupies that link, by architecture, for

- ``allreduce``: ``2(n-1)/n × s/bandwidth``, a reduce-scatter and an all-gather of equal cost around a ring, whose
  ``2(n-1)`` hops follow each other.
- ``ps``, parameter servers: a push and a pull, two messages deep, each at ``2n(n-1)/(n² + kn − 2k) × s/bandwidth`` with
  ``k`` servers beside the workers (BytePS, section 4.1). That is the rate at which both can run at once, one
  partition being pulled while the next is pushed. For ``k = n`` this is exact. With fewer servers, where
  workers push and serve over one link, a lone partition would be a little faster than modelled. In a step that is
  played links of servers and workers besides wait for each other for a share of the time, see ``LinkModel.idle``.

A collective costs two more things. *Latency*: its hops take time in which the link is free for other
collectives in flight, so a window that covers bandwidth × latency hides it. *Overhead*: what each collective
costs however many are in flight (a launch, a handshake); the link stands idle meanwhile.

Where gradients are compressed, each rank compresses each one once (others' shards as they are, its own when it is
summed) and reads it twice (what it sums, and all sums). Codecs work beside the link and beside the training, so a byte
takes as long as the slower of link and codecs does; on a processor that has other work they take longer than is said
here.

Limits: workers are alike, links are dedicated, no congestion or loss; the time a simulation takes does not
depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_bytescheduler.checks import (
    ARCHITECTURES,
    options_by_name,
    require_one_of,
    require_positive,
    require_seconds,
    require_whole,
)
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.quantities import (
    duration_in_words,
    rate_in_words,
    require_duration,
    require_rate,
)

__all__ = ["CODECS", "CodecPace", "LinkModel", "break_even_bandwidth", "compressed_link", "network_in_words"]

Architecture = Literal["allreduce", "ps"]
"""Who reduces gradients: the workers among themselves, or parameter servers; ``checks.ARCHITECTURES``."""

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
        overhead: Seconds that each collective keeps the link from others, whatever its size.
        architecture: ``"allreduce"`` or ``"ps"``.
        servers: Servers on machines of their own, with architecture ``"ps"``; where there are none, one beside each
            worker sums. More than one for each worker change nothing, because from there on the workers' own links are
            the limit.
        messages_in_flight: Collectives that the backend carries at once, such as 1 for one NCCL stream and 2
            for gloo's two threads; ``None`` for no limit.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    workers: int
    bandwidth: float
    latency: float = 0.0
    overhead: float = 0.0
    architecture: Architecture = "allreduce"
    servers: int = 0
    messages_in_flight: int | None = None

    def __init__(
        self,
        *,
        workers: int,
        bandwidth: float | str,
        latency: float | str = 0.0,
        overhead: float | str = 0.0,
        architecture: str = "allreduce",
        servers: int = 0,
        messages_in_flight: int | None = None,
    ) -> None:
        require_whole("workers", workers, 1)
        require_one_of("architecture", architecture, ARCHITECTURES)
        require_whole("servers", servers, 0)
        if servers and architecture != "ps":
            raise OptionError("servers", servers, "0 unless architecture is 'ps'")
        if messages_in_flight is not None:
            require_whole("messages_in_flight", messages_in_flight, 1)
        values = {
            "workers": workers,
            "bandwidth": require_rate("bandwidth", bandwidth),
            "latency": require_duration("latency", latency),
            "overhead": require_duration("overhead", overhead),
            "architecture": architecture,
            "servers": servers,
            "messages_in_flight": messages_in_flight,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def measured(cls, *, workers: int, alpha: float, beta: float) -> LinkModel:
        """The ring on which lone all-reduces of ``s`` bytes were seen to take ``alpha + beta × s`` seconds.

        One all-reduce at a time cannot tell latency from overhead; all of ``alpha`` is taken to be latency.

        Raises:
            OptionError: If there are less than 2 workers, or ``alpha`` or ``beta`` cannot be.
        """
        require_whole("workers", workers, 2)
        require_seconds("alpha", alpha)
        require_positive("beta", beta, of="seconds per byte")
        hops = 2 * (workers - 1)
        return cls(workers=workers, bandwidth=hops / workers / beta, latency=alpha / hops)

    @property
    def stages(self) -> int:
        """How many parts of the network each message passes, one after the other: with servers, a push and a pull."""
        return 2 if self.architecture == "ps" else 1

    @property
    def without_servers(self) -> LinkModel:
        """The same network, on which workers reduce among themselves."""
        return replace(self, architecture="allreduce", servers=0)

    @property
    def seconds_per_byte(self) -> float:
        """How long reducing one byte occupies the link; with servers, in each of its two stages."""
        n, k = self.workers, min(self.servers, self.workers)
        if n == 1:
            return 0.0
        if self.architecture == "ps":
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
        return 2 * self.latency * (1 if self.architecture == "ps" else self.workers - 1)

    @property
    def overhead_seconds(self) -> float:
        """Overhead of each collective; nothing for a lone worker, who has none."""
        return self.overhead if self.workers > 1 else 0.0


def network_in_words(link: LinkModel) -> str:
    """For example ``4 workers and 2 servers, 500 Mbit/s each way, 0.2 ms a hop``."""
    hop = f", {duration_in_words(link.latency)} a hop" if link.latency else ""
    servers = f" and {_count(link.servers, 'spare server')}" if link.architecture == "ps" else ""
    idle = f", idle for {link.idle:.0%} of the time" if link.idle else ""
    return f"{_count(link.workers, 'worker')}{servers}, {rate_in_words(link.bandwidth)} each way{hop}{idle}"


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecPace:
    """How small and how fast a compressor is, on one core.

    Attributes:
        name: As of ``compression``.
        ratio: How many times smaller fp32 gradients get.
        compress: Bytes of fp32 a second, with error feedback.
        read: The same, of reading.
    """

    name: str
    ratio: float
    compress: float
    read: float

    @property
    def seconds_per_byte(self) -> float:
        """Of gradient, on each rank."""
        return 1 / self.compress + 2 / self.read


CODECS = (
    CodecPace(name="bf16", ratio=2.0, compress=2120e6, read=12270e6),
    CodecPace(name="int8", ratio=3.94, compress=1651e6, read=8856e6),
    CodecPace(name="int4", ratio=7.53, compress=1488e6, read=4277e6),
)
"""As ``python -m benchmarks.codecs`` measured them on one core with AVX-512, int8 and int4 rounded to nearest; see the
documentation of compression."""


def compressed_link(link: LinkModel, codec: CodecPace, share: float = 1.0) -> LinkModel:
    """A link on which gradients as they are take as long as on ``link`` with ``share`` of them compressed."""
    exact = link.seconds_per_byte
    if not exact:
        return link
    smaller = max(exact / codec.ratio, codec.seconds_per_byte)
    return replace(link, bandwidth=link.bandwidth * exact / ((1 - share) * exact + share * smaller))


def break_even_bandwidth(link: LinkModel, codec: CodecPace) -> float:
    """Bytes a second of the link on which codecs take as long as sending gradients as they are; it pays below."""
    return link.seconds_per_byte * link.bandwidth / codec.seconds_per_byte
