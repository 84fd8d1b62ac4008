"""A server of downloads that misbehaves."""

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator

ANSWERS: dict[str, bytes] = {
    "404": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "500": b"HTTP/1.1 500 Error\r\nContent-Length: 5\r\n\r\nerror",
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 9999999\r\nContent-Length: 0\r\n\r\n",
    "itself": b"HTTP/1.1 302 Found\r\nLocation: itself\r\nContent-Length: 0\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "short": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nshort",
    "wrong": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong",
    "longest": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 18 + b"\r\n\r\n" + bytes(1 << 20),
    "endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 24),
    "packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nwrong",
    "garbage": b"\x00\xff\x16garbage\r\n\r\n",
    "header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    "nothing": b"",
}
"""Answers of the server of downloads, by the folder in the URL."""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.split("/")[1], b"")
        with contextlib.suppress(OSError):  # the client may have heard enough
            self.wfile.write(answer)
            self.wfile.flush()
        self.close_connection = True
        time.sleep(0.01)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def mirror() -> Iterator[str]:
    """The URL of a server that answers wrongly."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
