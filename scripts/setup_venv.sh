#!/usr/bin/env bash
# Make .venv with everything the CPU quickstart and the tests need; does nothing when it is there and current.
#   usage: bash scripts/setup_venv.sh         (about 2 minutes, 2 GB; PYTHON=python3.12 chooses the interpreter)
# torch: where the package index offers only CUDA builds, point PIP_EXTRA_INDEX_URL at PyTorch's CPU index to save 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "setup: no $python here. Name Python 3.11 or newer with PYTHON=." >&2; exit 2; }
wanted=$( (cat scripts/requirements-cpu.txt scripts/requirements-cpu-nodeps.txt; "$python" --version) | sha256sum)
[ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ] && exit 0
rm -f .venv/installed  # an installation that fails half way is current for nobody
mkdir -p .run/logs
log=.run/logs/install.log
echo "$(date +%FT%T) setup installing into .venv (about 2 minutes; log: $log)"
{
  "$python" -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"' &&
  "$python" -m venv .venv &&
  .venv/bin/pip install -r scripts/requirements-cpu.txt &&
  .venv/bin/pip install --no-deps -r scripts/requirements-cpu-nodeps.txt
} > "$log" 2>&1 || { echo "setup: installation failed: $(grep -E 'ERROR|Error' "$log" | tail -1). Read $log." >&2; exit 2; }
echo "$wanted" > .venv/installed
