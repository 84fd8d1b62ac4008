#!/usr/bin/env bash
# Trains on a TPU slice of one host or several until the run is done. The slice is a queued resource, which may be taken
# away.
#
#   tpu_slice.sh run [FLAGS]    requests the slice and waits for it, installs the project, trains on all hosts, and does
#                               the same again after a preemption, until cope-jax train exits with 0. FLAGS go to
#                               cope-jax train. Its statuses 2, 3 and 4 need a person and end the script, as do
#                               MAX_FAILURES other failures in a row on a slice that is still there.
#   tpu_slice.sh stop           makes the training save and exit; first end `run` with Ctrl-C, or `run` starts it again
#   tpu_slice.sh delete         deletes the slice, with its disks
#
# Ctrl-C ends only `run`: the training continues on the slice, and the same command joins it. `run` deletes a queued
# resource with this NAME only if it is FAILED or SUSPENDED, that is, without hosts, and then requests it again.
#
# Required variables:
#   PROJECT, ZONE       project and zone of Google Cloud
#   NAME                name of the queued resource and of its TPU
# Required for run:
#   ACCELERATOR_TYPE    such as v5litepod-16, v5p-64 or v6e-256
#   REPOSITORY          URL of the project's git repository
#   CONFIG              a config, such as quick
#   WORKDIR             gs://BUCKET/PATH, or an absolute path on a file system that every host mounts (see docs/tpu.md):
#                       the hosts' own disks are deleted with the slice
# Optional variables:
#   SPOT                yes (default) or no
#   RUNTIME_VERSION     software version; by default it is chosen by ACCELERATOR_TYPE
#   REF                 branch or tag to clone (default main); give a tag, because a new slice clones again
#   PREPARE             shell command to run on every host before setup, such as a mount
#   EXTRAS              extras to install besides tpu, such as buckets
#   LIBTPU_INIT_ARGS    passed on to libtpu
#   POLL_SECONDS        seconds between two looks at the state of the slice (default 30)
#   MAX_FAILURES        see above (default 3)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

gcloud_tpu() {
  gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"
}

# Sets `version` to the software version that Cloud TPU documents for JAX on this kind of TPU, or to RUNTIME_VERSION.
choose_version() {
  case "${RUNTIME_VERSION:+given}$ACCELERATOR_TYPE" in
    v4-*) version=tpu-ubuntu2204-base ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    given*) version="$RUNTIME_VERSION" ;;
    *) die "unknown software version for ACCELERATOR_TYPE=$ACCELERATOR_TYPE: set RUNTIME_VERSION" ;;
  esac
}

# Runs a line of shell on every host of the TPU. The status is the first one that is not 0, or 0.
on_hosts() {
  # shellcheck disable=SC2153 # `need` has checked NAME
  gcloud_tpu tpu-vm ssh "$NAME" --worker=all --command="$1"
}

# On every host, clones the project and installs what is missing. An existing clone stays at its commit.
setup_hosts() {
  local clone
  clone="$(quoted git clone --quiet --branch "${REF:-main}" "$REPOSITORY" cope-jax)"
  on_hosts "set -e
${PREPARE:-true}
command -v git >/dev/null && command -v make >/dev/null ||
  { sudo apt-get -qq -o DPkg::Lock::Timeout=600 update; sudo apt-get -qq -o DPkg::Lock::Timeout=600 install git make; }
[ -d cope-jax ] || $clone
$(quoted cope-jax/experiments/launch/worker_setup.sh tpu ${EXTRAS:+"$EXTRAS"})"
}

# Trains on every host, or joins the training that is already running. Takes the flags of cope-jax train that are not
# variables of the script. The status is the status of cope-jax train.
train_on_hosts() {
  local environment=("PYTHONUNBUFFERED=1")
  trap 'say "disconnected, but the training continues: the same command joins it, and the action stop ends it"; exit 130' INT
  [ -z "${LIBTPU_INIT_ARGS:-}" ] || environment+=("LIBTPU_INIT_ARGS=$LIBTPU_INIT_ARGS")
  on_hosts "$(quoted cope-jax/experiments/launch/detached.sh run "$NAME" "$(date +%s)-$$" \
    env -C cope-jax "${environment[@]}" .venv/bin/python -m cope_jax train \
    --config="$CONFIG" --workdir="$WORKDIR" "$@")"
}

stop_on_hosts() {
  on_hosts "$(quoted cope-jax/experiments/launch/detached.sh stop "$NAME")"
}

# The state of the queued resource, such as ACTIVE; empty if there is none.
slice_state() {
  gcloud_tpu queued-resources list --filter="name~/$NAME\$" --format="value(state.state)"
}

create() {
  local spot=()
  [ "${SPOT:-yes}" != yes ] || spot=(--spot)
  say "requesting $ACCELERATOR_TYPE as $NAME"
  gcloud_tpu queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$ACCELERATOR_TYPE" \
    --runtime-version="$version" ${spot[@]+"${spot[@]}"}
}

# Waits until the slice is active, and requests it if necessary.
wait_for_slice() {
  local state unknown=0
  while true; do
    if ! state="$(slice_state)"; then
      unknown=$((unknown + 1))
      [ "$unknown" -lt "${MAX_FAILURES:-3}" ] || die "gcloud does not report the state of $NAME: check PROJECT, ZONE"
      sleep "${POLL_SECONDS:-30}"
      continue
    fi
    case "$state" in
      ACTIVE) return ;;
      "") create ;;
      FAILED | SUSPENDED)
        say "$NAME is $state: requesting it again"
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
    setup_hosts || status=255 # the installation failed, not the training
    if [ "$status" -eq 0 ]; then
      train_on_hosts --distributed=on "$@" || status=$?
    fi
    case "$(verdict "$status")" in
      done) say "done" && return 0 ;;
      stop) say "the training exited with $status, which needs a person" && return "$status" ;;
      again) failures=0 ;;
      failed)
        if [ "$(slice_state || true)" = ACTIVE ]; then
          failures=$((failures + 1))
          [ "$failures" -lt "${MAX_FAILURES:-3}" ] || { say "$failures failures in a row" && return "$status"; }
        fi
        ;;
    esac
    say "exited with $status; trying again"
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
