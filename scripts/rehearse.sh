#!/usr/bin/env bash
# Rehearse a run on Kimi-K2.5 at its true width on one GPU: random target (8 layers, 8 experts) -> 02 -> patched SGLang -> 03 -> full-size drafter,
# 100 steps -> plain and EAGLE3 server, greedy answers compared. Ends with a table beside scripts/plan.py's forecast.
#
#   bash scripts/rehearse.sh --python python3       needs SGLang, a GPU of 80 GB and 70 GB of disk (or 16 GB of /dev/shm less); a second call resumes
#   bash scripts/rehearse.sh --toy                  the same at a width of 256 on the CPU engine, to try this script
#   bash scripts/rehearse.sh --samples 50           fewer samples: 5 GB of disk less for each 50
#
# Everything lies in .run/rehearsal (.run/rehearsal-toy); the last line says whether all answers were equal. Exit 0, 1 if they were not, 2 as quickstart.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
toy='' py='' samples=''
die() { echo "rehearse: $2" >&2; exit "$1"; }
while [ $# -gt 0 ]; do
  case $1 in
    --python|--samples) [ $# -ge 2 ] || die 2 "$1 needs a value."; declare "$(case $1 in --python) echo py;; *) echo samples;; esac)=$2"; shift 2 ;;
    --toy) toy=1; shift ;;
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die 2 "unknown argument $1. See --help." ;;
  esac
done
if [ -n "$toy" ]; then config=configs/rehearsal-toy.yaml run=.run/rehearsal-toy samples=${samples:-24} longest=512 size=--toy
else config=configs/rehearsal.yaml run=.run/rehearsal samples=${samples:-200} longest=4096 size=''; fi
if [ -z "$py" ]; then bash scripts/setup_venv.sh; py=.venv/bin/python; fi
mkdir -p "$run"

free() { df --output=avail -B1 "$1" 2>/dev/null | tail -1; }
if [ -z "$toy" ] && [ ! -e "$run/target" ]; then # the target in memory, where there is room: a disk of 64 GB is too small for all
  shm=$(free /dev/shm)
  if [ "${shm:-0}" -gt 30000000000 ]; then mkdir -p /dev/shm/rehearsal-target; ln -sfn /dev/shm/rehearsal-target "$run/target"; fi
fi
sampler='' child=''
watch_gpu() { # peak memory of the first GPU, MiB, in $run/gpu_peak
  echo - > "$run/gpu_peak"
  # In one process: each start of nvidia-smi would hold up the server on that GPU
  "$py" - "$run/gpu_peak" << 'PYTHON' & sampler=$!
import os, pathlib, sys, time
import pynvml
peak, file, parent = 0, pathlib.Path(sys.argv[1]), os.getppid()
try:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
except pynvml.NVMLError:
    sys.exit()  # no GPU
while os.getppid() == parent:  # not after a kill -9
    used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20
    if used > peak:
        peak = used
        file.write_text(f"{peak}\n")
    time.sleep(0.5)
PYTHON
}
end_watch() { [ -z "$sampler" ] || { kill "$sampler" 2>/dev/null || true; wait "$sampler" 2>/dev/null || true; sampler=''; }; }
finish() { [ -z "$child" ] || kill "$child" 2>/dev/null || true; end_watch; } # quickstart.sh then stops its server
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM HUP

timed() { # timed NAME command...: seconds and GPU peak of the first call that succeeded, in timings.tsv; of an interrupted one they hold only the rest
  local name=$1 began=$SECONDS code=0; shift
  watch_gpu
  "$@" & child=$!
  wait "$child" || code=$?
  child=''
  end_watch
  [ "$code" = 0 ] || exit "$code"
  grep -q "^$name	" "$run/timings.tsv" 2>/dev/null ||
    printf '%s\t%s\t%s\n' "$name" $((SECONDS - began)) "$(cat "$run/gpu_peak")" >> "$run/timings.tsv"
}
timed target "$py" scripts/make_wide_kimi.py --config "$config" $size --samples "$samples" --longest "$longest"
"$py" scripts/preflight.py --config "$config" || echo "rehearse: going on all the same; a stage refuses what it cannot do"
for stage in 02_build_vocab 03_extract 04_train 05_benchmark; do
  timed "$stage" bash scripts/quickstart.sh --config "$config" --python "$py" --only "$stage"
done
"$py" scripts/rehearsal_table.py --config "$config" --timings "$run/timings.tsv" --samples "$samples" --longest "$longest"
