#!/bin/sh
# Runs a compilation of Hopper kernels, and fails it if ptxas had to run products of warp groups one by one, or if a
# kernel keeps variables in memory anywhere between its first product and its last, where its main loop is: the result
# would be right, and slower, the first several times. To see the second takes cuobjdump, of the CUDA Toolkit. Where
# warnings are not errors (TORUS_WERROR), it says so and goes on.
# usage: hopper_compiler.sh ON|OFF COMMAND...
strict=$1
shift
slow() {
  if [ "$strict" = ON ]; then
    echo "hopper_compiler.sh: slow kernels fail the build; -DTORUS_WERROR=OFF takes them" >&2
    exit 1
  fi
  exit 0
}
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
case $output in
*"wgmma.mma_async instructions are serialized"*) [ $status -eq 0 ] && slow ;;
esac
[ $status -eq 0 ] || exit $status

object='' tool=$(command -v cuobjdump)
while [ $# -gt 0 ]; do
  case $1 in
  -o) object=$2 ;;
  */nvcc) [ -x "${1%nvcc}cuobjdump" ] && tool=${1%nvcc}cuobjdump ;;
  esac
  shift
done
if [ -z "$tool" ]; then
  echo "${object##*/}: no product run alone; spills not looked for, as there is no cuobjdump"
  exit 0
fi
{ "$tool" --dump-sass "$object" || echo "cuobjdump failed"; } | awk -v object="${object##*/}" '
  function finish(   i, among) {
    for (i = 0; i < spills; ++i) among += spill[i] > first && spill[i] < last
    if (last) ++kernels
    if (last && among) {
      ++bad
      print object ": " among " spills between products: " kernel
    }
    first = last = spills = 0
  }
  /^cuobjdump failed$/ {
    ++bad
    print object ": cuobjdump failed: spills not looked for"
  }
  /Function :/ { finish(); kernel = $3 }
  /HGMMA/ {
    if (!first) first = NR
    last = NR
  }
  /[^A-Z](LDL|STL)[^A-Z]/ { spill[spills++] = NR }
  END {
    finish()
    if (!bad) print object ": " kernels + 0 " kernels, no product run alone, no spill between products"
    exit bad > 0
  }' >&2 || slow
