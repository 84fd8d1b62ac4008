#!/usr/bin/env bash
# Runs several processes of one training run on this machine: a small pod, to try out what runs on several hosts.
#
#   local_processes.sh PROCESSES [FLAGS]    FLAGS go to experiments.train
#
# For example, two processes with two CPU devices each:
#   JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 CONFIG=experiments/configs/quick.py \
#     WORKDIR=$PWD/runs/two experiments/launch/local_processes.sh 2 --config.job.mesh.fsdp=2
#
# Ctrl-C and SIGTERM are passed on; the run saves. Exits with 0 if all processes did, else with the status that most
# needs a person: 2, 3 or 4, then a failure, then 130 or 143 (the same command resumes).
#
# Variables that must be set:
#   CONFIG     a file of experiments/configs
#   WORKDIR    an absolute path
# May be set: PYTHON (.venv/bin/python if there is one, else python3), PORT (one that is free).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes="${1:-}"
case "$processes" in
  "" | *[!0-9]* | 0*) die "give the number of processes: see local_processes.sh --help" ;;
esac
shift
need CONFIG WORKDIR
check_workdir
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
PORT="${PORT:-$("$PYTHON" -c "$free_port")}"

children=()
# shellcheck disable=SC2329 # the traps call it
pass_on() {
  local running # the trap may run during the loop over children below
  for running in "${children[@]}"; do
    kill "-$1" "$running" 2>/dev/null || true
  done
}
# A signal cuts `wait` short; the loop below then waits again.
trap 'cut=yes; pass_on INT' INT
trap 'cut=yes; pass_on TERM' TERM

# In its own session a child gets Ctrl-C only from here, once; a second one would make it exit unsaved. Bash makes
# background commands ignore it.
alone='
import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
'
for ((process = 0; process < processes; process++)); do
  "$PYTHON" -c "$alone" \
    "$PYTHON" -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" \
    --coordinator="127.0.0.1:$PORT" --num_processes="$processes" --process_id="$process" "$@" &
  children+=($!)
done

rank() {
  case "$(verdict "$1")" in
    done) echo 0 ;;
    again) echo 1 ;;
    failed) echo 2 ;;
    stop) echo 3 ;;
  esac
}

worst=0
for child in "${children[@]}"; do
  cut=yes
  while [ -n "$cut" ]; do
    cut=""
    status=0
    wait "$child" || status=$?
  done
  [ "$(rank "$status")" -le "$(rank "$worst")" ] || worst="$status"
done
exit "$worst"
