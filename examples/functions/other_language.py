"""A function without our framework: anything that serves two paths on the unit's Unix socket, in whatever language.

This one is Python without any package; read it as a recipe. The sidecar asks `GET /healthz` until it is answered with
200, then sends each invocation as `POST /invoke` and takes the `body` of the answer.
"""

import json
import os
import socketserver
from http.server import BaseHTTPRequestHandler

PATH = os.environ["SERVERLESS_FRAMEWORK_SOCKET_PATH"]


class Unit(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/healthz" else 404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["payload"]
        if isinstance(text, str):
            self.answer(200, {"statusCode": 200, "contentType": "application/json", "body": text.upper()})
        else:
            self.answer(200, {"statusCode": 400, "error": "the payload must be a string"})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "sidecar"


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    old = os.umask(0o117)  # The socket must have mode 0660 from its beginning.
    with Server(PATH, Unit) as server:
        os.umask(old)
        server.serve_forever()
