#!/usr/bin/env bash
# Times Torus and PyTorch in turn on the same two cores, and prints both with their ratios, rates beside that of a
# product of 2048^3, and what each op takes of a training step.
# usage: tests/bench/compare_pytorch.sh [ROUNDS]    (PYTORCH_ENVIRONMENT: a virtual environment of one's own)
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/setup.sh
setup libgtest-dev librapidcheck-dev libbenchmark-dev python3-venv
cmake --preset release -DTORUS_TESTS=ON > /dev/null
cmake --build --preset release --target train_bench attention_bench
environment=${PYTORCH_ENVIRONMENT:-build/pytorch} torch=2.15.0  # that of the figures in the README
python=$environment/bin/python
has_torch() { "$python" -c "import torch; assert torch.__version__.split('+')[0] == '$torch'" 2> /dev/null; }
if ! has_torch; then
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet "torch==$torch" numpy
fi
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export OMP_NUM_THREADS=2
cores="taskset -c 0,1"
for round in $(seq "${1:-3}"); do
  $cores "$python" tests/bench/compare_pytorch.py run > "$results/pytorch-$round.json"
  for program in train attention; do
    $cores python3 tests/bench/compare_pytorch.py peak build/tests/${program}_bench \
      --benchmark_out="$results/torus-$program-$round.json" --benchmark_out_format=json \
      > "$results/peak-$program-$round"
  done
done
"$python" tests/bench/compare_pytorch.py table "$results"
