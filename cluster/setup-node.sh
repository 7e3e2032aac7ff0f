#!/usr/bin/env bash
# Installs raymega from the mounted repository into ~/raymega-env. Again, with the same requirements,
# it returns at once and asks no package index: `ray up` runs it at each start of a node.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
environment="$HOME/raymega-env"
[ ! -f "$HOME/.ray/auth_token" ] || chmod 600 "$HOME/.ray/auth_token"
wanted="$({ sed '/^\[tool/,$d' "$repository/pyproject.toml"; cat "$repository/constraints.txt" "$0"; } | sha256sum)"
[ "$(cat "$environment/installed" 2> /dev/null)" = "$wanted" ] && exit 0
[ -x "$environment/bin/python" ] || python3 -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check \
  --constraint "$repository/constraints.txt" --editable "$repository"
"$environment/bin/raymega" --help > /dev/null
# `ray down` runs a bare `ray stop`, and reports success when there is no such command.
path='export PATH=$HOME/raymega-env/bin:$PATH'
grep --quiet --line-regexp --fixed-strings "$path" "$HOME/.bashrc" 2> /dev/null || echo "$path" >> "$HOME/.bashrc"
echo "$wanted" > "$environment/installed"
