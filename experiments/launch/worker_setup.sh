#!/usr/bin/env bash
# Installs the project on a TPU VM: makes .venv with JAX for TPUs in the checkout that contains this script.
#
#   worker_setup.sh [ACCELERATOR [EXTRAS]]      ACCELERATOR is tpu (the default) or cuda. EXTRAS are further extras of
#                                               the package, such as buckets
#
# Images of TPU VMs have Python 3.10. If there is no Python 3.11 or newer, uv installs 3.12 for this user only.
# A repeated call takes a second.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=""
for name in python3.13 python3.12 python3.11 python3; do
  if "$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$name"
    break
  fi
done
if [ -z "$python" ]; then
  python3 -m pip install --quiet --user uv
  python3 -m uv python install --quiet 3.12
  python="$(python3 -m uv python find 3.12)"
fi
make setup ACCELERATOR="${1:-tpu}" PYTHON="$python"
[ -z "${2:-}" ] || .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$2]"
