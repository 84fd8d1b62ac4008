#!/usr/bin/env bash
# Creates one TPU VM and trains a model on it. Run it where gcloud is logged in.
#
#   tpu_vm.sh create            creates the VM
#   tpu_vm.sh setup             clones and installs the project there
#   tpu_vm.sh train [FLAGS]     trains, or joins the running training; FLAGS go to experiments.train; its exit status is
#                               returned: 0 done, 143 interrupted and saved (repeat the command), 2, 3 and 4 need a
#                               person
#   tpu_vm.sh stop              makes the training save and exit
#   tpu_vm.sh fetch FOLDER      copies WORKDIR from the VM into FOLDER
#   tpu_vm.sh delete            deletes the VM and its disk, WORKDIR with it: fetch first
#   tpu_vm.sh run [FLAGS]       runs create, setup and train; deletes nothing
#
# Variables that must be set:
#   PROJECT, ZONE       of Google Cloud
#   NAME                of the VM
# For create and run:
#   ACCELERATOR_TYPE    with one host, such as v5litepod-8, v5p-8 or v6e-8
# For setup and run:
#   REPOSITORY          URL of the project's git repository
# For train and run:
#   CONFIG              a file of experiments/configs
#   WORKDIR             an absolute path on the VM; fetch needs only WORKDIR
# May be set: RUNTIME_VERSION (chosen by ACCELERATOR_TYPE), SPOT=yes (cheaper, and can be taken away), REF (branch or tag
# to clone: main), PREPARE (shell to run on the VM before setup, such as a mount), LIBTPU_INIT_ARGS.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/tpu.sh"

create() {
  need ACCELERATOR_TYPE
  local spot=()
  choose_version
  [ "${SPOT:-no}" != yes ] || spot=(--spot)
  gcloud_tpu tpu-vm create "$NAME" --accelerator-type="$ACCELERATOR_TYPE" --version="$version" ${spot[@]+"${spot[@]}"}
}

train() {
  need CONFIG WORKDIR
  check_workdir
  train_on_hosts --distributed=off "$@"
}

take_action "$@"
shift
need PROJECT ZONE NAME
need_program gcloud
case "$action" in
  create) create ;;
  setup) need REPOSITORY && setup_hosts ;;
  train) train "$@" ;;
  stop) stop_on_hosts ;;
  fetch)
    need WORKDIR
    [ $# -eq 1 ] || die "give the folder to copy to: tpu_vm.sh fetch FOLDER"
    gcloud_tpu tpu-vm scp --recurse "$NAME:$WORKDIR" "$1"
    ;;
  delete) gcloud_tpu tpu-vm delete "$NAME" ;;
  run)
    need ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR
    check_workdir
    create
    setup_hosts
    train "$@"
    ;;
  *) unknown_action ;;
esac
