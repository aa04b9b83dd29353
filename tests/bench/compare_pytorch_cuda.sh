#!/usr/bin/env bash
# Times Torus and PyTorch in turn on one CUDA device, attention and training steps, and prints both with their ratios,
# memory, clocks and power. Wants the benchmarks built (-DTORUS_TESTS=ON) and a python3 that has PyTorch ($PYTHON).
# usage: tests/bench/compare_pytorch_cuda.sh [attention|train]...
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
script=tests/bench/compare_pytorch_cuda.py
"$python" -c 'import torch; assert torch.cuda.is_available()' || { echo "$python has no PyTorch with CUDA"; exit 1; }
results=$(mktemp -d) watcher=
trap '[[ -z $watcher ]] || kill "$watcher" 2> /dev/null || true; rm -rf "$results"' EXIT
part() {  # part NAME COMMAND...: its output, while the device is watched
  local name=$1
  shift
  nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used --format=csv,noheader,nounits \
    --loop-ms=200 > "$results/$name-watch" 2> /dev/null &
  watcher=$!
  echo "--- $name" >&2
  "$@" | tee "$results/$name" >&2
  kill "$watcher" 2> /dev/null || true
  watcher=
}
[[ $# -gt 0 ]] || set -- attention train
for work in "$@"; do
  part "torus-$work" "build/tests/${work}_cuda_bench"
  part "pytorch-$work" "$python" "$script" "$work"
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$python" -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'
"$python" "$script" table "$results"
