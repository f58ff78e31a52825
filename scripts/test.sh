#!/usr/bin/env bash
# All tests, on the real SGLang on a CPU.
#
#   bash scripts/test.sh                        11 to 15 minutes on 2 cores; --slow as the first argument adds those of minutes each
#   bash scripts/test.sh tests/test_vocab.py    any arguments of pytest; -n 0 runs them in one process (for -s, --pdb)
#
# TEST_PYTHON names the Python to run them with (default: .venv, made and kept current).
set -euo pipefail
cd "$(dirname "$0")/.."
select='not slow'
[ "${1:-}" = --slow ] && { select=''; shift; }
if [ -z "${TEST_PYTHON:-}" ]; then bash scripts/setup_venv.sh tests; TEST_PYTHON=.venv/bin/python; fi
# Three workers, one thread each, for two cores: much of a test is waiting. File by file in the order of tests/conftest.py
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
# A worker that dies ends the tests, which could wait for its share for ever
exec "$TEST_PYTHON" -m pytest -m "$select" -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=15 "$@"
