#!/usr/bin/env bash
# Make .venv with everything the CPU quickstart needs; does nothing when it is there and current.
#   usage: bash scripts/setup_venv.sh [tests]   (2 GB; with `tests` also what the tests need, 1 GB more, most of it Triton;
#          about 2 minutes; PYTHON=python3.12 chooses the interpreter)
# torch: where the package index offers only CUDA builds, point PIP_EXTRA_INDEX_URL at PyTorch's CPU index to save 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "setup: no $python here. Name Python 3.11 or newer with PYTHON=." >&2; exit 2; }
log=.run/logs/install.log

sum() { (cat "$@"; "$python" --version) | sha256sum; }
current() { [ "$(cat ".venv/$1" 2>/dev/null)" = "$2" ]; } # current STAMP SUM: whether that was installed
install() { # install STAMP SUM command...: its output in the log; the stamp is written last
  local stamp=$1 wanted=$2; shift 2
  mkdir -p .run/logs
  rm -f ".venv/$stamp"  # an installation that fails half way is current for nobody
  echo "$(date +%FT%T) setup installing into .venv (about 2 minutes; log: $log)"
  "$@" > "$log" 2>&1 || { echo "setup: installation failed: $(grep -E 'ERROR|Error' "$log" | tail -1). Read $log." >&2; exit 2; }
  echo "$wanted" > ".venv/$stamp"
}
base() {
  "$python" -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"' &&
  "$python" -m venv .venv &&
  .venv/bin/pip install -r scripts/requirements-cpu.txt &&
  .venv/bin/pip install --no-deps -r scripts/requirements-cpu-nodeps.txt
}
wanted=$(sum scripts/requirements-cpu.txt scripts/requirements-cpu-nodeps.txt)
current installed "$wanted" || install installed "$wanted" base
if [ "${1:-}" = tests ]; then
  wanted=$(sum scripts/requirements-test.txt)
  current installed-tests "$wanted" || install installed-tests "$wanted" .venv/bin/pip install -r scripts/requirements-test.txt
fi
