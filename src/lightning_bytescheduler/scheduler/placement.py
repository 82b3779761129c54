"""Which server sums which tensor: BytePS's hashes, its mixed mode, and a placement by bytes that beats them.

With ``n`` workers, ``k`` servers can run on machines of their own (*spare*), and one beside each worker (*colocated*).
A byte that is placed on a spare server crosses the links of the workers only; one on a colocated server crosses that
worker's link in both of its roles. All links are busy for equally long if the spare servers together take the share
``2k(n-1) / (n^2 + kn - 2k)`` of the bytes and the colocated ones the rest, as evenly each (BytePS: Jiang et al.,
"A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020,
section 4.1). With ``k = n`` the spare servers take everything; with ``k = 0`` there are colocated ones only.

Hashes place keys, whatever their bytes, so that shares come out only roughly. ``"balanced"`` places bytes: the largest
tensor that is left goes to the server that is least full with it, each server measured by its share. A single tensor
cannot be in two places all the same: :func:`cut` the large ones first.

Every rank computes the same placement from the same names and sizes: nothing is drawn without a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lightning_bytescheduler.checks import closest, require_one_of, require_size, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.task import part_size

__all__ = [
    "PLACEMENTS",
    "Nodes",
    "Placement",
    "chosen_placement",
    "cut",
    "place",
    "server_of_part",
    "server_weights",
    "spare_share",
    "weights_of",
]

PLACEMENTS = ("balanced", "mixed", "naive", "djb2", "sdbm", "built_in", "random")
"""How tensors can be placed; the first is the default."""

MIXED_MODE_VARIABLE = "BYTEPS_ENABLE_MIXED_MODE"

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node."""

_NODES_SHOWN = 4
_BY_SHARES = ("balanced", "mixed")

_PART = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
_WORD = (1 << 64) - 1
_MIXED_BOUND = 101  # BytePS's: a key's hash is taken modulo this, and the smaller results go to spare servers
_MURMUR = 0xC6A4A7935BD1E995


@dataclass(frozen=True, slots=True)
class Placement:
    """Which server has which tensor; made by :func:`place`.

    Servers are numbered: 0 to k-1 are the spare ones, k to k+n-1 those beside workers 0 to n-1.

    Attributes:
        how: One of ``PLACEMENTS``.
        workers: n.
        spare_servers: k, no more than n.
        owners: The server of each key; empty where parts are placed as they are sent.
        bytes_per_server: By number of the server.
        nodes: The ranks of each node, where one of them pushes the sum of all of a node's; the nodes are the workers
            then, and the bytes those of this rank's share.
    """

    how: str
    workers: int
    spare_servers: int
    owners: Mapping[str, int]
    bytes_per_server: tuple[int, ...]
    nodes: Nodes = ()

    def owner(self, key: str) -> int:
        """The server that sums ``key``.

        Raises:
            OptionError: If ``key`` was not placed; names the nearest that was.
        """
        server = self.owners.get(key)
        if server is None:
            near = closest(key, self.owners)
            hint = "" if near is None else f"Did you mean {near!r}?"
            raise OptionError("key", key, f"one of the {len(self.owners)} keys that were placed", hint)
        return server

    @property
    def spare_bytes(self) -> int:
        """Bytes on spare servers."""
        return sum(self.bytes_per_server[: self.spare_servers])

    @property
    def spare_share(self) -> float:
        """Of all bytes, those on spare servers; 0 if there are no bytes."""
        return self.spare_bytes / (sum(self.bytes_per_server) or 1)

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
        what = f"{len(self.owners)} tensors on " if self.owners else ""
        fullest = f"the fullest {self.fullest:.3f} times its ideal"
        return "\n".join([f"placement {self.how!r}: {what}{len(rows)} servers, {fullest}", *rows])

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


def weights_of(how: str, workers: int, servers: int) -> tuple[float, ...]:
    """The share of all bytes that each server gets by a placement, on average; see :func:`server_weights`.

    Args:
        how: One of ``PLACEMENTS``.
        workers: n.
        servers: k.
    """
    if how in _BY_SHARES:
        return server_weights(workers, servers)
    count = workers + min(servers, workers)
    return (1 / count,) * count


def server_of_part(how: str, tensor: int, part: int, workers: int, servers: int) -> int:
    """The server of a part, by all placements but ``"balanced"``, which goes by what was placed before.

    Args:
        how: One of ``PLACEMENTS``.
        tensor: Its number.
        part: Its number among those of the tensor.
        workers: n.
        servers: k.
    """
    spare = min(servers, workers)
    if how == "random":
        return random.Random(f"{tensor}[{part}]").randrange(spare + workers)
    return _hashed(how, _key(tensor, part), workers, spare)


def cut(sizes: Mapping[str, int], largest: int) -> dict[str, int]:
    """Cut what is larger than ``largest`` as tasks are cut: into as few parts as that takes, about equal ones.

    Args:
        sizes: By name, in bytes or parameters.
        largest: Size of a part, in the same unit.

    Returns:
        Sizes by name; part ``i`` of what was cut is called ``name[i]``, the others keep their names.

    Raises:
        OptionError: If a size is not a positive whole number.
    """
    require_size("largest", largest)
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        part = part_size(require_size(f"size of {name!r}", size), largest)
        if part == size:
            parts[name] = size
            continue
        for index, offset in enumerate(range(0, size, part)):
            parts[f"{name}[{index}]"] = min(part, size - offset)
    return parts


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


def place(sizes_bytes: Mapping[str, int], workers: int, servers: int, how: str = PLACEMENTS[0]) -> Placement:
    """Give each tensor to a server.

    Args:
        sizes_bytes: Bytes of each tensor by its name, in the order of first use: the same on all ranks. Part ``i`` of a
            tensor is called ``name[i]``, see ``placement.cut``.
        workers: How many there are.
        servers: How many spare ones there are; more than one for each worker are of no use, and left out.
        how: ``"balanced"``: by bytes, to the shares of the formula. ``"mixed"``: by BytePS's mixed mode, whose hashes
            come to the same shares roughly. ``"naive"``, ``"djb2"``, ``"sdbm"``, ``"built_in"``: by one of BytePS's
            hashes over all servers, spare and colocated, alike. ``"random"``: to any of them.

    Raises:
        OptionError: If a size is negative, or another value is not allowed.
    """
    require_whole("workers", workers, 1)
    require_whole("servers", servers, 0)
    require_one_of("placement", how, PLACEMENTS)
    for name, size in sizes_bytes.items():
        require_whole(f"size of {name!r}", size, 0)
    spare = min(servers, workers)
    if how == "balanced":
        owners = _balanced(sizes_bytes, server_weights(workers, spare))
    elif how == "random":
        owners = {name: random.Random(name).randrange(spare + workers) for name in sizes_bytes}
    else:
        owners = {name: _hashed(how, key, workers, spare) for name, key in _numbered(sizes_bytes)}
    held = [0] * (spare + workers)
    for name, server in owners.items():
        held[server] += sizes_bytes[name]
    return Placement(how, workers, spare, owners, tuple(held))


def _balanced(sizes: Mapping[str, int], weights: tuple[float, ...]) -> dict[str, int]:
    """Largest first, each to the server that is least full with it; the rule's proven bound is 4/3 for equal servers.

    Among equal sizes the order of use is kept, so that what travels at about the same time is on different servers.
    """
    held = [0] * len(weights)
    usable = [server for server, weight in enumerate(weights) if weight]
    owners = dict.fromkeys(sizes, 0)  # keeps the order of use
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size = sizes[name]
        server = min(usable, key=lambda server: ((held[server] + size) / weights[server], server))
        owners[name] = server
        held[server] += size
    return owners


def _numbered(names: Iterable[str]) -> Iterable[tuple[str, int]]:
    """BytePS's keys: a tensor's position among all above 16 bits for the number of its part."""
    tensors: dict[str, int] = {}
    for name in names:
        found = _PART.fullmatch(name)
        tensor, part = (name, 0) if found is None else (found[1], int(found[2]))
        yield name, _key(tensors.setdefault(tensor, len(tensors)), part)


def _key(tensor: int, part: int) -> int:
    return (tensor << 16) + part


def _hashed(how: str, key: int, workers: int, spare: int) -> int:
    if how != "mixed":
        return _HASHES[how](key) % (spare + workers)
    bound = max(_MIXED_BOUND, spare + workers)
    chosen = _djb2(key) % bound
    if chosen < spare_share(workers, spare) * bound:
        return _djb2(chosen) % spare
    return spare + _djb2(chosen) % workers


def _naive(key: int) -> int:
    return ((key >> 16) + key % (1 << 16)) * 9973 & _WORD


def _djb2(key: int) -> int:
    """Bernstein's: 33 times what came before, plus the next character of the key in decimal."""
    value = 5381
    for character in str(key).encode():
        value = value * 33 + character & _WORD
    return value


def _sdbm(key: int) -> int:
    """That of the sdbm database: 65599 times what came before, plus the next character."""
    value = 0
    for character in str(key).encode():
        value = value * 65599 + character & _WORD
    return value


def _built_in(key: int) -> int:
    """What ``std::hash`` makes of the key in decimal where BytePS is built with GCC: MurmurHash64A (Appleby)."""
    text = str(key).encode()
    value = 0xC70F6907 ^ (len(text) * _MURMUR & _WORD)
    whole = len(text) // 8 * 8
    for start in range(0, whole, 8):
        word = _mixed(int.from_bytes(text[start : start + 8], "little") * _MURMUR & _WORD) * _MURMUR & _WORD
        value = (value ^ word) * _MURMUR & _WORD
    if whole < len(text):
        value = (value ^ int.from_bytes(text[whole:], "little")) * _MURMUR & _WORD
    return _mixed(_mixed(value) * _MURMUR & _WORD)


def _mixed(value: int) -> int:
    return value ^ (value >> 47)


_HASHES: Mapping[str, Callable[[int], int]] = {"naive": _naive, "djb2": _djb2, "sdbm": _sdbm, "built_in": _built_in}
