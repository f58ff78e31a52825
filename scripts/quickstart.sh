#!/usr/bin/env bash
# From prompts to a served drafter on one machine, on the real SGLang; without a GPU by default.
#
#   bash scripts/quickstart.sh                          everything, about 12 minutes on 2 cores; a second call resumes
#   bash scripts/quickstart.sh --only 04_train          one stage of it (01_generate ... 05_benchmark)
#   bash scripts/quickstart.sh --config configs/X.yaml  another run
#   bash scripts/quickstart.sh --python python3         in an environment of your own instead of .venv
#
# A stage's log is <run_dir>/logs/<stage>.log, a server's <run_dir>/logs/server_<role>.log.
set -euo pipefail
{ true 3>&1; } 2> /dev/null || exec > /dev/null  # closed: what it says goes nowhere
{ true 3>&2; } 2> /dev/null || exec 2> /dev/null
here=$PWD
cd "$(dirname "$0")/.."
config=configs/quickstart.yaml only='' py=''
die() { echo "quickstart: $2" >&2; exit "$1"; }
while [ $# -gt 0 ]; do
  case $1 in
    --config|--only|--python) [ $# -ge 2 ] || die 2 "$1 needs a value."; declare "$(case $1 in --python) echo py;; *) echo "${1#--}";; esac)=$2"; shift 2 ;;
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die 2 "unknown argument $1. See --help." ;;
  esac
done
stages="01_generate 02_build_vocab 03_extract 04_train 05_benchmark"
[ -z "$only" ] || [[ " $stages " == *" $only "* ]] || die 2 "--only $only: no such stage; there are: $stages."
# What was named from another folder is meant from there
[ -f "$config" ] || [ ! -f "$here/$config" ] || config=$here/$config
[[ "$py" != */* ]] || [ -x "$py" ] || [ ! -x "$here/$py" ] || py=$here/$py
[ -f "$config" ] || die 2 "$config: no such run file."
if [ -z "$py" ]; then bash scripts/setup_venv.sh; py=.venv/bin/python; fi
"$py" -c 'import yaml' 2> /dev/null || die 2 "$py: no Python with this project's packages. Name one with --python (pip install . gives them)."
setting() { # setting a.b: that value of the run file
  "$py" -c '
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
from eagle3.stage import UserError, read_run_file
try:
    value = read_run_file(Path(sys.argv[1]))
    for key in sys.argv[2].split("."):
        value = value[key]
    print(value)
except UserError as error:
    sys.exit(f"quickstart: {error}")
except (KeyError, TypeError):
    sys.exit(f"quickstart: {sys.argv[1]}: {sys.argv[2]} is missing.")
' "$config" "$1" || exit 2
}
run=$(setting run_dir)  # one a line: only the last of several would stop the script
target=$(setting target)
responses=$(setting generate.output-dir)
hidden_states=$(setting extract.output-dir)
# The one target that is neither stored nor brought along
[ "$target" != .run/tiny_llama ] || [ -f "$target/model.safetensors" ] || "$py" scripts/make_tiny_llama.py --output-dir "$target"
[[ "$target" != */* ]] || [ -f "$target/config.json" ] || die 2 "$target: holds no config.json. Set \`target\` in $config to the target's folder."
logs=$run/logs
mkdir -p "$logs" 2> /dev/null && [ -w "$logs" ] || die 2 "$logs: cannot be written to. Set a \`run_dir\` of your own in $config."
# Locks end with this script, however it dies: 8 is this run's, 9 the SGLang's that this Python imports, shared by all
# who need its patch (servers.py shares it for each server, sglang_patch.py restores only when nobody does)
sglang=$("$py" -c 'import importlib.util as u; print(u.find_spec("sglang").submodule_search_locations[0])' 2> /dev/null) || die 2 "$py imports no SGLang. Install one (configs/README.md), or name another Python with --python."
exec 8>> "$logs/quickstart.lock" 9< "$sglang"
flock -n 8 || die 2 "$run: another quickstart is at work on this run. Wait for it, or set another \`run_dir\` in a copy of $config."
export OMP_WAIT_POLICY=PASSIVE  # threads that spin while they wait stall everything else where cores are few or shared
say() { echo "$(date +%FT%T) quickstart $*"; }

# A stage or server that gets SIGTERM when this script dies, by kill -9 too (PR_SET_PDEATHSIG lasts through exec)
bound() { exec "$py" -c 'import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])' "$@" 8>&- 9>&-; }

server='' stage_pid='' patched='' model=()
stop_server() { # the wrapper ends the server's whole process group
  [ -n "$server" ] || return 0
  kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; server=''
  [ -n "$patched" ] || return 0
  flock -u 9
  "$py" patches/sglang_patch.py restore >> "$logs/patch.log" 2>&1 || say "$(tail -1 "$logs/patch.log")"
}
finish() { [ -z "$stage_pid" ] || kill "$stage_pid" 2>/dev/null || true; stop_server; }
trap finish EXIT
trap 'exit 130' INT; trap 'exit 143' TERM HUP

needs_patch() { # a run whose server captures by SGLang's own hooks, or not at all, leaves SGLang as it is
  "$py" -c '
import pathlib, sys
sys.path.insert(0, "scripts")
from eagle3.servers import needs_patch
from eagle3.stage import read_run_file
sys.exit(not needs_patch(read_run_file(pathlib.Path(sys.argv[1])).get("servers")))' "$config" 2> /dev/null
}
start_server() {
  if needs_patch; then
    patched=1
    flock -s 9
    [ ! -f "$target/config.json" ] || model=(--target "$target")
    "$py" patches/sglang_patch.py apply "${model[@]}" >> "$logs/patch.log" 2>&1 || die 2 "the SGLang patch does not apply: $(tail -1 "$logs/patch.log")"
  fi
  say "server of role extract (log: $logs/server_extract.log)"
  : > "$logs/serve.log"
  bound scripts/serve.py --config "$config" --role extract --log "$logs/server_extract.log" > "$logs/serve.log" 2>&1 & server=$!
  until grep -q ' ready at ' "$logs/serve.log"; do
    kill -0 "$server" 2>/dev/null || server_failed
    sleep 0.5
  done
  say "$(grep -o 'extract ready.*' "$logs/serve.log")"
}
server_failed() { local why; why=$(tail -1 "$logs/serve.log"); die 2 "server: ${why#serve: }"; }

stage() {
  local log=$logs/$1.log code=0 began=$SECONDS again=''
  say "$1 (log: $log)"
  # a complete folder was verified before its manifest was written: terabytes are not read again for each call
  [ "$1" != 03_extract ] || [ -n "$only" ] || wants_more extract "$hidden_states" || again=--no-verify
  bound -u "$1.py" --config "$config" $again > >(tee -a "$log") 2>&1 & stage_pid=$!
  while kill -0 "$stage_pid" 2>/dev/null; do
    [ -z "$server" ] || kill -0 "$server" 2>/dev/null || { kill "$stage_pid"; server_failed; }
    sleep 0.2
  done
  wait "$stage_pid" || code=$?
  stage_pid=''
  [ "$code" = 0 ] || die "$code" "$1 failed (exit $code): $(tail -1 "$log"). Its log: $log"
  say "$1 took $((SECONDS - began)) s"
}

# 01 and 03 talk to a patched SGLang; both finished means that it is not needed again
wants_more() { # whether the stage of the run file's section $1 has more to do in folder $2
  "$py" -c '
import pathlib, sys
sys.path.insert(0, "scripts")
from eagle3.growth import wants_more
from eagle3.stage import read_run_file
config, section, folder, responses = sys.argv[1:]
sys.exit(not wants_more(read_run_file(pathlib.Path(config)).get(section) or {}, pathlib.Path(folder), pathlib.Path(responses)))' \
    "$config" "$1" "$2" "$responses"
}
needs_server() {
  [ "$1" = 01_generate ] && wants_more generate "$responses" || [ "$1" = 03_extract ] && wants_more extract "$hidden_states"
}
for name in ${only:-$stages}; do
  if needs_server "$name"; then [ -n "$server" ] || start_server
  elif [ "$name" = 04_train ] || [ "$name" = 05_benchmark ]; then stop_server; fi
  stage "$name"
done
[ -n "$only" ] && say "done. Logs: $logs" ||
  say "done. Drafter: $(setting benchmark.draft-path)  report: $(setting benchmark.output-dir)/report.md  logs: $logs"
