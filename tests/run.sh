#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test that this machine can run, with sanitizers first, then as
# released. Ends with CTest's summary.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/setup.sh
setup ccache libgtest-dev librapidcheck-dev
# Programs that write and read the same formats. Where they cannot be had, the tests that ask them are skipped.
setup python3-h5py minc-tools ismrmrd-tools || echo "run.sh: going on without python3-h5py, minc-tools, ismrmrd-tools"

cores=$(nproc)
for preset in asan release; do
  cmake --preset "$preset" -DTORUS_TESTS=ON -DTORUS_EXAMPLES=ON
  cmake --build --preset "$preset" -j "$cores"
done
# CTest's summary names the tests that were skipped; a line before it says how many they are.
count_skipped() {
  local line skipped=0
  while IFS= read -r line; do
    [[ $line != *'***Skipped'* ]] || skipped=$((skipped + 1))
    [[ ! $line =~ ^[0-9]+%\ tests\ passed ]] || echo "$skipped tests skipped"
    printf '%s\n' "$line"
  done
}
ctest --preset asan -j "$cores" | count_skipped
ctest --preset release -j "$cores" | count_skipped
