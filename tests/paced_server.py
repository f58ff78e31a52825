"""A stand-in for SGLang that streams answers at a known pace, for 05: in this process, or as a server of a run file.

    python tests/paced_server.py --port 30000 --model-path scripts/tiny_kimi [--speculative-algorithm EAGLE3 ...]
    [--api-key K]

Each unit of 05 begins with /flush_cache: from there on the pace is another, by `jitter`: what a server's runs differ
by. """
import argparse
import json
import math
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET_ENV = "HF_TOKEN"


class Paced:
    """jitter: standard deviation of the log of the pace between runs; prompts whose first id is in `empty` get no
    token. answer: the ids of an answer to `input_ids` (`tokens` times 7, if not given), None for a refusal; accept:
    tokens a verify step, where it says that it speculates; empties: whether it empties its cache. `inputs`: the
    input_ids of each request.
    """

    def __init__(self, pace_s=0.002, jitter=0.0, seed=0, port=0, key=None, empty=(), tokens=8, answer=None, accept=1,
                 empties=True, **info):
        self.pace_s, self.jitter, self.key, self.empty, self.tokens = pace_s, jitter, key, set(empty), tokens
        self.answer, self.accept, self.inputs = answer or (lambda ids: [7] * self.tokens), accept, []
        self.random, self.factor, self.asked, self.empties = random.Random(seed), 1.0, 0, empties
        self.info = {"model_path": "paced", "version": "0.5.23", "speculative_algorithm": None} | info
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def reply(self, body: dict, status=200):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def refused(self) -> bool:
                given = self.headers.get("Authorization", "")
                if not stand_in.key or given == f"Bearer {stand_in.key}" or self.path.startswith("/health"):
                    return False
                self.reply({"error": f"the key {given!r} is not {stand_in.key}"}, 401)
                return True

            def do_GET(self):
                if not self.refused():
                    self.reply(stand_in.info)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                if self.refused():
                    return
                if self.path.startswith("/flush_cache"):
                    stand_in.factor = math.exp(stand_in.random.gauss(0, stand_in.jitter))
                    return self.reply({}, 200 if stand_in.empties else 400)
                stand_in.asked += 1
                stand_in.inputs.append(body["input_ids"])
                answer = stand_in.answer(body["input_ids"])
                if answer is None:
                    return self.reply({"error": "refused"}, 503)
                self.stream(body, answer)

            def stream(self, body, answer):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                none = body["input_ids"][0] in stand_in.empty
                count = 0 if none else min(len(answer), body["sampling_params"]["max_new_tokens"])
                began, pace = time.perf_counter(), stand_in.pace_s * stand_in.factor
                for token in range(min(1, count), count + 1):
                    time.sleep(max(0, began + max(1, token) * pace - time.perf_counter()))
                    meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": token, "cached_tokens": 0,
                            "finish_reason": {"type": "stop"} if token == count else None}
                    if stand_in.info["speculative_algorithm"] and count > 1:
                        verify = math.ceil((count - 1) / stand_in.accept)
                        meta |= {"spec_verify_ct": verify, "spec_num_correct_drafts": count - 1 - verify,
                                 "spec_correct_drafts_histogram": [verify]}
                    event = {"text": "", "output_ids": answer[:token], "meta_info": meta}
                    data = b"data: " + json.dumps(event).encode() + b"\n\n"
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("model-path", "speculative-algorithm", "speculative-draft-model-path", "api-key", "version"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--port", type=int)
    args, rest = parser.parse_known_args()
    # as SGLang does
    print(f"server_args={vars(args)} {rest} {os.environ.get(SECRET_ENV)}", file=sys.stderr, flush=True)
    drafts = {} if not args.speculative_algorithm else {
        "speculative_algorithm": args.speculative_algorithm,
        "speculative_draft_model_path": args.speculative_draft_model_path,
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    Paced(port=args.port, key=args.api_key, model_path=args.model_path, **drafts).http.serve_forever()
