#!/usr/bin/env bash
# Trains on a TPU slice of a GKE cluster that has JobSet installed. Run it where kubectl reaches the cluster.
#
#   gke.sh render [FLAGS]    prints the JobSet that gke.yaml describes; FLAGS go to cope-jax train
#   gke.sh apply [FLAGS]     creates the JobSet
#   gke.sh delete            deletes the JobSet; its pods save first
#
# The JobSet restarts its pods after every failure and preemption, at most MAX_RESTARTS times. It does not restart them
# if cope-jax train exits with 2, 3 or 4, because these statuses need a person.
#
# Required variables:
#   NAME              name of the JobSet
# Required for render and apply:
#   IMAGE             image that contains the project, see Dockerfile
#   TPU               label of the nodes: tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, …
#   TOPOLOGY          topology of the slice, such as 4x4
#   HOSTS             number of machines of the slice
#   CHIPS_PER_HOST    number of chips per machine; the slice has HOSTS · CHIPS_PER_HOST chips
#   CLAIM             a PersistentVolumeClaim that all pods can write to (ReadWriteMany)
#   MOUNT             absolute path where pods mount the claim
#   CONFIG            a file of cope_jax/configs
#   WORKDIR           a folder below MOUNT, or gs://BUCKET/PATH
# Optional variables: MAX_RESTARTS (default 1000).
set -euo pipefail
folder="$(dirname "${BASH_SOURCE[0]}")"
. "$folder/common.sh"

render() {
  need IMAGE TPU TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM MOUNT CONFIG WORKDIR
  check_workdir
  case "$WORKDIR" in
    "$MOUNT"/* | *://*) ;;
    *) die "WORKDIR=$WORKDIR must be below MOUNT=$MOUNT: all other files of a pod are lost" ;;
  esac
  export NAME IMAGE TPU TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM MOUNT MAX_RESTARTS="${MAX_RESTARTS:-1000}"
  python3 -c '
import json, os, string, sys
template, *command = sys.argv[1:]
print(string.Template(open(template).read()).substitute(os.environ, COMMAND=json.dumps(command)))
' "$folder/gke.yaml" python -m cope_jax train --config="$CONFIG" --workdir="$WORKDIR" --distributed=on "$@"
}

take_action "$@"
shift
need NAME
case "$action" in
  render) render "$@" ;;
  apply)
    need_program kubectl
    manifest="$(render "$@")"
    kubectl apply --filename=- <<<"$manifest"
    ;;
  delete)
    need_program kubectl
    kubectl delete jobset "$NAME"
    ;;
  *) unknown_action ;;
esac
