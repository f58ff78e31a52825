"""A stand-in for SGLang whose steps take a known time, for --break-even and --adaptive: as a server of a run file.

    python tests/stepping_server.py --port 30000 --model-path scripts/tiny_kimi [--speculative-num-steps 3 ...]

A step takes `step_s(draft steps, requests in flight)` and emits, of SGLANG_SIMULATE_ACC_LEN or else of what this drafter is said to be
accepted, `accepted(draft steps)`, the whole tokens that are due. 0 steps are plain decoding.
"""
import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PREFILL_S = 0.005


def step_s(steps: int, streams: int) -> float:
    """Drafts cost more where the batch is large."""
    return (0.010 + 0.0005 * streams) * (1 + steps * (0.1 + 0.15 * streams))


def accepted(steps: int) -> float:
    return 1 + 0.55 * steps


def serve(args) -> None:
    simulated = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", 0)) if not args.deaf else 0
    by_size = {}
    if args.speculative_adaptive:
        by_size = {int(size): entry["candidate_steps"][0]
                   for size, entry in json.loads(Path(args.speculative_adaptive_config).read_text()).items()}
    info = {"model_path": args.model_path, "version": args.version, "speculative_algorithm": args.speculative_algorithm,
            "speculative_draft_model_path": args.speculative_draft_model_path, "speculative_eagle_topk": args.speculative_eagle_topk,
            "speculative_num_steps": args.speculative_num_steps, "speculative_adaptive": bool(by_size) and not args.deaf}
    flying, lock = [0], threading.Lock()

    def steps_now() -> int:
        if not args.speculative_algorithm:
            return 0
        fitting = [size for size in sorted(by_size) if size <= flying[0]] or sorted(by_size)[:1]
        return by_size[fitting[-1]] if fitting else args.speculative_num_steps

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_):
            pass

        def do_GET(self):
            data = json.dumps(info).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path.startswith("/flush_cache"):
                return self.do_GET()
            if args.speculative_num_steps == args.refuses:
                return self.send_error(503)
            with lock:
                flying[0] += 1
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            total, tokens, verified, due = body["sampling_params"]["max_new_tokens"], 0, 0, 1.0
            at = time.perf_counter() + PREFILL_S
            while tokens < total:
                time.sleep(max(0, at - time.perf_counter()))
                new = int(due + 1e-9)
                tokens, due = tokens + new, due - new
                self.event(body, min(tokens, total), verified, tokens - 1 - verified, tokens >= total)
                steps = steps_now()
                at += step_s(steps, flying[0])
                due += max(1.0, min(steps + 1, simulated)) if simulated else accepted(steps)
                verified += 1
            with lock:
                flying[0] -= 1
            self.wfile.write(b"0\r\n\r\n")

        def event(self, body, tokens, verified, correct, ended):
            meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": tokens, "cached_tokens": 0,
                    "finish_reason": {"type": "length"} if ended else None}
            if args.speculative_algorithm:
                meta |= {"spec_verify_ct": verified, "spec_num_correct_drafts": correct, "spec_correct_drafts_histogram": [verified]}
            data = b"data: " + json.dumps({"text": "", "output_ids": [7] * tokens, "meta_info": meta}).encode() + b"\n\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("model-path", "speculative-algorithm", "speculative-draft-model-path", "speculative-adaptive-config"):
        parser.add_argument(f"--{flag}")
    for flag in ("port", "speculative-num-steps", "speculative-eagle-topk"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--refuses", type=int, default=-1, help="refuses all requests where it has so many steps")
    parser.add_argument("--speculative-adaptive", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="heeds neither simulation nor adaptive steps")
    known, _ = parser.parse_known_args()
    print(f"serving {vars(known)}", file=sys.stderr, flush=True)
    serve(known)
