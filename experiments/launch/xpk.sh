#!/usr/bin/env bash
# Trains on a TPU slice of a cluster that XPK made (pip install xpk).
#
#   xpk.sh [FLAGS]    submits it; FLAGS go to experiments.train
#
# XPK restarts the workload, MAX_RESTARTS times, if it exits with 127 to 255, that is after interruptions and crashes,
# but not if experiments.train exits with 2, 3 or 4, which need a person.
# `xpk workload list` and `xpk workload delete --workload=NAME` watch and end it.
#
# Variables that must be set:
#   PROJECT, ZONE, CLUSTER    where
#   NAME                      of the workload
#   TPU_TYPE                  such as v5litepod-16
#   IMAGE                     with the project in it, see Dockerfile
#   STORAGE                   a storage attached by `xpk storage attach`; all pods write to it
#   CONFIG                    a file of experiments/configs
#   WORKDIR                   a folder below the storage's mount point
# May be set: MAX_RESTARTS (1000).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need PROJECT ZONE CLUSTER NAME TPU_TYPE IMAGE STORAGE CONFIG WORKDIR
check_workdir
need_program xpk
# shellcheck disable=SC2153 # need has checked it
xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$NAME" \
  --tpu-type="$TPU_TYPE" --num-slices=1 --docker-image="$IMAGE" --storage="$STORAGE" \
  --max-restarts="${MAX_RESTARTS:-1000}" --termination-grace-period-seconds=120 \
  --command="$(quoted python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR" --distributed=on "$@")"
