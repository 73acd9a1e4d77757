import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from samebits.data.fetch import fetch
from samebits.errors import DataError

CONTENT = b"the right file" * 100_000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/missing":
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.path == "/right":
            self.wfile.write(CONTENT)
        elif self.path == "/other":
            self.wfile.write(b"x" * len(CONTENT))
        else:  # cut off
            self.wfile.write(CONTENT[:1000])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _fetch(path: Path, *urls: str) -> None:
    fetch(urls, path, MD5, otherwise="get it yourself", timeout_s=5)


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_a_file_is_fetched_once(tmp_path: Path, server: Server) -> None:
    for _ in range(2):
        _fetch(tmp_path / "new" / "file", server.url("right"))
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert server.asked == ["/right"]


def test_the_next_address_is_tried_after_a_missing_a_wrong_and_a_cut_off_file(tmp_path: Path, server: Server) -> None:
    _fetch(tmp_path / "file", *map(server.url, ("missing", "other", "short", "right")))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert _files(tmp_path) == ["file"]


def test_every_fault_is_reported_and_nothing_is_left(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError) as caught:
        _fetch(tmp_path / "file", *map(server.url, ("missing", "other", "short")), "http://127.0.0.1:1/refused")
    text = str(caught.value)
    assert "404" in text
    assert f"expected {MD5}" in text
    assert "Connection refused" in text
    assert "get it yourself" in text
    assert _files(tmp_path) == []


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path, server: Server) -> None:
    (tmp_path / "in the way").write_text("")
    with pytest.raises(DataError, match="in the way/file can't be written"):
        _fetch(tmp_path / "in the way" / "file", server.url("right"))


def test_of_several_processes_one_fetches(tmp_path: Path, server: Server) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=_fetch, args=(tmp_path / "file", server.url("right")))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert server.asked == ["/right"]
