#!/usr/bin/env bash
# Trains on a TPU slice of a cluster that was created with XPK (pip install xpk).
#
#   xpk.sh [FLAGS]    submits the workload; FLAGS go to cope-jax train
#
# XPK restarts the workload at most MAX_RESTARTS times if it exits with 127 to 255, that is, after interruptions and
# crashes. XPK does not restart it if cope-jax train exits with 2, 3 or 4, because these statuses need a person.
# `xpk workload list` shows the workload, and `xpk workload delete --workload=NAME` ends it.
#
# Required variables:
#   PROJECT, ZONE, CLUSTER    project and zone of Google Cloud, and name of the cluster
#   NAME                      name of the workload
#   TPU_TYPE                  type of the slice, such as v5litepod-16
#   IMAGE                     image that contains the project, see Dockerfile
#   STORAGE                   a storage attached by `xpk storage attach`; all pods write to it
#   CONFIG                    a file of cope_jax/configs
#   WORKDIR                   a folder below the storage's mount point, or gs://BUCKET/PATH
# Optional variables: MAX_RESTARTS (default 1000).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need PROJECT ZONE CLUSTER NAME TPU_TYPE IMAGE STORAGE CONFIG WORKDIR
check_workdir
need_program xpk
# shellcheck disable=SC2153 # `need` has checked the variables
xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$NAME" \
  --tpu-type="$TPU_TYPE" --num-slices=1 --docker-image="$IMAGE" --storage="$STORAGE" \
  --max-restarts="${MAX_RESTARTS:-1000}" --termination-grace-period-seconds=120 \
  --command="$(quoted python -m cope_jax train --config="$CONFIG" --workdir="$WORKDIR" --distributed=on "$@")"
