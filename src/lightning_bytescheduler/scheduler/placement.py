"""Assigns parts of gradients to servers: by bytes, or as BytePS's mixed mode does.

With ``n`` workers, ``k`` *spare* servers can run on separate machines, and one *colocated* server with each worker. A
byte on a spare server crosses only links of workers. A byte on a colocated server crosses that worker's link in both
roles. All links are busy equally long if the spare servers together take the share ``2k(n-1) / (n^2 + kn - 2k)`` of the
bytes and the colocated ones the rest, each equally much (BytePS: Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020, section 4.1). With ``k = n`` the spare servers
take everything; with ``k = 0`` there are only colocated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError

PLACEMENTS = ("balanced", "mixed")
"""Allowed placements; the first is the default."""

MIXED_MODE_VARIABLE = "BYTEPS_ENABLE_MIXED_MODE"

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node."""

_NODES_SHOWN = 4

_WORD = (1 << 64) - 1
_MIXED_BOUND = 101  # BytePS's: a key's hash is taken modulo this, and smaller results go to spare servers


@dataclass(frozen=True, slots=True)
class Placement:
    """The bytes that each server has received.

    Servers 0 to k-1 are the spare ones; k to k+n-1 are colocated with workers 0 to n-1.

    Attributes:
        how: One of ``PLACEMENTS``.
        workers: n.
        spare_servers: k, at most n.
        bytes_per_server: Bytes by number of the server.
        nodes: The ranks of each node, if one of them pushes the node's sum; then nodes are the workers, and the bytes
            are those of this rank's share.
    """

    how: str
    workers: int
    spare_servers: int
    bytes_per_server: tuple[int, ...]
    nodes: Nodes = ()

    @property
    def spare_share(self) -> float:
        """Fraction of all bytes on spare servers; 0 without bytes."""
        return sum(self.bytes_per_server[: self.spare_servers]) / (sum(self.bytes_per_server) or 1)

    @property
    def ideal_bytes(self) -> tuple[float, ...]:
        """Bytes by number of the server, if they could be divided exactly."""
        total = sum(self.bytes_per_server)
        return tuple(total * weight for weight in server_weights(self.workers, self.spare_servers))

    @property
    def fullest(self) -> float:
        """The fullest server's bytes over its ideal; infinite if a server without a share has bytes.

        Communication takes this many times the time of the formula.
        """
        pairs = zip(self.bytes_per_server, self.ideal_bytes, strict=True)
        return max((has / ideal if ideal else float("inf") for has, ideal in pairs if has), default=1.0)

    def table(self) -> list[tuple[str, int, float, float]]:
        """Return a row for each server with bytes or a share: name, bytes, share of all bytes, ideal share."""
        total = sum(self.bytes_per_server) or 1
        weights = server_weights(self.workers, self.spare_servers)
        names = [f"spare server {k}" for k in range(self.spare_servers)]
        names += [f"server of {'node' if self.nodes else 'worker'} {n}" for n in range(self.workers)]
        rows = zip(names, self.bytes_per_server, weights, strict=True)
        return [(name, has, has / total, weight) for name, has, weight in rows if has or weight]

    def __str__(self) -> str:
        rows = [
            f"{name:<20} {has:>14,} bytes  {share:6.1%} of {ideal:6.1%}" for name, has, share, ideal in self.table()
        ]
        fullest = f"the fullest {self.fullest:.3f} times its ideal"
        return "\n".join([f"placement {self.how!r}: {len(rows)} servers, {fullest}", *rows])

    @property
    def grouping(self) -> str:
        """The grouping of ranks by node in words; empty without one."""
        if not self.nodes:
            return ""
        shown = [f"{', '.join(map(str, ranks))}" for ranks in self.nodes[:_NODES_SHOWN]]
        more = len(self.nodes) - len(shown)
        ranks = "; ".join([*shown, f"and {more} nodes more"] if more else shown)
        return f"gradients are added up on each node before one of its ranks pushes the sum: ranks {ranks}"


def spare_share(workers: int, servers: int) -> float:
    """Return the share of all bytes for ``servers`` spare servers together, with ``workers`` workers.

    ``2k(n-1) / (n^2 + kn - 2k)``: 0.6 for n = 4, k = 2, and 1 for k = n. More spare servers than workers count as n.

    Raises:
        OptionError: If ``workers`` is below 1 or ``servers`` below 0.
    """
    n, k = require_whole("workers", workers, 1), require_whole("servers", servers, 0)
    if k >= n:
        return 1.0
    return 2 * k * (n - 1) / (n * n + k * n - 2 * k)


def server_weights(workers: int, servers: int) -> tuple[float, ...]:
    """Return each server's share of all bytes, spare ones first; they sum to 1. See :func:`spare_share`."""
    share, spare = spare_share(workers, servers), min(servers, workers)
    return (*(share / spare for _ in range(spare)), *((1 - share) / workers for _ in range(workers)))


def mixed_server(tensor: int, part: int, workers: int, servers: int) -> int:
    """Return the server of a part by BytePS's mixed mode, whose hashes approximate :func:`server_weights`."""
    spare = min(servers, workers)
    bound = max(_MIXED_BOUND, spare + workers)
    chosen = _djb2((tensor << 16) + part) % bound
    if chosen < spare_share(workers, spare) * bound:
        return _djb2(chosen) % spare
    return spare + _djb2(chosen) % workers


def chosen_placement(how: str | None, environ: Mapping[str, str]) -> str:
    """Return the chosen placement: the option, otherwise BytePS's variable, otherwise the default.

    Args:
        how: The option ``placement``; ``None`` if left out.
        environ: Environment variables; ``BYTEPS_ENABLE_MIXED_MODE=1`` means ``"mixed"``, as in BytePS.

    Raises:
        OptionError: If the option or the variable has a value that is not allowed.
    """
    if how is not None:
        return require_one_of("placement", how, PLACEMENTS)
    switch = environ.get(MIXED_MODE_VARIABLE, "").strip()
    if switch not in ("", "0", "1"):
        raise OptionError(MIXED_MODE_VARIABLE, switch, "0 or 1")
    return "mixed" if switch == "1" else PLACEMENTS[0]


def _djb2(key: int) -> int:
    """Return Bernstein's hash of the key in decimal: 33 times the last value plus the next character."""
    value = 5381
    for character in str(key).encode():
        value = value * 33 + character & _WORD
    return value
