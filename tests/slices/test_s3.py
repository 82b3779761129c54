"""Slices over S3, from the server of moto; it is large, so it is not among what `make test` installs.

To run it: pip install 's3fs' 'moto[server]'
"""

from __future__ import annotations

import pytest
from tqdm import tqdm

from lightning_bytescheduler.slices.command import verify_slices
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.source import open_source
from tests.slices.faults import Store

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

# Warnings of botocore, flask and the like are not this package's.
pytestmark = pytest.mark.filterwarnings("default")

TEXT = [f"line {number}" for number in range(3000)]


@pytest.fixture
def storage_options(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}", "skip_instance_cache": True}
    server.stop()


def test_slices_are_made_verified_and_read(tmp_path, storage_options):
    import s3fs

    s3fs.S3FileSystem(**storage_options).mkdir("data")
    (tmp_path / "a.txt").write_text("\n".join(TEXT))
    make_slices(str(tmp_path / "a.txt"), "s3://data/slices", slice_bytes=5000, storage_options=storage_options)
    for url in ("s3://data/slices", "s3://data/slices/*.txt"):
        source = open_source(url, storage_options=storage_options)
        assert verify_slices(source, tqdm(disable=True)) == []
        with Store(source, StoreOptions(str(tmp_path / "cache"))) as store:
            store.prefetch(source.slices)
            assert [sample for slice_ in source.slices for sample in store.samples(slice_)] == TEXT
