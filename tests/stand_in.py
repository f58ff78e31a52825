"""A stand-in for a patched SGLang server, and 03 run against it (or against a real one) in this process."""
import contextlib
import fcntl
import gc
import hashlib
import http.server
import io
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import eagle3_capture_files as capture_files
from conftest import ROOT, load_script
from eagle3.states import IN_FP8, KINDS, SCALES


def capture_hash() -> str:
    """What the files that the patch writes now say as their `patch_hash`."""
    sources = (ROOT / "patches" / name for name in ("eagle3_capture.py", "eagle3_capture_files.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def write_responses(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        (folder / f"part-{number:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    counts = {"kept": len(rows), "dropped": {}}
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "stage": "01_generate", "counts": counts}))
    return folder


def constant_states(ids: list[int], layers: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, layers * width) and (T, width)"""
    return np.full((len(ids), layers * width), 0.5, np.float32), np.ones((len(ids), width), np.float32)


def captured(sample_id: str, prompt_len: int, ids: list[int], layers: str, width: int = 8, states=constant_states,
             kind: str = KINDS[0], **metadata: str) -> bytes:
    """A file as eagle3_capture writes it, of what `states` makes of the ids; `metadata` replace or add to its header's.
    """
    T, (aux, last) = len(ids), states(ids, len(layers.split(",")), width)
    tensors = {"aux_hidden_states": aux, "last_hidden_states": last, "input_ids": np.array(ids, np.int32),
               "loss_mask": np.array([0] * prompt_len + [1] * (T - prompt_len), np.uint8)}
    return file_of(tensors, {"schema": "1", "target": "stub", "capture_layers": layers, "sglang_version": "0.5.23",
                             "patch_hash": "0", "dtype": "float32", **({"states": kind} if kind != KINDS[0] else {}),
                             "id": sample_id, "prompt_len": str(prompt_len)} | metadata)


def file_of(tensors: dict[str, np.ndarray], metadata: dict) -> bytes:
    """The bytes of a file of these tensors, states in float32, as its `states` in the metadata says; its checksum fits.
    """
    width, small = tensors["last_hidden_states"].shape[1], {}
    stored = {name: ({"f": "F32", "i": "I32", "u": "U8"}[array.dtype.kind], array) for name, array in tensors.items()}
    for name in IN_FP8.get(metadata.get("states", KINDS[0]), ()):
        values, scales = capture_files.quantised(torch.from_numpy(np.ascontiguousarray(tensors[name])), width)
        stored[name], small[SCALES[name]] = ("F8_E4M3", values.view(torch.uint8).numpy()), ("F32", scales.numpy())
    stored |= small
    stored = {name: stored[name] for name in [*SCALES, *small, "input_ids", "loss_mask"]}  # in the order of the file
    data = b"".join(array.tobytes() for _, array in stored.values())
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    header, end = {"__metadata__": {**metadata, "checksum": metadata.get("checksum", digest)}}, 0
    for name, (kind, array) in stored.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


class StandIn:
    """Answers at once and writes constant states into `folder`.

    before(id, folder) may return (status, body) to answer with instead, or "silent" to write nothing; get(path) is the
    answer to a GET; key: asked for where it is set, but not by health checks; most: requests in flight at once, so far.
    """

    def __init__(self, folder: Path, layers: str = "1,2,3", width: int = 8, port: int = 0):
        self.folder, self.layers, self.width, self.asked = folder, layers, width, []
        self.metadata: dict[str, str] = {}  # what its files say beside or instead of the usual
        self.kind = None  # of states, whatever it is asked for
        self.before = lambda sample_id, folder: None
        self.get = lambda path: (200, {})
        self.states, self.key, self.most, self.in_flight = constant_states, None, 0, 0
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self, status: int, body: dict):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def allowed(self) -> bool:
                right = stand_in.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer "))
                return right or self.path.startswith("/health")

            def do_GET(self):
                self.reply(*stand_in.get(self.path) if self.allowed() else (401, {"error": "Unauthorized"}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*stand_in.generate(body) if self.allowed() else (401, {"error": "Unauthorized"}))

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.handle_error = lambda *args: None  # `before` raised: the connection ends, as a dying server's does
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def generate(self, body: dict) -> tuple[int, dict]:
        answer = 200, {"output_ids": [0], "meta_info": {"prompt_tokens": len(body["input_ids"])}}
        if "rid" not in body:
            return answer
        asked, run, prompt_len, _, sample_id = body["rid"].split(":")
        kind = self.kind or asked.removeprefix("eagle3").removeprefix("-") or KINDS[0]
        self.asked.append(sample_id)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return self.work(sample_id, int(prompt_len), body["input_ids"], self.folder / run, kind) or answer
        finally:
            self.in_flight -= 1

    def work(self, sample_id: str, prompt_len: int, ids: list[int], folder: Path, kind: str) -> tuple[int, dict] | None:
        folder.mkdir(parents=True, exist_ok=True)
        instead = self.before(sample_id, folder)
        if isinstance(instead, tuple):
            return instead
        if instead != "silent":
            data = captured(sample_id, prompt_len, ids, self.layers, self.width, self.states, kind,
                            **self.metadata)
            (folder / "tmp").mkdir(exist_ok=True)
            (folder / "tmp" / sample_id).write_bytes(data)
            (folder / "tmp" / sample_id).rename(folder / f"{sample_id}.safetensors")
        return None

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def extract_here(argv: list) -> SimpleNamespace:
    """03 in this process, its folder free again afterwards: returncode, stdout, stderr as of a process."""
    script, out = load_script("03_extract"), io.StringIO()
    argv, said, others = list(map(str, argv)), "", threading.enumerate()
    with contextlib.redirect_stdout(out):
        try:
            script.main(argv)
        except script.UserError as error:
            said = f"03_extract: {error}\n"
    for thread in threading.enumerate():
        if thread not in others and "(worker)" in thread.name:
            thread.join(20)
    let_go(Path(argv[argv.index("--output-dir") + 1]))
    return SimpleNamespace(returncode=2 if said else 0, stdout=out.getvalue(), stderr=said)


def let_go(folder: Path) -> None:
    """Wait until the lock is gone, which a process would lose by ending."""
    deadline = time.monotonic() + 20
    while (folder / ".lock").exists():
        gc.collect()
        with open(folder / ".lock") as file, contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert time.monotonic() < deadline
        time.sleep(0.01)
