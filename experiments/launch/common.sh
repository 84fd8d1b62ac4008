# shellcheck shell=bash
# Code that the launch scripts share; source it, do not run it. Sourcing it answers --help.

# Prints an error and exits with status 2, as the commands do for wrong input.
die() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "[$(basename "$0")] $*" >&2
}

# Prints the comment at the head of the script, and exits, if its first argument asks for it.
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
    command -v "$name" >/dev/null || die "$name is not installed, or not on PATH"
  done
}

# Dies unless WORKDIR can be opened as a folder on the machines that train.
check_workdir() {
  case "$WORKDIR" in
    *://*) die "WORKDIR=$WORKDIR is not a folder: give a path on a mounted file system" ;;
    /*) ;;
    *) die "WORKDIR=$WORKDIR must be an absolute path" ;;
  esac
}

# Prints the words as one line that a shell reads back as the same words.
quoted() {
  local word line=""
  for word in "$@"; do
    line="$line $(printf '%q' "$word")"
  done
  echo "${line# }"
}

# What an exit status of a training command asks for: done, stop (a person must look), again (it was interrupted and
# has saved) or failed (it, or the machine under it, died).
verdict() {
  case "$1" in
    0) echo "done" ;;
    2 | 3 | 4) echo "stop" ;;
    130 | 143) echo "again" ;;
    *) echo "failed" ;;
  esac
}

# Reads the action, the first argument of the script, or dies; call `shift` after it.
take_action() {
  action="${1:-}"
  [ -n "$action" ] || die "name an action: see $(basename "$0") --help"
}

unknown_action() {
  die "unknown action '$action': see $(basename "$0") --help"
}
