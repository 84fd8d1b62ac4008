#!/usr/bin/env bash
# Trains with several processes on this machine, like a small pod, to try out a run on several hosts.
#
#   local_processes.sh PROCESSES [FLAGS]    FLAGS go to cope-jax train
#
# For example, two processes with two CPU devices each:
#   JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 CONFIG=quick \
#     WORKDIR=$PWD/runs/two experiments/launch/local_processes.sh 2 --config.job.mesh.fsdp=2
#
# Ctrl-C and SIGTERM are passed on, and the run saves. The script exits with 0 if all processes did. Otherwise it exits
# with the most serious status of a process: first 2, 3 or 4, which need a person, then other failures, then 130 or 143,
# after which the same command resumes.
#
# Required variables:
#   CONFIG     a file of cope_jax/configs
#   WORKDIR    an absolute path, or gs://BUCKET/PATH
# Optional variables: PYTHON (default .venv/bin/python if it exists, else python3), PORT (default any free port).
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
# A signal ends `wait` early; the loop below then waits again.
trap 'cut=yes; pass_on INT' INT
trap 'cut=yes; pass_on TERM' TERM

# In its own session, a child gets Ctrl-C only from this script, and only once: after a second Ctrl-C it would exit
# without saving. The signal handler is reset, because Bash makes background commands ignore Ctrl-C.
alone='
import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
'
for ((process = 0; process < processes; process++)); do
  "$PYTHON" -c "$alone" \
    "$PYTHON" -m cope-jax train --config="$CONFIG" --workdir="$WORKDIR" \
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
