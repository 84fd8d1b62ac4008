#!/usr/bin/env bash
# Runs a command as one of several tasks under srun, which reports only the highest status of all its tasks.
#
#   task.sh COMMAND...
#
# Exits with the status of COMMAND, but with 252, 253 and 254 for 2, 3 and 4. So a status that needs a person is higher
# than the statuses of other tasks that die after this task ends. SIGTERM is passed on.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 1 ] || die "task.sh needs a command: see task.sh --help"

"$@" &
child=$!
trap 'cut=yes; kill -TERM "$child" 2>/dev/null || true' TERM
cut=yes
while [ -n "$cut" ]; do # a signal ends `wait` early
  cut=""
  status=0
  wait "$child" || status=$?
done
case "$status" in
  2 | 3 | 4) exit $((status + 250)) ;;
esac
exit "$status"
