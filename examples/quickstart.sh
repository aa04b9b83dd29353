#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a trained GPT: installs what is missing, builds train_gpt, and runs it.
# usage: examples/quickstart.sh [FLAG...]     (flags of train_gpt, such as --text FILE)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

source "$root/examples/setup.sh"
setup
[[ -f $root/build/build.ninja ]] ||
  cmake -S "$root" -B "$root/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORUS_TESTS=OFF
cmake --build "$root/build" --target train_gpt
exec "$root/build/examples/train_gpt" "$@"
