#!/usr/bin/env bash
# Creates .venv from requirements.lock. Does nothing where that has been done for this lock file already.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.12 python3.13 python3.14 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: MetaKernelBench needs Python 3.12, 3.13 or 3.14 and found none." >&2
  echo "hint: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
  exit 2
}

if [ ! -x .venv/bin/python ]; then
  python=$(find_python)
  echo "setup: creating .venv with $("$python" --version)"
  "$python" -m venv .venv
fi
echo "setup: installing the pinned packages (several gigabytes the first time, about two minutes)"
[ -x .venv/bin/uv ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
# Compiled now, because a sandbox sees the packages read-only and would compile them again at every import.
.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --requirement requirements.lock
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --editable .
date -u +%FT%TZ > .venv/.complete
