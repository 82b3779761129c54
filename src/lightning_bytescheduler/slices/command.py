"""The command ``lightning-bytescheduler slices``: make, verify and serve."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any

import msgspec
from tqdm import tqdm

from lightning_bytescheduler.checks import importing, named
from lightning_bytescheduler.exceptions import SliceCorruptError
from lightning_bytescheduler.serving import parse_bind, read_token
from lightning_bytescheduler.slices.fetch import LASTING, MISSING, fetch_chunks
from lightning_bytescheduler.slices.make import SLICE_BYTES, make_slices
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.urls import require_storage_options

TOKEN_VARIABLE = "BYTESCHEDULER_SLICES_TOKEN"
"""Environment variable with the token of ``slices serve``; all users of the machine can see arguments."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)

_bar = partial(tqdm, unit="B", unit_scale=True, disable=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; ``run`` of the parsed ones does the work and returns the exit code."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="cut files into slices with an index",
        description="Cut .txt, .jsonl, .npy and .parquet files (also .gz) into slices, with an index of "
        "counts and checksums.",
    )
    make.add_argument("sources", nargs="+", metavar="SRC", help="files, folders or globs; any URL that fsspec opens")
    make.add_argument("folder", metavar="DST", help="folder of the slices; any URL that fsspec can write")
    make.add_argument("--slice-size", type=_bytes, default=SLICE_BYTES, metavar="SIZE", help="such as 64MiB (default)")
    make.add_argument("--overwrite", action="store_true", help="replace the slices of a folder that has some")
    make.set_defaults(run=_make)
    verify = actions.add_parser(
        "verify",
        help="check every checksum and count",
        description="Check every checksum and count. Exit code 1 if a slice is not what it should be.",
    )
    verify.add_argument("source", metavar="DST", help="a folder of slices, or its slices.index")
    verify.set_defaults(run=_verify)
    serve = actions.add_parser(
        "serve",
        help="serve a folder over HTTP",
        description="Serve a folder over HTTP, read-only, until interrupted. Beyond this machine that takes TLS and a "
        f"token, which is read from the environment variable {TOKEN_VARIABLE} or from --token-file.",
    )
    serve.add_argument("folder", metavar="DIR", help="the folder, with all folders in it")
    serve.add_argument("--bind", default="127.0.0.1:8000", metavar="HOST:PORT", help="(default: %(default)s)")
    serve.add_argument("--cert", metavar="FILE", help="certificate chain for TLS")
    serve.add_argument("--key", metavar="FILE", help="its private key")
    serve.add_argument("--token-file", metavar="FILE", help="file with the token that readers must send")
    serve.set_defaults(run=_serve)
    for action in (make, verify):
        action.add_argument(
            "--storage-options", type=_options, default={}, metavar="JSON", help="keys and tokens of the file systems"
        )


def _make(options: argparse.Namespace) -> int:
    with named(urls="SRC", folder="DST", slice_bytes="--slice-size"), _bar(desc="cutting") as bar:
        made = make_slices(
            options.sources,
            options.folder,
            slice_bytes=options.slice_size,
            overwrite=options.overwrite,
            storage_options=options.storage_options,
            bar=bar,
        )
    samples, size = sum(slice_.samples for slice_ in made), sum(slice_.size for slice_ in made)
    print(f"{options.folder}: {len(made)} slices, {samples} samples, {size / 1e6:.1f} MB")
    return 0


def _verify(options: argparse.Namespace) -> int:
    with named():
        known = require_storage_options((options.source,), options.storage_options)
        source = open_source(options.source, option="DST", storage_options=known, needs_index=True)
    with _bar(desc="verifying", total=sum(slice_.size for slice_ in source.slices)) as bar:
        bad = verify_slices(source, bar)
    for slice_, reason in bad:
        print(f"{slice_.key}: {reason}")
    print(f"{options.source}: {len(source.slices) - len(bad)} slices are right, {len(bad)} are not")
    return 1 if bad else 0


def _serve(options: argparse.Namespace) -> int:
    with importing("slices serve", extra="data"):
        from lightning_bytescheduler.slices.serve import SliceServer
    token = read_token(options.token_file, variable=TOKEN_VARIABLE)
    host, port = parse_bind("--bind", options.bind)
    with named(folder="DIR", host="--bind", certificate="--cert", token=TOKEN_VARIABLE):
        server = SliceServer(
            options.folder, host=host, port=port, token=token, certificate=options.cert, key=options.key
        )
    with server:
        print(f"{options.folder} is served at {server.url}; end it with Ctrl+C", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print()
    return 0


def verify_slices(source: SliceSource, bar: tqdm[Any]) -> list[tuple[Slice, str]]:
    """Read every slice from its source, compare its checksums and count its samples.

    Returns:
        The slices with errors, each with what is wrong.

    Raises:
        SourceUnavailableError: If the source is unavailable.
        ImportError: If a library is missing that a format needs.
    """
    bad = []
    for slice_ in source.slices:
        try:
            # A missing file is not waited for, as in a training, where its folder may be mounted later.
            chunks = fetch_chunks(slice_, partial(source.read, slice_), lasting=(*LASTING, *MISSING))
            for _ in source.open(slice_, lambda: chunks).take(0, slice_.samples):  # noqa: B023  # called at once
                pass
            for _ in chunks:
                pass  # a reader may stop before the end
        except SliceCorruptError as error:
            bad.append((slice_, error.reason))
        except MISSING:
            bad.append((slice_, "its file is missing."))
        bar.update(slice_.size)
    return bad


def _bytes(text: str) -> int:
    matched = _SIZE.fullmatch(text.strip())
    size = 0
    if matched:
        number, prefix, binary = matched.groups()
        power = " kmgt".index(prefix.lower() or " ")
        size = int(float(number) * (1024 if binary else 1000) ** power)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500kB, 64MiB or 1GB")
    return size


def _options(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as '{{\"anon\": true}}'") from error
