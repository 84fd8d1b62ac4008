"""A server of files on this machine, and ports on which there is none."""

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`: at most `cut` bytes of each, then it hangs up, or waits if it `holds`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.cut, self.holds = files, None, False
        self.served: list[str] = []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        body = self._answer()
        self.wfile.write(body[: self.server.cut])
        self.wfile.flush()
        self.server.served.append(self.path)
        if self.server.holds:
            self.server.released.wait()

    def _answer(self) -> bytes:
        body = self.server.files.get(self.path.removeprefix("/"))
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        return body or b""

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    with Server(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


def nowhere() -> str:
    """The URL of a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
