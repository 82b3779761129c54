"""A fit over S3, from the server of moto; see tests/slices/test_s3.py for how to run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.make import make_slices
from tests.slices.fits import SaveEveryStep, fit, make_rows

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

# Warnings of botocore, flask and the like are not this package's.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def storage_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}", "skip_instance_cache": True}
    server.stop()


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_and_a_resumed_one(tmp_path: Path, storage_options: dict[str, Any], workers: int) -> None:
    import s3fs

    s3fs.S3FileSystem(**storage_options).mkdir(f"fit-{workers}")
    rows = make_rows(tmp_path / "rows", [30, 40, 30])
    make_slices(rows, f"s3://fit-{workers}/slices", storage_options=storage_options)

    def data(cache: str) -> SliceDataModule:
        return SliceDataModule(
            f"s3://fit-{workers}/slices",
            batch_size=10,
            num_workers=workers,
            cache=str(tmp_path / cache),
            storage_options=storage_options,
        )

    save = SaveEveryStep(str(tmp_path))
    whole = fit(data("one"), callbacks=[save], max_epochs=2)
    assert Counter(number for batch in whole.batches for number in batch) == Counter(dict.fromkeys(range(100), 2))
    assert fit(data("two"), resume=save.saved[4], max_epochs=2).batches == whole.batches[5:]
