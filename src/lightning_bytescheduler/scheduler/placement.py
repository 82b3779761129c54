"""Which server sums which part of a gradient: by bytes, or as BytePS's mixed mode does.

With ``n`` workers, ``k`` servers can run on machines of their own (*spare*), and one beside each worker (*colocated*).
A byte that is placed on a spare server crosses the links of the workers only; one on a colocated server crosses that
worker's link in both of its roles. All links are busy for equally long if the spare servers together take the share
``2k(n-1) / (n^2 + kn - 2k)`` of the bytes and the colocated ones the rest, as evenly each (BytePS: Jiang et al.,
"A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020,
section 4.1). With ``k = n`` the spare servers take everything; with ``k = 0`` there are colocated ones only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError

PLACEMENTS = ("balanced", "mixed")
"""How parts can be placed; the first is the default."""

MIXED_MODE_VARIABLE = "BYTEPS_ENABLE_MIXED_MODE"

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node."""

_NODES_SHOWN = 4

_WORD = (1 << 64) - 1
_MIXED_BOUND = 101  # BytePS's: a key's hash is taken modulo this, and the smaller results go to spare servers


@dataclass(frozen=True, slots=True)
class Placement:
    """How many bytes each server has had.

    Servers are numbered: 0 to k-1 are the spare ones, k to k+n-1 those beside workers 0 to n-1.

    Attributes:
        how: One of ``PLACEMENTS``.
        workers: n.
        spare_servers: k, no more than n.
        bytes_per_server: By number of the server.
        nodes: The ranks of each node, where one of them pushes the sum of all of a node's; the nodes are the workers
            then, and the bytes those of this rank's share.
    """

    how: str
    workers: int
    spare_servers: int
    bytes_per_server: tuple[int, ...]
    nodes: Nodes = ()

    @property
    def spare_share(self) -> float:
        """Of all bytes, those on spare servers; 0 if there are no bytes."""
        return sum(self.bytes_per_server[: self.spare_servers]) / (sum(self.bytes_per_server) or 1)

    @property
    def ideal_bytes(self) -> tuple[float, ...]:
        """By number of the server: what it would have if bytes could be divided at will."""
        total = sum(self.bytes_per_server)
        return tuple(total * weight for weight in server_weights(self.workers, self.spare_servers))

    @property
    def fullest(self) -> float:
        """How many times its ideal the fullest server has; infinite where something is on one that should have nothing.

        Communication takes so many times the time of the formula.
        """
        pairs = zip(self.bytes_per_server, self.ideal_bytes, strict=True)
        return max((has / ideal if ideal else float("inf") for has, ideal in pairs if has), default=1.0)

    def table(self) -> list[tuple[str, int, float, float]]:
        """A row for each server that has bytes or should: its name, bytes, share of all bytes, and ideal share."""
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
        """What is added up before it is pushed, in words; empty if nothing is."""
        if not self.nodes:
            return ""
        shown = [f"{', '.join(map(str, ranks))}" for ranks in self.nodes[:_NODES_SHOWN]]
        more = len(self.nodes) - len(shown)
        ranks = "; ".join([*shown, f"and {more} nodes more"] if more else shown)
        return f"gradients are added up on each node before one of its ranks pushes the sum: ranks {ranks}"


def spare_share(workers: int, servers: int) -> float:
    """Of all bytes, what ``servers`` spare servers together should have beside ``workers`` workers.

    ``2k(n-1) / (n^2 + kn - 2k)``: 0.6 for n = 4, k = 2, and 1 for k = n. More spare servers than workers count as many
    as there are workers.

    Raises:
        OptionError: If there is no worker, or less than no server.
    """
    n, k = require_whole("workers", workers, 1), require_whole("servers", servers, 0)
    if k >= n:
        return 1.0
    return 2 * k * (n - 1) / (n * n + k * n - 2 * k)


def server_weights(workers: int, servers: int) -> tuple[float, ...]:
    """Each server's share of all bytes, the spare ones first; they sum to 1. See :func:`spare_share`."""
    share, spare = spare_share(workers, servers), min(servers, workers)
    return (*(share / spare for _ in range(spare)), *((1 - share) / workers for _ in range(workers)))


def mixed_server(tensor: int, part: int, workers: int, servers: int) -> int:
    """The server of a part by BytePS's mixed mode, whose hashes come to about the shares of :func:`server_weights`.

    Args:
        tensor: Its number.
        part: Its number among those of the tensor.
        workers: n.
        servers: k.
    """
    spare = min(servers, workers)
    bound = max(_MIXED_BOUND, spare + workers)
    chosen = _djb2((tensor << 16) + part) % bound
    if chosen < spare_share(workers, spare) * bound:
        return _djb2(chosen) % spare
    return spare + _djb2(chosen) % workers


def chosen_placement(how: str | None, environ: Mapping[str, str]) -> str:
    """The placement that was asked for: by the option, else by BytePS's variable, else the default.

    Args:
        how: The option ``placement``, if it was given.
        environ: Where ``BYTEPS_ENABLE_MIXED_MODE`` is looked up: 1 asks for ``"mixed"``, as it does in BytePS.

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
    """Bernstein's: 33 times what came before, plus the next character of the key in decimal."""
    value = 5381
    for character in str(key).encode():
        value = value * 33 + character & _WORD
    return value
