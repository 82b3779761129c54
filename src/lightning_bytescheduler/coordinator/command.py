"""The body of ``lightning-bytescheduler coordinator``."""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_bytescheduler.checks import importing, named
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES
from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.diloco.coordinator_client import TOKEN_VARIABLE
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions, run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.diloco.round_record import RECORD_NAME, RoundFile
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.serving import ServerAccess, parse_bind, read_token
from lightning_bytescheduler.slices.urls import local_path

if TYPE_CHECKING:
    from lightning_bytescheduler.coordinator.service import CoordinatorServer


log = logging.getLogger(__name__)

_BIND = "127.0.0.1:7077"
_NAMES = {"certificate": "--tls", "key": "--tls", "host": "--bind", "grace": "--grace-s"}
_NAMES |= {"lease": "--lease-s", "token": "--token-file"}
_LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--bind", default=_BIND, metavar="HOST:PORT", help="where to listen (default: %(default)s)")
    parser.add_argument("--state", metavar="URL", help="folder or URL in which the run is kept over restarts")
    parser.add_argument("--train", nargs="+", metavar="URL", help="slices of training data, handed out to the workers")
    rounds = parser.add_argument_group("rounds, the same for all workers")
    rounds.add_argument("--samples-per-round", type=int, metavar="N", help="samples of all workers that end a round")
    rounds.add_argument("--inner-steps", type=int, metavar="N", help="or steps of the fastest worker (default: 100)")
    rounds.add_argument("--equal-steps", action="store_true", help="every worker takes --inner-steps steps")
    rounds.add_argument("--outer-steps", type=int, metavar="N", help="rounds after which the training is over")
    rounds.add_argument("--outer-lr", type=float, metavar="X", help="outer learning rate (default: 0.7)")
    rounds.add_argument("--outer-momentum", type=float, metavar="X", help="Nesterov momentum (default: 0.9)")
    rounds.add_argument("--fragments", type=int, metavar="N", help="parts of the model that take turns (default: 1)")
    rounds.add_argument("--overlap-steps", type=int, metavar="N", help="steps from an update to its mean (default: 0)")
    rounds.add_argument("--wire-dtype", metavar="NAME", help=f"{', '.join(WIRE_DTYPES)} or sparse:0.01 (default: fp32)")
    waiting = parser.add_argument_group("who is waited for")
    defaults = RoundOptions()
    waiting.add_argument("--start-workers", type=int, metavar="N", help="workers to wait for at first (default: 1)")
    waiting.add_argument("--quorum", type=float, metavar="X", help="share of updates a merge needs (default: 0.5)")
    waiting.add_argument(
        "--grace-s",
        dest="grace",
        type=float,
        metavar="S",
        help=f"seconds that a round waits beyond its forecast (default: {defaults.grace:g})",
    )
    waiting.add_argument("--silent-after", type=float, metavar="S", help="seconds to await a silent one (default: 10)")
    waiting.add_argument(
        "--lease-s", type=float, default=60.0, metavar="S", help="seconds until a silent one is given up (default: 60)"
    )
    access = parser.add_argument_group("who gets in; a --bind beyond this machine needs a token, CERT and KEY")
    access.add_argument("--token-file", metavar="FILE", help=f"file with the token; or {TOKEN_VARIABLE} has it")
    access.add_argument(
        "--tls",
        nargs="+",
        default=(),
        metavar="FILE",
        help="CERT KEY: the certificate chain, and its private key",
    )
    keeping = parser.add_argument_group("what is kept")
    keeping.add_argument(
        "--stay", action="store_true", help="serve the weights after --outer-steps too, when all workers have left"
    )


def run(options: argparse.Namespace) -> int:
    """Run the coordinator with the parsed arguments until it is stopped; return the exit code."""
    with named(**_NAMES):
        run_and_rounds = _options(options)
        host, port = parse_bind("--bind", options.bind)
        token = read_token(options.token_file, variable=TOKEN_VARIABLE)
        if len(options.tls) not in (0, 2):
            raise OptionError("tls", " ".join(options.tls), "CERT KEY")
        files = dict(zip(("certificate", "key"), options.tls, strict=False))
        access = ServerAccess(host=host, token=token, **files)
    _log_to_stderr()
    with importing("coordinator", extra="coordinator"):
        for package in ("aiohttp", "filelock", "prometheus_client", "safetensors", "uvloop", "xxhash"):
            importlib.import_module(package)
        import torch
    torch.set_num_threads(1)  # the coordinator works on a model's pieces in its own threads
    with named(**_NAMES):
        server = _server(options, run_and_rounds, access, port)
    with server:
        _announce(server, options, access)
        over = _wait(server, stays=options.stay)
    return _say_end(server, over=over)


def _options(options: argparse.Namespace) -> CoordinatorOptions:
    names = ("start_workers", "quorum", "grace", "silent_after")
    waiting = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return CoordinatorOptions(
        run=run_options(**{name: getattr(options, name) for name in RunOptions.__struct_fields__}),
        rounds=RoundOptions(**waiting),
        lease=options.lease_s,
    )


def _server(
    options: argparse.Namespace, run_and_rounds: CoordinatorOptions, access: ServerAccess, port: int
) -> CoordinatorServer:
    from lightning_bytescheduler.coordinator.service import CoordinatorServer
    from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
    from lightning_bytescheduler.coordinator.state_store import StateStore

    slices = store = rounds_file = None
    if options.train is not None:
        slices = SliceRoutes(options.train)
    if options.state is not None:
        store = StateStore(options.state)
        if (folder := local_path(options.state)) is not None:
            rounds_file = RoundFile(Path(folder) / RECORD_NAME, append=True, option="--state")
    return CoordinatorServer(
        run_and_rounds, access=access, port=port, store=store, slices=slices, rounds_file=rounds_file
    )


def _announce(server: CoordinatorServer, options: argparse.Namespace, access: ServerAccess) -> None:
    token = f"; or {{'url': ..., 'token_file': FILE}}, or {TOKEN_VARIABLE}, for the token" if access.token else ""
    print(
        f'The coordinator listens at {server.url}. A worker joins with DiLoCoStrategy(coordinator="{server.url}")'
        f"{token}. End it with Ctrl+C.",
        flush=True,
    )
    if options.state is None:
        log.warning("Without --state, a run that is stopped cannot go on: its weights are only in memory.")


def _wait(server: CoordinatorServer, *, stays: bool) -> bool:
    """Serve until the run is over or stopped; return whether it is over and all workers have left."""
    from lightning_bytescheduler.coordinator.service import collected_rarely

    stop = threading.Event()
    former: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            former[number] = signal.signal(number, lambda *_: stop.set())
    try:
        with collected_rarely():
            while not stop.wait(_LOOK_S):
                if not server.wait(0):
                    break
                if not stays and server.over:
                    return True
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if server.error is not None:
        raise server.error
    return False


def _say_end(server: CoordinatorServer, *, over: bool) -> int:
    """Say whether the run can go on, once the state is saved; return the exit code."""
    store = server.store
    ends = "All workers have left, and the coordinator ends." if over else "The coordinator stops."
    if store is None:
        log.info("%s Without --state, the run cannot go on.", ends)
    elif store.failure is not None:
        kept = (
            "nothing of the run is" if store.saved_round is None else f"only the run up to round {store.saved_round} is"
        )
        log.error("%s Its last state is not in %s, and %s: %s", ends, store.url, kept, store.failure)
        return 1
    else:
        goes_on = "With more --outer-steps the run goes on." if over else "The run can go on from its last round."
        log.info("%s %s", ends, goes_on)
    return 0


def _log_to_stderr() -> None:
    """Log events to stderr, one line each, unless logging has been set up already."""
    logger = logging.getLogger("lightning_bytescheduler")
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
