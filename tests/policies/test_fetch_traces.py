"""Traces are written only if they are what they should be, and never twice."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.fetch_traces import TRACES, Trace, digest, fetch

ROWS = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Trace]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "rows.csv").write_bytes(ROWS)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Tests say nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/rows.csv"
        yield Trace("rows.csv.gz", url, hashlib.sha256(ROWS).hexdigest(), "none")
        server.shutdown()
        thread.join(10)


def test_a_trace_is_fetched_checked_and_kept(served: Trace, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    assert f"{len(ROWS)} bytes" in fetch(served, folder)
    assert gzip.decompress((folder / served.file).read_bytes()) == ROWS
    assert digest(folder / served.file) == served.sha256
    assert fetch(served, folder).endswith("already there")


def test_other_rows_than_expected_are_not_written(served: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was written"):
        fetch(replace(served, sha256="0" * 64), tmp_path / "traces")
    assert not (tmp_path / "traces").exists()


def test_an_unreachable_source_is_an_error_of_the_network(served: Trace, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        fetch(replace(served, url=served.url + "x"), tmp_path)


def test_every_trace_names_source_digest_and_licence() -> None:
    for trace in TRACES:
        assert trace.url.startswith("https://")
        assert len(trace.sha256) == 64
        assert trace.licence
