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
ctest --preset asan -j "$cores"
ctest --preset release -j "$cores"
