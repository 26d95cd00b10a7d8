"""A fake weight server without vLLM: its HTTP routes and a real gloo group. It runs as a separate process.

    python weight_server.py

It prints its port. Faults are posted to /fault: "" (none), "refuse" (an update fails at once), "stall" (the server receives no
broadcast, and its engine does not respond, until another fault is posted), "die" (during an update).
"""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from torchtune_ext.sampling.broadcast import GlooGroup, GlooInit, iter_chunks
from torchtune_ext.sampling.server_command import KEY_VARIABLE
from torchtune_ext.sampling.weight_buffer import checksum, iter_views

LOCK = threading.Lock()  # the engine handles one call at a time
STATE = {"fault": "", "inits": [], "version": None, "sums": {}, "adapter": None, "active": False, "calls": []}
GROUP: list[GlooGroup] = []


class RequestRejected(Exception):
    pass


def init(init_info):
    STATE["inits"].append(init_info)
    info = GlooInit(**init_info)
    GROUP[:] = []
    GROUP.append(GlooGroup(info, info.rank_offset))


def receive(update_info):
    info = GlooInit(**STATE["inits"][-1])
    if STATE["fault"] == "refuse":
        raise RequestRejected("these weights are not wanted")
    if STATE["fault"] == "stall":
        while STATE["fault"] == "stall":
            time.sleep(0.05)
        raise RequestRejected("it had stalled")
    if not GROUP:
        raise RequestRejected("no group")
    give_up_at, checksums = time.monotonic() + info.deadline_s, {}
    try:
        for begin, end, manifest in iter_chunks(update_info, info.chunk_bytes):
            data = torch.empty(end - begin, dtype=torch.uint8)
            GROUP[0].broadcast(data, give_up_at)
            checksums |= {name: checksum(tensor) for name, tensor in iter_views(data, manifest)}
            if STATE["fault"] == "die":
                os._exit(9)
    except RuntimeError:
        GROUP.clear()
        raise
    return checksums


def rpc(method, args):
    assert method == "receive_adapter"
    STATE["sums"], STATE["adapter"] = receive(args[0]), args[1]


def handle_route(path, body):
    if path == "/init_weight_transfer_engine":
        init(**body)
    elif path == "/start_weight_update":
        if STATE["active"]:
            raise RequestRejected("start_weight_update called while a weight update is already active. Call finish")
        STATE["active"] = True
    elif path == "/update_weights":
        try:
            STATE["sums"], STATE["adapter"] = receive(**body), None
        except BaseException:
            STATE["active"] = False
            raise
    elif path == "/collective_rpc":
        rpc(**body)
    elif path in ("/finish_weight_update", "/update_weight_version"):
        STATE["active"] = False
        STATE["version"] = body.get("weight_version", body.get("new_version", STATE["version"]))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ[KEY_VARIABLE]}":
            return self.answer(401, {})
        if self.path == "/state":
            return self.answer(200, STATE)
        if self.path == "/fault":
            STATE["fault"] = body["fault"]
            return self.answer(200, {})
        STATE["calls"].append(self.path)
        try:
            with LOCK:
                handle_route(self.path, body)
        except Exception as error:
            return self.answer(500, {"error": f"{type(error).__name__}: {error}"})
        return self.answer(200, {"results": [None]} if self.path == "/collective_rpc" else {})

    def do_GET(self):
        """/is_paused: the engine responds after its current call."""
        with LOCK:
            pass
        self.answer(200, {})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has disconnected

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
