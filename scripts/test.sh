#!/usr/bin/env bash
# All tests, on the real SGLang on a CPU.   usage: bash scripts/test.sh [--slow] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
select='not slow'
[ "${1:-}" = --slow ] && { select=''; shift; }
if [ -z "${TEST_PYTHON:-}" ]; then bash scripts/setup_venv.sh; TEST_PYTHON=.venv/bin/python; fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE
exec "$TEST_PYTHON" -m pytest -m "$select" --durations=15 "$@"
