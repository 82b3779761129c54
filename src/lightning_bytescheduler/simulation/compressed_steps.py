"""Steps with compressed gradients: what the link saves, what codecs take, and on which links that pays.

Each rank compresses each gradient once (others' shards as they are, its own when it is summed) and reads it twice (what
it sums, and all sums). Codecs work beside the link and beside the training, so a byte takes as long as the slower of
link and codecs does; on a processor that has other work they take longer than is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["CODECS", "CodecPace", "auto_step", "break_even_bandwidth", "compressed_link"]

_HIDES = 1.05  # times the computation: up to there, ``"auto"`` leaves gradients as they are
_LEFT = 1.01  # times the computation, that it compresses down to
_PARTS = 20  # of the gradients, that it may compress


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


def auto_step(
    step_on: Callable[[LinkModel], float], compute: float, link: LinkModel, codec: CodecPace
) -> tuple[float, float]:
    """The step with as little compressed as it takes to hide the communication: its seconds, and the share of bytes.

    Args:
        step_on: Seconds of a step on a link.
        compute: Seconds of a step that never waits.
        link: The network.
        codec: Of what travels compressed.
    """
    found = (step_on(link), 0.0)
    if found[0] <= _HIDES * compute or compressed_link(link, codec).bandwidth <= link.bandwidth:
        return found
    for part in range(1, _PARTS + 1):
        seconds = step_on(compressed_link(link, codec, part / _PARTS))
        if seconds < found[0]:
            found = (seconds, part / _PARTS)
        if seconds <= _LEFT * compute:
            break
    return found
