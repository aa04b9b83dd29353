#!/bin/sh
# Runs a compilation, and fails it if ptxas had to run products of warp groups one by one: the result would be right,
# and several times slower.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
case $output in
*"wgmma.mma_async instructions are serialized"*) exit 1 ;;
esac
exit $status
