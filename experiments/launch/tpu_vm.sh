#!/usr/bin/env bash
# Creates one TPU VM and trains a model on it. Run it where gcloud is logged in.
#
#   tpu_vm.sh create            creates the VM
#   tpu_vm.sh setup             clones and installs the project on the VM
#   tpu_vm.sh train [FLAGS]     trains, or joins the running training. FLAGS go to cope-jax train. The exit status is
#                               0 if the run is done, 143 if it was interrupted and saved (repeat the command), and
#                               2, 3 or 4 if a person is needed
#   tpu_vm.sh stop              makes the training save and exit
#   tpu_vm.sh fetch FOLDER      copies WORKDIR from the VM into FOLDER
#   tpu_vm.sh delete            deletes the VM and its disk, with WORKDIR; run fetch first
#   tpu_vm.sh run [FLAGS]       runs create, setup and train; deletes nothing
#
# Required variables:
#   PROJECT, ZONE       project and zone of Google Cloud
#   NAME                name of the VM
# Required for create and run:
#   ACCELERATOR_TYPE    a type with one host, such as v5litepod-8, v5p-8 or v6e-8
# Required for setup and run:
#   REPOSITORY          URL of the project's git repository
# Required for train and run:
#   CONFIG              a file of cope_jax/configs
#   WORKDIR             an absolute path on the VM, or gs://BUCKET/PATH; also required for fetch
# Optional variables:
#   RUNTIME_VERSION     software version; by default it is chosen by ACCELERATOR_TYPE
#   SPOT                no (default) or yes, which is cheaper, but the VM can be taken away
#   REF                 branch or tag to clone (default main)
#   PREPARE             shell command to run on the VM before setup, such as a mount
#   EXTRAS              extras to install besides tpu, such as buckets
#   LIBTPU_INIT_ARGS    passed on to libtpu
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
    case "$WORKDIR" in
      gs://*) gcloud storage cp --recursive "$WORKDIR" "$1" ;;
      s3://*) die "WORKDIR=$WORKDIR is in S3: copy it with aws s3 cp --recursive" ;;
      *) gcloud_tpu tpu-vm scp --recurse "$NAME:$WORKDIR" "$1" ;;
    esac
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
