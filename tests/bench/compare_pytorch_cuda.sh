#!/usr/bin/env bash
# Times Torus and PyTorch in turn on one CUDA device, attention and training steps, and prints both with their ratios,
# memory, clocks and power. Wants the benchmarks built (-DTORUS_TESTS=ON) and a python3 that has PyTorch ($PYTHON);
# FlashAttention-3 and NATTEN take part where they are installed.
# usage: tests/bench/compare_pytorch_cuda.sh [--only REGEX] [attention|train]...
#   --only   problems of attention whose names match; FlexAttention compiles each of its own for many seconds
set -euo pipefail
export LC_ALL=C
only=() works=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    --only) only=("${2:?"--only needs a value"}"); shift 2 ;;
    attention | train) works+=("$1"); shift ;;
    *) echo "compare_pytorch_cuda.sh: expected attention, train or --only REGEX, got '$1'" >&2; exit 1 ;;
  esac
done
[[ ${#works[@]} -gt 0 ]] || works=(attention train)
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
script=tests/bench/compare_pytorch_cuda.py
"$python" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null ||
  { echo "$python has no PyTorch with CUDA" >&2; exit 1; }
results=$(mktemp -d) watcher=
trap '[[ -z $watcher ]] || kill "$watcher" 2> /dev/null || true; rm -rf "$results"' EXIT
part() {  # part NAME COMMAND...: its lines, each with the time, while the device is watched
  local name=$1 line start=$SECONDS
  shift
  stdbuf -oL nvidia-smi --format=csv,noheader,nounits --loop-ms=50 \
    --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw.instant,temperature.gpu,memory.used \
    > "$results/$name-watch" 2> /dev/null &
  watcher=$!
  echo "--- $name" >&2
  { echo "starts"; "$@"; } | while IFS= read -r line; do echo "$EPOCHREALTIME $line"; done | tee "$results/$name" >&2
  kill "$watcher" 2> /dev/null || true
  watcher=
  echo "--- $name took $((SECONDS - start)) s" >&2
}
for work in "${works[@]}"; do
  chosen=()
  [[ $work != attention ]] || chosen=(${only[@]+"${only[@]}"})
  part "torus-$work" "build/tests/${work}_cuda_bench" ${chosen[@]+"${chosen[@]}"}
  part "pytorch-$work" "$python" "$script" "$work" ${chosen[@]+"${chosen[@]}"}
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$python" -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'
"$python" "$script" table "$results"
