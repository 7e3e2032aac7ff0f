#!/usr/bin/env bash
# Installs raymega from the mounted repository into ~/raymega-env; again is a matter of seconds.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
environment="$HOME/raymega-env"
[ -x "$environment/bin/python" ] || python3 -m venv "$environment"
"$environment/bin/pip" install --quiet --disable-pip-version-check \
  --constraint "$repository/constraints.txt" --editable "$repository"
"$environment/bin/raymega" --help > /dev/null
