#!/usr/bin/env bash
# Runs a command on this machine. The command continues if the connection that started it ends; a second call joins it.
#
#   detached.sh run NAME ATTEMPT COMMAND...   starts COMMAND, shows its output, and exits with its exit status
#   detached.sh stop NAME                     sends SIGTERM to the command: a training run saves and exits with 143
#
# If a command with this NAME is still running, `run` joins it instead of starting another. If ATTEMPT has already
# ended, `run` returns its status. So an ssh client that lost its connection can safely repeat the call.
# The output and the state are kept in ${XDG_STATE_HOME:-~/.local/state}/cope_jax/NAME.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

action="${1:-}" name="${2:-}"
[ -n "$name" ] || die "give an action and a name: see detached.sh --help"
state="${XDG_STATE_HOME:-$HOME/.local/state}/cope_jax/$name"
mkdir -p "$state"

at_work() {
  [ -s "$state/pid" ] && kill -0 "$(cat "$state/pid")" 2>/dev/null
}

case "$action" in
  run)
    attempt="${3:-}"
    [ $# -ge 4 ] || die "detached.sh run needs NAME ATTEMPT COMMAND...: see detached.sh --help"
    shift 3
    if ! at_work; then
      if [ "$(cat "$state/attempt" 2>/dev/null)" = "$attempt" ] && [ -s "$state/status" ]; then
        exit "$(cat "$state/status")"
      fi
      rm -f "$state/status"
      touch "$state/output.log"
      from="--bytes=+$(($(wc -c <"$state/output.log") + 1))"
      echo "$attempt" >"$state/attempt"
      # nohup, because the end of a login session sends SIGHUP. The shell around the command passes SIGTERM on and
      # writes the status. If a signal ends `wait` early, the shell waits again.
      # shellcheck disable=SC2016
      nohup setsid bash -c '
        state=$1; shift
        "$@" & child=$!
        trap "cut=yes; kill -TERM $child 2>/dev/null" TERM
        cut=yes
        while [ -n "$cut" ]; do cut=""; wait $child; status=$?; done
        echo $status >"$state/status.new" && mv "$state/status.new" "$state/status"
      ' detached "$state" "$@" >>"$state/output.log" 2>&1 </dev/null &
      echo $! >"$state/pid"
    else
      from="--lines=20"
      say "joining the command that is already running"
    fi
    tail "$from" --follow=name --pid="$(cat "$state/pid")" "$state/output.log" 2>/dev/null || true
    [ -s "$state/status" ] || exit 137 # it was killed before it could write a status
    exit "$(cat "$state/status")"
    ;;
  stop)
    at_work || die "nothing named $name is running"
    kill -TERM "$(cat "$state/pid")"
    ;;
  *) unknown_action ;;
esac
