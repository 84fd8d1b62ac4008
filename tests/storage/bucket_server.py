"""A server with the part of Google Cloud Storage's JSON interface that TensorStore uses, in memory,
and with faults.

It keeps the conditions on generations and the order of names, which emulators leave out. All
requests for a bucket such as bucket-503 or bucket-torn have this fault.
"""

import contextlib
import http.server
import itertools
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator

import pytest

PAGE = 50
"""The largest number of names in an answer."""


class Server(http.server.ThreadingHTTPServer):
    """Objects by (bucket, name), each (content, generation).

    Attributes:
      fault: what happens to requests: "" nothing, a status such as "503", "torn", "applied" (torn
        before the answer) or "slow".
      every: the fault happens to every request whose number is a multiple of this.
    """

    daemon_threads = True
    # Of connections that wait: one that is refused is tried again after a second.
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.generations = itertools.count(1)
        self.requests = itertools.count(1)
        self.fault, self.every = "", 1
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def names(self, bucket: str = "bucket") -> list[str]:
        return sorted(name for owner, name in self.objects if owner == bucket)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet
    server: Server
    _lost = False

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, status: int, content: bytes = b"", generation: int | None = None) -> None:
        if self._lost:
            self._lost, self.close_connection = False, True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if generation is not None:
            self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(content)

    def _handle(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.log.append(f"{self.command} {self.path}")
        if server.fault and next(server.requests) % server.every == 0:
            if server.fault == "torn":
                self.close_connection = True
                return
            if server.fault == "slow":
                time.sleep(1)
            elif server.fault == "applied":
                self._lost = True
            else:
                self._answer(int(server.fault), b'{"error": {"message": "as the test wants"}}')
                return
        parts = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(parts.query))
        path = parts.path.split("/")
        bucket = path[path.index("b") + 1]
        name = asked.get("name") or urllib.parse.unquote("/".join(path[path.index("o") + 1 :]))
        fault = bucket.partition("-")[2]
        if fault == "torn":
            self.close_connection = True
            return
        if fault.isdecimal():
            self._answer(int(fault), b'{"error": {"message": "as the name of the bucket wants"}}')
            return
        if not bucket.startswith("bucket"):
            self._answer(404, b'{"error": {"message": "The specified bucket does not exist."}}')
            return
        with server.lock:
            if not name:
                first, last = asked.get("startOffset", ""), asked.get("endOffset", "\U0010ffff")
                first = max(first, asked.get("pageToken", ""))
                names = [name for name in server.names(bucket) if first <= name < last]
                more = {"nextPageToken": names[PAGE]} if len(names) > PAGE else {}
                items = [{"name": name, "size": "1"} for name in names[:PAGE]]
                self._answer(
                    200, json.dumps({"kind": "storage#objects", "items": items, **more}).encode()
                )
                return
            content, generation = server.objects.get((bucket, name), (b"", 0))
            wanted = asked.get("ifGenerationMatch")
            if wanted is not None and int(wanted) != generation:
                self._answer(412)
            elif self.command == "POST":
                generation = next(server.generations)
                server.objects[bucket, name] = body, generation
                self._answer(
                    200, json.dumps({"name": name, "generation": str(generation)}).encode()
                )
            elif not generation:
                self._answer(404)
            elif self.command == "DELETE":
                del server.objects[bucket, name]
                self._answer(204)
            else:
                self._answer(200, content, generation)

    do_GET = do_POST = do_DELETE = _handle


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A running server, which TensorStore takes for Google's."""
    with Server() as server, pytest.MonkeyPatch.context() as patch:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield server
        server.shutdown()
        thread.join()
