#!/usr/bin/env bash
# Installs what comes from Debian rather than from Python: bubblewrap and tmux for the sandbox, Chromium for the tests of
# the report, PostgreSQL for those of the store (they start a server of their own). Idempotent. Where it cannot install,
# it says what is missing and lets the caller go on.
set -uo pipefail

declare -A package_of=([bwrap]=bubblewrap [tmux]=tmux [setpriv]=util-linux [chromium]=chromium)
missing=()
for command in "${!package_of[@]}"; do
  command -v "$command" >/dev/null || missing+=("${package_of[$command]}")
done
# Debian keeps the server's programs off the path, one folder a version.
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || missing+=(postgresql)
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if sudo -n true 2>/dev/null; then as_root=(sudo -n); else as_root=(false); fi
fi
if command -v apt-get >/dev/null && [ "${as_root[0]:-}" != false ]; then
  echo "system: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && exit 0
fi
echo "system: could not install ${missing[*]}; install them by hand for the full sandbox and all tests" >&2
exit 0
