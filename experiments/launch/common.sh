# shellcheck shell=bash
# Code that the launch scripts share. Source this file, do not run it. It also handles the argument --help.

# Prints an error and exits with status 2, as the commands do for wrong input.
die() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "[$(basename "$0")] $*" >&2
}

# If the first argument is -h or --help: prints the comment at the head of the script, and exits.
case "${1:-}" in
  -h | --help)
    awk 'NR > 1 && !/^#/ {exit} NR > 1 && !/^#SBATCH/ {sub(/^# ?/, ""); print}' "${script:-$0}"
    exit 0
    ;;
esac

# Dies unless every named variable is set and not empty.
need() {
  local name missing=""
  for name in "$@"; do
    [ -n "${!name:-}" ] || missing="$missing $name"
  done
  [ -z "$missing" ] || die "set$missing in the environment: see $(basename "$0") --help"
}

# Dies unless every named program is installed.
need_program() {
  local name
  for name in "$@"; do
    command -v "$name" >/dev/null || die "$name is not installed, or not on PATH: install it"
  done
}

# Dies unless WORKDIR is the same on all machines that train: a path from the root, or in a bucket.
check_workdir() {
  case "$WORKDIR" in
    gs://* | s3://* | /*) ;;
    *) die "WORKDIR=$WORKDIR must be an absolute path or in a bucket: begin it with / or gs:// or s3://" ;;
  esac
}

# Prints the words as one line, quoted so that a shell reads the same words.
quoted() {
  local word line=""
  for word in "$@"; do
    line="$line $(printf '%q' "$word")"
  done
  echo "${line# }"
}

# Prints what to do after an exit status of a training command: done, stop (a person must look at it), again (the
# training was interrupted and has saved) or failed (the training or its machine died).
verdict() {
  case "$1" in
    0) echo "done" ;;
    2 | 3 | 4) echo "stop" ;;
    130 | 143) echo "again" ;;
    *) echo "failed" ;;
  esac
}

# Reads the action, the first argument of the script. Dies if it is missing. Call `shift` afterwards.
take_action() {
  action="${1:-}"
  [ -n "$action" ] || die "name an action: see $(basename "$0") --help"
}

unknown_action() {
  die "unknown action '$action': see $(basename "$0") --help"
}
