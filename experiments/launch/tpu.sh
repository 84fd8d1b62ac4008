# shellcheck shell=bash
# Code that tpu_vm.sh and tpu_slice.sh share. Source this file, do not run it. It works on the TPU called NAME.

. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# shellcheck disable=SC2153 # the scripts ensure that PROJECT and ZONE are set
gcloud_tpu() {
  gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"
}

# Sets `version` to the software version that Cloud TPU documents for JAX on this kind of TPU, or to RUNTIME_VERSION.
# shellcheck disable=SC2034 # the scripts use `version`
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
# shellcheck disable=SC2153
on_hosts() {
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
