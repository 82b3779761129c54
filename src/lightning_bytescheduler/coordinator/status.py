"""How a run stands, for people and for programs: the source of the status page, the metrics and a terminal table.

It has plain values only and no secrets: no token, no session, no address of a worker. ``lightning-bytescheduler
status`` shows the table, and can follow the run.
"""

from __future__ import annotations

import argparse
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lightning_bytescheduler.checks import importing, named, require_positive
from lightning_bytescheduler.diloco.coordinator_client import TOKEN_VARIABLE, CoordinatorAddress, resolve_coordinator
from lightning_bytescheduler.diloco.coordinator_protocol import STATUS_PATH
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.tracker import TrackerReport

if TYPE_CHECKING:
    from rich.console import RenderableType


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        name: Its name in this run.
        state: ``"waiting"``, ``"starting"``, ``"training"``, ``"sending"``, ``"arrived"``, ``"lost"``, ``"paused"``, or
            ``"joining"`` before it takes part in rounds.
        connected: Whether its WebSocket is open.
        leads: Whether it validates, logs and saves for all.
        ranks: Number of ranks that train together as this worker.
        steps: Steps taken in this round.
        samples: Samples processed in this round.
        seconds_per_step: Estimate, or ``None`` before it has taken enough steps.
        samples_per_second: Estimate, or ``None``.
        heard_ago: Seconds since it was last heard of.
        bytes_in: Bytes of updates received from it so far.
        bytes_out: Bytes of means and states sent to it so far.
        merged: Rounds that its updates were part of.
        late: Updates that came too late for their round.
        slices: Slices of data that it holds.
    """

    name: str
    state: str
    connected: bool
    leads: bool = False
    ranks: int = 1
    steps: int = 0
    samples: int = 0
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    heard_ago: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    merged: int = 0
    late: int = 0
    slices: int = 0


class RoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A round that has ended.

    Attributes:
        round: Its number.
        seconds: Seconds from its start until its updates were merged.
        ended: When it ended, in seconds since the epoch (1970).
        samples: Samples that were merged.
        merged: Workers whose updates were merged.
        workers: Workers that took part.
        live: Workers that were connected when it was merged, or are part of it.
        participation: Share of these whose updates are part of it; 0 in a round without a quorum.
        deadline: Seconds from its start after which it would have ended without the missing workers; ``None`` if it
            waited for none.
        loss: Mean over the round; ``None`` if no worker reports one.
    """

    round: int
    seconds: float
    ended: float
    samples: int
    merged: int
    workers: int
    live: int = 0
    participation: float = 0.0
    deadline: float | None = None
    loss: float | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands.

    Attributes:
        version: Version of this package.
        uptime: Seconds since this coordinator was started.
        round: The current round; 0 before the first.
        phase: ``"waiting"`` (for weights or workers), ``"training"``, ``"collecting"``, ``"merging"`` or
            ``"finished"``.
        outer_steps: The number that was asked for, or ``None``.
        last_round: The round that is expected to end the run, or ``None``: ``outer_steps``, plus a round for each
            fragment but one, plus the rounds that had no update that counted.
        target: What ends a round, in words.
        left: What remains of this round, in the target's unit.
        weights_version: Rounds that are part of the weights.
        chain: Chain of the weights, 32 hexadecimal digits.
        parameters: Number of trained elements; 0 before the first worker.
        samples: Samples that have become part of the weights.
        workers: All known workers, by name.
        rounds: The last rounds, oldest first.
        slices: Progress of the running epoch of the data; ``None`` where workers bring their own data.
        counters: Events since it was started, by name: ``joined``, ``rejoined``, ``left``, ``silent``, ``expired``,
            ``refused_hellos``, ``wrong_frames``, ``slow_downs``, ``updates_added``, ``updates_late``,
            ``updates_dropped``, ``updates_refused``, ``updates_broken``, ``updates_again``, ``rounds``,
            ``empty_rounds``, ``bytes_in``, ``bytes_out``, and ``refused_REASON`` as ``serving.Refusals`` counts refused
            requests.
        spool_bytes: Bytes of updates that are not added yet.
        saved_round: The last round that is part of a saved state, or ``None``.
        timeline: What workers did in the last few rounds, oldest first; a part of the workers if there are many.
    """

    version: str
    uptime: float
    round: int
    phase: str
    outer_steps: int | None
    last_round: int | None
    target: str
    left: int
    weights_version: int
    chain: str
    parameters: int
    samples: int
    workers: tuple[WorkerStatus, ...]
    rounds: tuple[RoundSummary, ...]
    slices: TrackerReport | None
    counters: dict[str, int]
    spool_bytes: int = 0
    saved_round: int | None = None
    timeline: tuple[RoundRecord, ...] = ()


def summary_of(record: RoundRecord, ended: float, *, live: int) -> RoundSummary:
    """The summary of a round.

    Args:
        record: The round's record.
        ended: When it ended, in seconds since the epoch.
        live: Workers that were there when it was merged.
    """
    return RoundSummary(
        round=record.round,
        seconds=record.end - record.start,
        ended=ended,
        samples=record.samples,
        merged=len(record.merged),
        workers=len(record.workers),
        live=live,
        participation=len(record.merged) / max(live, 1),
        deadline=None if record.deadline is None else record.deadline - record.start,
        loss=record.metrics.get("loss"),
    )


_EVERY_S = 2.0
_TIMEOUT_S = 10.0
_MOST_BYTES = 2**26
_ROUNDS = 60  # the loss is drawn over these
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDE = 100  # columns
_ARGUMENTS = {
    "coordinator": "URL",
    "coordinator.authority": "--ca",
    "coordinator.certificate": "--cert",
    "coordinator.key": "--key",
    "coordinator.token_file": "--token-file",
    "authority": "--ca",
    "certificate": "--cert",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("url", metavar="URL", help="of the coordinator, such as https://host:7077")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print it once, as JSON")
    parser.add_argument("--every", type=float, default=_EVERY_S, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"file with the coordinator's token; or {TOKEN_VARIABLE} has it"
    )
    parser.add_argument("--ca", metavar="FILE", help="certificates to know the coordinator by")
    parser.add_argument("--cert", metavar="FILE", help="a certificate of one's own, for mutual TLS")
    parser.add_argument("--key", metavar="FILE", help="its private key")


def run(options: argparse.Namespace) -> int:
    """Show the status as the arguments say; return the exit code."""
    require_positive("--every", options.every, of="seconds")
    files = {"authority": options.ca, "certificate": options.cert, "key": options.key}
    with named(**_ARGUMENTS):
        address = resolve_coordinator({"url": options.url, "token_file": options.token_file, **files})
    if address is None:  # it was given
        raise OptionError("URL", options.url, "https://HOST:PORT")
    if options.as_json:
        print(_ask(address).decode())
        return 0
    with importing("status", extra="coordinator"):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    console = Console()
    status = ask_status(address)
    if options.once or not console.is_terminal:
        with console.capture() as drawn:
            console.print(status_view(status, console.width))
        print(drawn.get(), end="")
        return 0
    with Live(status_view(status, console.width), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(options.every)
                try:
                    live.update(status_view(ask_status(address), console.width), refresh=True)
                except OSError as error:
                    live.update(Text(f"{error}\nIt is asked again every {options.every:g} s."), refresh=True)
        except KeyboardInterrupt:
            return 0


def ask_status(address: CoordinatorAddress) -> RunStatus:
    """Ask a coordinator for the status of its run.

    Args:
        address: The coordinator's address.

    Raises:
        OptionError: If the answer is not a coordinator's.
        OSError: If it does not answer, or refuses the request; with its reason.
    """
    text = _ask(address)
    try:
        return msgspec.json.decode(text, type=RunStatus)
    except msgspec.DecodeError as error:
        allowed = f"the address of a coordinator, of this release or a like one ({error})"
        raise OptionError("URL", address.url, allowed) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would take the token elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _ask(address: CoordinatorAddress) -> bytes:
    https = urllib.request.HTTPSHandler(context=address.tls())
    opener = urllib.request.build_opener(_NoRedirects(), urllib.request.ProxyHandler({}), https)
    url = address.url
    request = urllib.request.Request(f"{url}{STATUS_PATH}")
    if address.token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {address.token}")
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{url} answers {error.code} {error.reason}.{_way_out(error.code)}") from error
    except http.client.HTTPException as error:  # not HTTP, or ends early
        raise OSError(f"{url} does not answer as a coordinator does ({type(error).__name__}).") from error
    except OSError as error:
        raise OSError(f"{url} cannot be asked: {_reason(getattr(error, 'reason', error))}.") from error
    if len(content) > _MOST_BYTES:
        raise OptionError("URL", url, "the address of a coordinator, and its answer has no end")
    return content


def _way_out(code: int) -> str:
    if code == 401:
        return f" Give its token, with --token-file or {TOKEN_VARIABLE}."
    return {404: " That is no coordinator.", 503: " It stops."}.get(code, "")


def _reason(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({reason.verify_message}); --ca names the file to know it by"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason)


# ── What it looks like ───────────────────────────────────────────────────────────


def status_view(status: RunStatus, width: int) -> RenderableType:
    """A run's status for the terminal.

    Args:
        status: The run's status.
        width: Columns of the terminal; a narrow one shows fewer columns of the table.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in _COLUMNS if width >= _WIDE or column[2]]
    table = Table(expand=width < _WIDE)
    for index, (name, _, _) in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index > 0, overflow="fold")
    for worker in status.workers:
        style = "dim" if not worker.connected else "red" if worker.state == "lost" else ""
        # As Text, because rich would read markup in a name.
        table.add_row(*(Text(value(worker)) for _, value, _ in columns), style=style)
    lines: list[RenderableType] = [Text(line) for line in _lines(status)]
    losses = [ended.loss for ended in status.rounds if ended.loss is not None][-_ROUNDS:]
    if len(losses) > 1:
        lines.append(Text(f"loss {losses[0]:.4g} {_sparks(losses)} {losses[-1]:.4g}"))
    return Group(*lines, table if status.workers else Text("No worker is here."))


def _lines(status: RunStatus) -> list[str]:
    of = f" of {status.last_round:,}" if status.last_round else ""
    here = [worker for worker in status.workers if worker.connected]
    speed = sum(worker.samples_per_second or 0.0 for worker in here)
    lines = [
        f"Round {status.round:,}{of}, {status.phase}: {status.left:,} left of {status.target}.",
        f"{len(here)} of {len(status.workers)} workers are connected"
        + (f", {speed:,.0f} samples/s" if speed else "")
        + f"; {status.samples:,} samples are in the weights.",
    ]
    if status.rounds:
        last = status.rounds[-1]
        loss = "" if last.loss is None else f", loss {last.loss:.4g}"
        lines.append(f"Round {last.round:,} took {last.seconds:.1f} s, {last.merged} of {last.live} live merged{loss}.")
    if status.slices is not None:
        slices = status.slices
        share = 100 * slices.trained / max(slices.samples, 1)
        lines.append(
            f"Epoch {slices.epoch + 1} of the data: {share:.0f} %, {slices.unfinished:,} slices to go"
            + (f", {len(slices.quarantined)} quarantined" if slices.quarantined else "")
            + (f"; {100 * slices.ahead / max(slices.samples, 1):.0f} % of the next one." if slices.ahead else ".")
        )
    moved = f"{_bytes(status.counters.get('bytes_in', 0))} in, {_bytes(status.counters.get('bytes_out', 0))} out"
    saved = "no round saved" if status.saved_round is None else f"round {status.saved_round:,} saved"
    refused = sum(count for name, count in status.counters.items() if name.startswith("refused_"))
    lines.append(f"{moved}; {saved}" + (f"; {refused} refused." if refused else "."))
    return lines


def _sparks(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(int((value - low) / span * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _rate(worker: WorkerStatus) -> str:
    speed = worker.samples_per_second
    return "–" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


_COLUMNS = (
    ("worker", lambda worker: worker.name + (" (leads)" if worker.leads else ""), True),
    ("state", lambda worker: worker.state if worker.connected else f"{worker.state}, away", True),
    ("samples/s", _rate, True),
    ("steps", lambda worker: f"{worker.steps:,}", True),
    ("samples", lambda worker: f"{worker.samples:,}", False),
    ("heard", lambda worker: f"{worker.heard_ago:.1f} s ago", False),
    ("merged", lambda worker: f"{worker.merged:,}", True),
    ("late", lambda worker: f"{worker.late:,}", False),
    ("slices", lambda worker: f"{worker.slices:,}", False),
    ("in", lambda worker: _bytes(worker.bytes_in), False),
    ("out", lambda worker: _bytes(worker.bytes_out), False),
)
"""Heading, value, and whether a narrow terminal shows it."""
