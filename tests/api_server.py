"""A local HTTP server that answers /v1/chat/completions as badly as a test wants."""
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One HTTP answer. body: an object (sent as JSON), a string (sent as it stands). cut: bytes after which the
    connection is reset; drip: seconds between two bytes of the body."""
    body: object
    status: int = 200
    headers: dict = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None
    drip: float = 0.0


def chat(content, *, finish="stop", prompt_tokens=9, completion_tokens=None, cost=None, **message) -> dict:
    """A chat completion body. completion_tokens None: no usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
             **({"cost": cost} if cost is not None else {})}
    return {"id": "gen-1", "object": "chat.completion", "model": "m",
            "choices": [{"index": 0, "finish_reason": finish,
                         "message": {"role": "assistant", "content": content, **message}}],
            **({"usage": usage} if completion_tokens is not None else {})}


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass


class LocalServer:
    """Serves on a free port inside its `with` block. session: a test raises it when it starts the client anew."""

    def __init__(self, handler):
        self.session, self.victim, self.answers_left, self.lock = 0, None, 0, threading.Lock()

        class Server(ThreadingHTTPServer):
            request_queue_size = 512

            def handle_error(self, request, client_address):  # a client that was killed resets its connections
                pass

        self.server = Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.die()

    def die(self):
        self.server.shutdown()
        self.server.server_close()

    def kill_at(self, answers: int, client):
        """kill -9 the client when so many answers from now on are ready: it dies before the last of them is sent."""
        self.victim, self.answers_left = client, answers

    def count_answer(self):
        with self.lock:
            self.answers_left -= 1
            if self.answers_left == 0:
                self.victim.kill()


class ApiServer(LocalServer):
    """with ApiServer(answer) as api: answer(body, nth) -> Reply, nth counting from 0 the requests with this message.

    `requests` holds (time, last message's content, body, headers) of each request in order of arrival; `asked` counts
    them by content.
    """

    def __init__(self, answer):
        self.requests, self.asked, self.dead, self.probe_status = [], Counter(), False, 404
        self.models = None  # the answer to /v1/models

        class Handler(QuietHandler):
            def do_GET(handler):  # what is probed at the start: this is no SGLang
                if self.models is None or handler.path != "/v1/models":
                    return handler.send_error(self.probe_status)
                data = json.dumps(self.models).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def do_POST(handler):
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                content = body["messages"][-1]["content"]
                if self.dead:
                    handler.close_connection = True
                    return
                with self.lock:
                    nth = self.asked[content]
                    self.asked[content] += 1
                    self.requests.append((time.monotonic(), content, body, dict(handler.headers)))
                reply = answer(body, nth)
                time.sleep(reply.delay)
                self.count_answer()
                data = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
                try:
                    handler.send_response(reply.status)
                    for name, value in {"Content-Type": "application/json", **reply.headers,
                                        "Content-Length": str(len(data))}.items():
                        handler.send_header(name, value)
                    handler.end_headers()
                    for byte in data if reply.drip else ():
                        handler.wfile.write(bytes([byte]))
                        time.sleep(reply.drip)
                    if not reply.drip:
                        handler.wfile.write(data[:reply.cut])
                    if reply.cut is not None:
                        # RST, not FIN
                        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        handler.connection.close()
                        handler.close_connection = True
                except OSError:  # the client was killed
                    handler.close_connection = True

        super().__init__(Handler)
        self.url += "/v1"

    def die(self):
        """No new connections, and no answer on old ones."""
        self.dead = True
        super().die()


class CountingProxy(LocalServer):
    """with CountingProxy(url) as proxy: passes everything on to the server at `url`, notes each /generate by its ids.

    `asked` is a list of (session, input_ids as a tuple).
    """

    def __init__(self, url: str):
        self.asked = []

        class Handler(QuietHandler):
            def do_GET(handler):
                handler.pass_on(None)

            def do_POST(handler):
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.path == "/generate":
                    with self.lock:
                        self.asked.append((self.session, tuple(json.loads(body)["input_ids"])))
                handler.pass_on(body)

            def pass_on(handler, body):
                request = urllib.request.Request(url + handler.path, body, {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=600) as response:
                        status, data = response.status, response.read()
                except urllib.error.HTTPError as error:
                    status, data = error.code, error.read()
                except OSError:  # the server died: so does this connection
                    handler.close_connection = True
                    return
                if handler.path == "/generate":
                    self.count_answer()
                try:
                    handler.send_response(status)
                    handler.send_header("Content-Type", "application/json")
                    handler.send_header("Content-Length", str(len(data)))
                    handler.end_headers()
                    handler.wfile.write(data)
                except OSError:  # the client was killed
                    handler.close_connection = True

        super().__init__(Handler)
