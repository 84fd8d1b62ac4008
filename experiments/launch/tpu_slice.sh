#!/usr/bin/env bash
# A TPU slice of several hosts, as a queued resource that may be taken away; trains until the run is done.
#
#   tpu_slice.sh run [FLAGS]    asks for the slice and waits for it, installs, trains on all hosts, and after a
#                               preemption does so again, until experiments.train leaves with 0. FLAGS go to
#                               experiments.train. Statuses 2, 3 and 4 of it need a person and end the script, as do
#                               MAX_FAILURES other failures in a row on a slice that is still there.
#   tpu_slice.sh stop           has the training save and leave; end `run` with Ctrl-C first, or it goes on
#   tpu_slice.sh delete         deletes the slice, with its disks
#
# Ctrl-C ends `run` alone: the training goes on on the slice, and the same command joins it. `run` deletes a queued
# resource of this NAME only when it is FAILED or SUSPENDED, that is without hosts, to ask for it anew.
#
# Variables that must be set:
#   PROJECT, ZONE       of Google Cloud
#   NAME                of the queued resource and of its TPU
# For run:
#   ACCELERATOR_TYPE    such as v5litepod-16, v5p-64 or v6e-256
#   REPOSITORY          URL of the project's git repository
#   CONFIG              a file of experiments/configs
#   WORKDIR             an absolute path on a file system that every host mounts (see docs/tpu.md): disks of hosts go
#                       with the slice
# May be set: SPOT=no (yes), RUNTIME_VERSION (chosen by ACCELERATOR_TYPE), REF (branch or tag to clone: main; give a tag,
# for a slice that was taken away is cloned anew), PREPARE (shell to run on every host before setup, such as a mount),
# LIBTPU_INIT_ARGS, POLL_SECONDS (30), MAX_FAILURES (3).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/tpu.sh"

# The state of the queued resource, such as ACTIVE; empty where there is none.
slice_state() {
  gcloud_tpu queued-resources list --filter="name~/$NAME\$" --format="value(state.state)"
}

create() {
  local spot=()
  [ "${SPOT:-yes}" != yes ] || spot=(--spot)
  say "asking for $ACCELERATOR_TYPE as $NAME"
  gcloud_tpu queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$ACCELERATOR_TYPE" \
    --runtime-version="$version" ${spot[@]+"${spot[@]}"}
}

# Waits until the slice is there, asking for it if need be.
wait_for_slice() {
  local state unknown=0
  while true; do
    if ! state="$(slice_state)"; then
      unknown=$((unknown + 1))
      [ "$unknown" -lt "${MAX_FAILURES:-3}" ] || die "gcloud does not tell the state of $NAME"
      sleep "${POLL_SECONDS:-30}"
      continue
    fi
    case "$state" in
      ACTIVE) return ;;
      "") create ;;
      FAILED | SUSPENDED)
        say "$NAME is $state: asking for it anew"
        gcloud_tpu queued-resources delete "$NAME" --force --quiet
        ;;
      *)
        say "$NAME is $state"
        sleep "${POLL_SECONDS:-30}"
        ;;
    esac
  done
}

run() {
  local status failures=0
  while true; do
    wait_for_slice
    status=0
    setup_hosts || status=255 # whatever went wrong, it was not the training
    if [ "$status" -eq 0 ]; then
      train_on_hosts --distributed=on "$@" || status=$?
    fi
    case "$(verdict "$status")" in
      done) say "done" && return 0 ;;
      stop) say "the training left with $status, which needs a person" && return "$status" ;;
      again) failures=0 ;;
      failed)
        if [ "$(slice_state || true)" = ACTIVE ]; then
          failures=$((failures + 1))
          [ "$failures" -lt "${MAX_FAILURES:-3}" ] || { say "$failures failures in a row" && return "$status"; }
        fi
        ;;
    esac
    say "left with $status; going on"
    sleep "${POLL_SECONDS:-30}"
  done
}

take_action "$@"
shift
need PROJECT ZONE NAME
need_program gcloud
case "$action" in
  run)
    need ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR
    check_workdir
    choose_version
    run "$@"
    ;;
  stop) stop_on_hosts ;;
  delete) gcloud_tpu queued-resources delete "$NAME" --force ;;
  *) unknown_action ;;
esac
