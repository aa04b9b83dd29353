#!/usr/bin/env bash
# Runs the tests of CUDA devices under NVIDIA's compute-sanitizer, some at a time in a process of their own, and ends
# with a line a tool: how many were clean, what was found, and what was left out.
# usage: tests/sanitize_cuda.sh [--programs DIR] [--jobs N] [--seconds N] [--only PATTERN] [TOOL]...
#   TOOL        memcheck, racecheck, initcheck (these three by default) or synccheck
#   --programs  where core_tests and the others are (build/tests)
#   --jobs      processes at once (half of the processors)
#   --seconds   a process may take (300)
#   --only      tests whose names match this regular expression of grep -E
set -euo pipefail
programs="$(dirname "$0")/../build/tests" jobs=$((($(nproc) + 1) / 2)) seconds=300 only=. tools=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --programs | --jobs | --seconds | --only) printf -v "${1#--}" %s "${2:?$1 needs a value}"; shift 2 ;;
    memcheck | racecheck | initcheck | synccheck) tools+=("$1"); shift ;;
    *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 1 ;;
  esac
done
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck initcheck)
PATH="$PATH:/usr/local/cuda/bin"
command -v compute-sanitizer > /dev/null || { echo "there is no compute-sanitizer here: it comes with the CUDA Toolkit"; exit 1; }

# Left out everywhere: they are about sizes that a sanitizer, hundreds of times slower, does not come to the end of;
# others run the same kernels on fewer elements. And those whose point is that CUDA refuses an allocation: memcheck
# reports each refusal.
large='PassesTwoToThe|LargeCopies|AFullDevice|TooMuchIsOneLine|MoreMatricesThan|ManyMatrices'
# Left out but under memcheck: they run again and again what others run once.
repeated='SameBitsEachTime|BitsAreTheSameEachTime|Gradcheck|TrajectoriesAreThoseOfTheCpu'
# What of a test is checked: under memcheck every kernel, else those of Torus alone: cuBLASLt's reuse shared memory and
# read padding in ways that racecheck and initcheck report.
own_kernels=()
for option in --kernel-name --kernel-regex; do
  if compute-sanitizer --help | grep -q -- "$option"; then own_kernels=("$option" kns=torus); break; fi
done

# "program test" a line, of suites and tests that have a device in their name.
tests_of() {
  "$1" --gtest_list_tests --gtest_filter='*Cuda*:*Device*' | sed 's/ *#.*//' | awk -v program="$1" '
    /^[^ ].*\.$/ { suite = $0; next } /^ / { print program, suite $1 }'
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for room in core ops layers; do tests_of "$programs/${room}_tests"; done | grep -E -- "$only" > "$folder/all" || true

# One process: the tests "a:b:c" of a program. Writes its outcome to a file beside its log.
run() {
  local tool=$1 program=$2 names=$3 log="$folder/$1-$4" status=0
  local options=(--tool "$tool" --error-exitcode 99)
  [[ $tool == memcheck ]] || options+=(${own_kernels[@]+"${own_kernels[@]}"})
  OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive timeout -k 5 "$seconds" compute-sanitizer "${options[@]}" "$program" \
    --gtest_filter="$names" > "$log" 2>&1 || status=$?
  local outcome=clean
  case $status in 0) ;; 99) outcome=errors ;; 124 | 137) outcome=slow ;; *) outcome=failed ;; esac
  if [[ $outcome == clean ]] && grep -q SKIPPED "$log" && ! grep -q ' OK ]' "$log"; then outcome=skipped; fi
  echo "$outcome $(tr ':' '\n' <<< "$names" | wc -l) $names" > "$log.outcome"
  [[ $outcome == clean ]] || { echo "--- $tool, $outcome: $names"; grep -E '^=====|Failure|error' "$log" | head -40; } || true
}

bad=0
for tool in "${tools[@]}"; do
  out="$large"
  [[ $tool == memcheck ]] || out="$large|$repeated"
  number=0 running=0
  # Rows of the op table go twenty at a time, all else alone.
  while read -r program names; do
    run "$tool" "$program" "$names" $number &
    number=$((number + 1)) running=$((running + 1))
    if ((running >= jobs)); then wait -n || true; running=$((running - 1)); fi
  done < <(grep -vE -- "$out" "$folder/all" | awk '
    $2 !~ /OpTable/ { print; next }
    { list = list (count++ ? ":" : "") $2; program = $1 }
    count == 20 { print program, list; list = ""; count = 0 }
    END { if (count) print program, list }')
  wait
  left=$(grep -cE -- "$out" "$folder/all" || true)
  count() { cat "$folder/$tool-"*.outcome 2> /dev/null | awk -v kind="$1" '$1 == kind { n += $2 } END { print n + 0 }'; }
  echo "$tool: $(count clean) tests clean, $(count errors) with errors, $(count failed) failed, $(count slow) out of" \
       "time, $(count skipped) skipped, $left left out"
  (($(count errors) + $(count failed) + $(count slow) == 0)) || bad=1
done
exit $bad
