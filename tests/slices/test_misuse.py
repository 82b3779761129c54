"""Errors of misuse come at once, and name the option, its value, what is allowed, and the way out."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed as dist

from lightning_bytescheduler import (
    BadSampleError,
    OptionError,
    SliceDataModule,
    SliceIndexError,
    SourceUnavailableError,
    UnsupportedError,
)
from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.slices import data_module, urls
from lightning_bytescheduler.slices import slice as slice_module
from lightning_bytescheduler.slices.fetch import Waiting, ask, refusal_of
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.serve import SliceServer
from lightning_bytescheduler.slices.source import open_source
from tests.slices.fits import Evaluates, Remembers, fit, make_rows, trainer_for

SECRET = "hf_secret"


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\nthree\n")
    return str(tmp_path / "texts")


class Answers(BaseHTTPRequestHandler):
    """Answers with the status that the path begins with."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    Answers.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


# -------------------------------------------------------------------- packages


@pytest.mark.parametrize("package", ["xxhash", "tenacity", "platformdirs"])
def test_a_missing_package_is_named_with_the_extra(text: str, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    slice_module.xxhash.cache_clear()
    words = rf" needs {package}, which is not installed: pip install 'lightning-bytescheduler\[data\]'"
    with pytest.raises(ImportError, match=words):
        SliceDataModule(text).setup("fit")


@pytest.mark.parametrize(
    ("package", "url", "install"),
    [
        ("s3fs", "s3://bucket/a.txt", r"'lightning-bytescheduler\[s3\]'"),
        ("aiohttp", "https://host/a.txt", r"'lightning-bytescheduler\[data\]'"),
        ("gcsfs", "gs://bucket/a.txt", "gcsfs"),
        ("huggingface_hub", "hf://datasets/a/b.txt", "huggingface_hub"),
    ],
)
def test_a_protocol_names_its_package(monkeypatch: pytest.MonkeyPatch, package: str, url: str, install: str) -> None:
    protocol = url.partition("://")[0]
    missing = ModuleNotFoundError(f"No module named {package!r}", name=package)

    def get(protocol: str) -> None:
        raise ImportError("Install something") from missing  # as fsspec does it

    monkeypatch.setattr(urls, "get_filesystem_class", get)
    with pytest.raises(
        ImportError, match=rf"{protocol}:// needs {package}, which is not installed: pip install {install}"
    ):
        SliceDataModule(url)


@pytest.mark.parametrize(
    ("package", "name", "install"),
    [("pyarrow", "a.parquet", "pyarrow")],
)
def test_a_format_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, install: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}, which is not installed: pip install {install}"):
        SliceDataModule(str(tmp_path / name)).setup("fit")


def test_serving_names_the_extra(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "lightning_bytescheduler.slices.serve")
    assert main(["slices", "serve", text]) == 2
    assert "slices serve needs aiohttp" in capsys.readouterr().err
    monkeypatch.undo()
    importlib.import_module("lightning_bytescheduler.slices.serve")


# --------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("data", {"token": SECRET}, r"storage_options=\['token'\].*of file, which does not take"),
        ("https://host/x", {"s3": {"key": SECRET}}, r"storage_options=\['s3'\]"),
        ("https://host/x", SECRET, r"a dict of options by name"),
    ],
)
def test_storage_options_that_no_file_system_takes_are_refused_and_not_shown(
    url: str, options: Any, reason: str
) -> None:
    with pytest.raises(OptionError, match=reason) as caught:
        SliceDataModule(url, storage_options=options)
    assert SECRET not in str(caught.value)


def test_storage_options_go_to_those_that_take_them(text: str, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer t"}
    with SliceServer(text, token="t") as server:
        for options in ({"headers": headers}, {"http": {"headers": headers}}):
            data = SliceDataModule(text, val=server.url, storage_options=options, cache=str(tmp_path / "cache"))
            data.setup("fit")
            assert sum(len(batch) for loader in data.val_dataloader() for batch in loader) == 3
            data.teardown("fit")


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("train", "htp://host/x", "a path, or a URL such as"),
        ("train", "simplecash::https://host/x", "a path, or a URL such as"),
        ("train", ["data", "data"], "'data' is there twice"),
        ("reader", "json", r"called as reader\(stream\)"),
        ("transform", 3, r"transform\(sample\)"),
        ("collate", "stack", r"collate\(samples\)"),
        ("cache", {"bytes": "10GB"}, r"a whole number of bytes"),
        ("cache", {"bytes": 0}, r"a whole number of bytes"),
        ("cache", 3, r"the path of a folder"),
        ("timeout", "1m", "seconds"),
        ("timeout", 0, "seconds"),
        ("timeout", float("inf"), "seconds"),
    ],
)
def test_each_option_says_what_is_allowed(option: str, value: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=rf"{option}=.*{reason}"):
        SliceDataModule(**{"train": "data", option: value})


@pytest.mark.parametrize("size", [0, "auto", [1, 0]])
def test_a_batch_size_that_is_set_later_is_checked_too(text: str, size: Any) -> None:
    data = SliceDataModule(text)
    data.batch_size = size
    with pytest.raises(OptionError, match="batch_size="):
        fit(data)


def test_paths_may_be_paths(text: str) -> None:
    data = SliceDataModule(Path(text))
    data.setup("fit")
    assert len(list(data.train_dataloader())) == 3
    data.teardown("fit")


def test_binding_comes_before_setup(text: str) -> None:
    data = SliceDataModule(text)
    data.setup("fit")
    with pytest.raises(OptionError, match=r"bound before setup\(\), as in Strategy.setup_environment"):
        data.bind_tracker(None)
    data.teardown("fit")
    data.bind_tracker(None)


def test_a_slice_that_is_too_large_to_be_shuffled_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_MOST_HELD", 4)
    with pytest.raises(OptionError, match=r"shuffle='samples' is not allowed.*at most 0 GiB.*a\.txt' is larger"):
        SliceDataModule(text, shuffle="samples").setup("fit")
    SliceDataModule(text).setup("fit")


@pytest.mark.parametrize("stage", [None, "train"])
def test_stages(text: str, stage: Any) -> None:
    with pytest.raises(OptionError, match=r"stage=.*'fit', 'validate', 'test', 'predict'"):
        SliceDataModule(text).setup(stage)


def test_what_is_not_given_is_named_with_what_wants_it(text: str) -> None:
    with pytest.raises(OptionError, match=r"test=None is not allowed: test must be given, for trainer.test\(\)"):
        trainer_for().test(Evaluates(), SliceDataModule(text))
    with pytest.raises(OptionError, match=r"'val' is not set up: .*trainer\.fit\(.*, or call setup\('fit'\) first"):
        SliceDataModule(val=text).val_dataloader()


# --------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nothing/here", "there is no {0}/nothing/here, only the folder {0}"),
        ("empty", "the folder {0}/empty has no files"),
        ("*.nothing", "no file fits it"),
        ("mixed", r"README.md' is not allowed: train must be a file in .txt.*such as folder/\*.jsonl"),
        ("a.csv", "a.csv' is not allowed: train must be a file in .txt"),
    ],
)
def test_files_that_are_not_there_or_cannot_be_read(tmp_path: Path, place: str, reason: str) -> None:
    for folder in ("empty", "mixed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text("1\n")
    (tmp_path / "mixed" / "README.md").touch()
    (tmp_path / "a.csv").touch()
    with pytest.raises(OptionError, match=reason.format(tmp_path)):
        SliceDataModule(f"{tmp_path}/{place}").setup("fit")


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b"a,b,c\n1,2,3\n"), ("a.txt", "é\n".encode("latin-1"))])
def test_another_format_than_the_name_says(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    make_slices(str(tmp_path / name), str(tmp_path / "out"))
    for place in (name, "out"):
        data = SliceDataModule(f"{tmp_path}/{place}")
        data.setup("fit")
        with pytest.raises(BadSampleError, match=r"Sample \d of slice .* cannot be made \(rank 0\): \w+DecodeError"):
            list(data.train_dataloader())
        data.teardown("fit")


def test_the_status_that_botocore_keeps_is_known() -> None:
    error: Any = OSError("An error occurred (ExpiredToken)")
    error.response = {"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    assert refusal_of(error, "s3://bucket/folder") is not None


@pytest.mark.parametrize("path", ["a.txt", "", "*.txt"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_source_that_refuses_is_not_asked_again(web: str, status: int, path: str) -> None:
    data = SliceDataModule(f"{web}/{status}/{path}")
    with pytest.raises(SourceUnavailableError, match=rf"{web}/{status}.*'Authorization': 'Bearer TOKEN'"):
        data.setup("fit")
    assert Answers.asked <= 4  # fsspec asks in more than one way


def test_a_token_that_was_replaced_ends_the_training_at_once(text: str, tmp_path: Path) -> None:
    options = {"headers": {"Authorization": "Bearer t"}}
    with SliceServer(text, token="t") as server:
        data = SliceDataModule(server.url, storage_options=options, cache=str(tmp_path / "cache"))
        data.setup("fit")
        object.__setattr__(server._access, "token", "another")  # its options are frozen
        with pytest.raises(SourceUnavailableError, match=r"401 Unauthorized. Send the header"):
            list(data.train_dataloader())
        data.teardown("fit")


def test_what_is_missing_on_the_web_is_named(web: str) -> None:
    with pytest.raises(OptionError, match=rf"train='{web}/404/a.txt'.*nothing"):
        SliceDataModule(f"{web}/404/a.txt").setup("fit")


def test_other_answers_that_do_not_change(web: str) -> None:
    with pytest.raises(SourceUnavailableError, match=r"400 Bad Request. Check the URL and storage_options"):
        SliceDataModule(f"{web}/400/a.txt").setup("fit")
    with pytest.raises(SourceUnavailableError, match="should begin with http:// rather than https://"):
        SliceDataModule(f"{web.replace('http', 'https')}/200/a.txt").setup("fit")


def test_files_that_one_may_not_read() -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    for url, way_out in (("/a.txt", "Change the rights of the file"), ("s3://a", "Give its credentials")):
        with pytest.raises(SourceUnavailableError, match=f"Permission denied. {way_out}"):
            ask(url, refuse, timeout=60.0, waiting=Waiting())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Two certificates, and the key of one with a password."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost "
    command += "-addext subjectAltName=IP:127.0.0.1 "
    try:
        for rest in (
            "-nodes -keyout key.pem -out cert.pem",
            "-nodes -keyout other.pem -out other-cert.pem",
            "-passout pass:secret -keyout locked.pem -out locked-cert.pem",
        ):
            subprocess.run([*command.split(), *rest.split()], cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed, which makes the certificates")
    (tmp_path / "garbage.pem").write_text("garbage")
    return tmp_path


def test_a_certificate_that_is_not_trusted(text: str, keys: Path) -> None:
    with SliceServer(text, certificate=str(keys / "cert.pem"), key=str(keys / "key.pem")) as server:
        data = SliceDataModule(f"{server.url}a.txt")
        with pytest.raises(SourceUnavailableError, match=r"certificate is not trusted here.*SSL_CERT_FILE"):
            data.setup("fit")


@pytest.mark.parametrize(
    ("certificate", "key", "reason"),
    [
        ("none.pem", "key.pem", r"certificate='.*none.pem'.*No such file"),
        ("cert.pem", "none.pem", r"key='.*none.pem'.*No such file"),
        ("garbage.pem", "garbage.pem", r"certificate='.*garbage.pem'.*in PEM format"),
        ("cert.pem", "other.pem", r"certificate='.*cert.pem'.*whose private key is '.*other.pem'"),
        ("locked-cert.pem", "locked.pem", r"key='.*locked.pem'.*without a password"),
    ],
)
def test_files_of_tls_are_named(text: str, keys: Path, certificate: str, key: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        SliceServer(text, certificate=str(keys / certificate), key=str(keys / key))


def test_a_cache_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_slices(make_rows(tmp_path, [4]), "memory://cannot-be", overwrite=True)
    for folder in ("file", "file/folder"):
        data = SliceDataModule("memory://cannot-be", cache=str(tmp_path / folder))
        with pytest.raises(OptionError, match=r"cache=.*can be made and written, but"):
            data.setup("fit")


def test_slices_without_their_index_are_not_taken_for_all_of_them(text: str, tmp_path: Path) -> None:
    make_slices(f"{text}/a.txt", str(tmp_path / "out"), slice_bytes=4)
    (tmp_path / "out" / "slices.index").unlink()
    with pytest.raises(SliceIndexError, match=r"holds slices and no slices.index"):
        SliceDataModule(str(tmp_path / "out")).setup("fit")
    assert len(open_source(f"{tmp_path}/out/slice-*").slices) == 3


# --------------------------------------------------------------------- batches


def nothing(samples: list[Any]) -> None:
    return None


def plus(sample: str) -> list[int]:
    return [1] * len(sample)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collation_without_a_batch(text: str, workers: int) -> None:
    data = SliceDataModule(text, batch_size=2, collate=nothing, num_workers=workers)
    with pytest.raises(OptionError, match=r"collate=None .*returns a batch; the one given returned None"):
        fit(data)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("workers", "raised"), [(0, OptionError), (1, RuntimeError)])
def test_samples_that_do_not_fit_together(text: str, workers: int, raised: type[Exception]) -> None:
    data = SliceDataModule(text, batch_size=3, transform=plus, num_workers=workers)
    with pytest.raises(
        raised, match=r"collate must be a function that makes a batch of these samples.*of the types list"
    ):
        fit(data)


def read_nothing(stream: Any) -> None:
    return None


def test_a_reader_that_yields_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("a")
    with pytest.raises(TypeError, match=r"reader=.*has to yield samples, and returned None"):
        SliceDataModule(f"{tmp_path}/a.bin", reader=read_nothing).setup("fit")


def test_a_loader_without_its_data_module(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SliceDataModule(make_rows(tmp_path, [4]))
    data.setup("fit")
    trainer = trainer_for()
    trainer.fit(Remembers(), data.train_dataloader())
    with pytest.warns(UserWarning, match=r"no position.*trainer.fit\(model, datamodule=data\)"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"does not know its rank.*datamodule=data"):
        next(iter(data.train_dataloader()))
    data.teardown("fit")


# --------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["verify", "{folder}/texts"], "DST='.*texts'.*without one there are no checksums and counts"),
        (["verify", "{folder}/texts/a.txt"], "DST='.*a.txt'.*'lightning-bytescheduler slices make' writes one"),
        (["make", "{folder}/a.csv", "{folder}/out"], "SRC='.*a.csv' is not allowed: SRC must be a file in .txt"),
        (["make", "{folder}/texts/*", "{folder}/a.csv"], "DST='.*a.csv'.*a folder, and is a file: the last argument"),
        (["make", "{folder}/texts/*", "{folder}/a.csv/out"], "DST='.*out'.*can be made and written"),
        (["make", "{folder}/texts/*", "{folder}/texts"], "DST='.*texts'.*another folder than that of the files"),
        (
            ["make", "{folder}/texts", "{folder}/out", "--storage-options", '{{"token": "x"}}'],
            r"--storage-options=\['to",
        ),
        (["serve", "{folder}/none"], "DIR='.*none'.*there is no folder .*none"),
        (["serve", "{folder}", "--cert", "{folder}/none", "--key", "{folder}/none"], "--cert='.*none'.*No such file"),
        (["serve", "{folder}", "--key", "{folder}/none"], "--cert=None .*TLS needs a certificate and its key"),
        (["serve", "{folder}", "--token-file", "{folder}/none"], "--token-file='.*none'.*No such file"),
        (["serve", "{folder}", "--token-file", "{folder}/a.csv"], "--token-file='.*a.csv'.*is empty"),
        (["serve", "{folder}", "--bind", "0.0.0.0:0"], "--bind='0.0.0.0'"),
    ],
)
def test_commands(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str) -> None:
    (tmp_path / "a.csv").touch()
    assert main(["slices", *(argument.format(folder=tmp_path) for argument in argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line


def test_a_slice_that_is_missing_is_named_at_once(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_slices(f"{text}/a.txt", str(tmp_path / "out"), slice_bytes=4)
    shutil.move(tmp_path / "out" / "slice-000001.txt", tmp_path)
    assert main(["slices", "verify", str(tmp_path / "out")]) == 1
    assert "slice-000001.txt: its file is missing." in capsys.readouterr().out


def test_a_folder_in_a_slices_place_is_a_missing_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_slices(f"{text}/a.txt", str(tmp_path / "out"), slice_bytes=4)
    (tmp_path / "out" / "slice-000001.txt").unlink()
    (tmp_path / "out" / "slice-000001.txt").mkdir()
    assert main(["slices", "verify", str(tmp_path / "out")]) == 1
    assert "slice-000001.txt: its file is missing." in capsys.readouterr().out


def test_a_folder_in_an_indexes_place_is_no_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "out" / "slices.index").mkdir(parents=True)
    with pytest.raises(OSError, match=r"slices\.index"):
        make_slices(f"{text}/a.txt", str(tmp_path / "out"))


def test_a_slice_that_is_not_written_whole_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an object store that ends an upload early, and says nothing."""
    memory = type(fsspec.filesystem("memory"))

    def write_half(self: Any, path: str, mode: str, write: Any = memory.open) -> Any:
        file = write(self, path, mode)
        whole = file.write
        file.write = lambda content: whole(content[:3])
        return file

    monkeypatch.setattr(memory, "open", write_half)
    with pytest.raises(OSError, match=r"memory://cut-short/slice-000000\.txt has 3 bytes after 14 were written there"):
        make_slices(f"{text}/a.txt", "memory://cut-short", overwrite=True)


def test_a_misspelt_option_is_answered_with_the_right_one(text: str) -> None:
    misspelt: Any = {"batchsize": 4}
    with pytest.raises(OptionError, match=r"has no option 'batchsize'\. Did you mean 'batch_size'"):
        SliceDataModule(text, **misspelt)
    with pytest.raises(OptionError, match="SliceDataModule takes its options by name"):
        SliceDataModule(text, 4)  # type: ignore[misc]


def test_a_port_in_use_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with SliceServer(text) as server:
        address = server.url.removeprefix("http://").rstrip("/")
        assert main(["slices", "serve", text, "--bind", address]) == 2
        assert f"{address} cannot be listened at: it is in use by another program" in capsys.readouterr().err
