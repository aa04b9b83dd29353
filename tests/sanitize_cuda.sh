#!/usr/bin/env bash
# Runs the tests of CUDA devices under NVIDIA's compute-sanitizer, some at a time in a process of their own. Prints a line
# for each tool and test program, with how many tests were clean and how long they took, and at the end what was found.
# Succeeds if tests ran and all of them were clean.
# usage: tests/sanitize_cuda.sh [--tool TOOL]... [--only REGEX] [--programs DIR] [--jobs N] [--seconds N]
#   --tool      memcheck, racecheck, initcheck (these three by default) or synccheck
#   --only      tests whose names (suite.test) match this regular expression of grep -E
#   --programs  where core_tests and the others are (build/tests); built with -DTORUS_SANITIZE=ON, or racecheck and
#               initcheck report what they cannot follow
#   --jobs      processes at once (half of the processors)
#   --seconds   a process may take (300)
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
stop() { echo "sanitize_cuda.sh: $*" >&2; exit 1; }
programs="$(dirname "$0")/../build/tests" jobs=$((($(nproc) + 1) / 2)) seconds=300 only=. tools=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --help) usage; exit 0 ;;
    --tool)
      [[ ${2-} =~ ^(memcheck|racecheck|initcheck|synccheck)$ ]] || stop "no tool '${2-}'; see --help"
      tools+=("$2"); shift 2 ;;
    --programs | --jobs | --seconds | --only) printf -v "${1#--}" %s "${2:?"$1 needs a value"}"; shift 2 ;;
    *) stop "what is '$1'? See --help" ;;
  esac
done
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck initcheck)
PATH="$PATH:/usr/local/cuda/bin"
command -v compute-sanitizer > /dev/null || stop "there is no compute-sanitizer here: it comes with the CUDA Toolkit"
grep -qE -- "$only" <<< "" 2> /dev/null || [[ $? -eq 1 ]] || stop "--only is no regular expression: $only"

# Left out everywhere: they are about sizes that a sanitizer, hundreds of times slower, does not come to the end of;
# others run the same kernels on fewer elements. And those whose point is that CUDA refuses an allocation: memcheck
# reports each refusal.
large='PassesTwoToThe|LargeCopies|AFullDevice|TooMuchIsOneLine|MoreMatricesThan|ManyMatrices|SectionsOfMatrices'
# Left out but under memcheck: initcheck does not see what cuBLASLt's kernels for Hopper write by bulk copies, and reports
# columns between rows that its others read and leave; under racecheck its products of measured algorithms fail.
library='GeluOnTheWay|MlpOfManyRows|MeasurementChangesNoBit|CudaProduct.AgreesWithTheCpu|FusedCuda.CrossEntropy$'
# Left out but under memcheck: they run again and again what others run once.
repeated='SameBitsEachTime|BitsAreTheSameEachTime|Gradcheck|TrajectoriesAreThoseOfTheCpu'
# What a tool is told. racecheck and synccheck look at the kernels of Torus alone: cuBLASLt's reuse shared memory in ways
# that racecheck reports. initcheck looks at all: what it did not see written counts as never written. racecheck follows
# mbarriers through threads other than the two of a hazard where it knows how, else it reports what they order.
declare -A options_of=([memcheck]="" [racecheck]="" [initcheck]="" [synccheck]="")
help=$(compute-sanitizer --help) || true
for option in --kernel-name --kernel-regex; do
  if [[ $help == *"$option"* ]]; then
    for tool in racecheck synccheck; do options_of[$tool]="$option kns=torus"; done
    break
  fi
done
indirect=--racecheck-indirect-barrier-dependency
if [[ $help == *"$indirect"* ]]; then options_of[racecheck]+=" $indirect"; fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Those of a program that have a device in their name, a line each.
tests_of() {
  "$1" --gtest_list_tests --gtest_filter='*Cuda*:*Device*' | sed 's/ *#.*//' |
    awk '/^[^ ].*\.$/ { suite = $0; next } /^ / { print suite $1 }'
}

# One process: the tests "a:b:c" of a program. Its outcome goes to a file beside its log.
run() {
  local tool=$1 program=$2 names=$3 log="$folder/$1-${2##*/}-$4" status=0 outcome=clean
  # shellcheck disable=SC2086 # none or several words
  OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive timeout -k 5 "$seconds" compute-sanitizer ${options_of[$tool]} \
    --tool "$tool" --error-exitcode 99 "$program" --gtest_filter="$names" > "$log" 2>&1 || status=$?
  case $status in 0) ;; 99) outcome=errors ;; 124 | 137) outcome=slow ;; *) outcome=failed ;; esac
  if [[ $outcome == clean ]] && grep -q SKIPPED "$log" && ! grep -q ' OK ]' "$log"; then outcome=skipped; fi
  # Tests that passed without the device: compute-sanitizer takes that for a failure.
  if grep -q "terminated before first instrumented API call" "$log" && grep -qF '[  PASSED  ]' "$log" &&
    ! grep -qF '[  FAILED  ]' "$log"; then outcome=skipped; fi
  echo "$outcome $(tr ':' '\n' <<< "$names" | wc -l) $tool $names" > "$log.outcome"
  [[ $outcome == clean || $outcome == skipped ]] ||
    { echo "--- $tool, $outcome: $names"; grep -E '^=====|Failure|error' "$log" | head -40; } || true
}

# How many tests came out so: count OUTCOME [TOOL-PROGRAM]
count() {
  cat "$folder/${2-}"*.outcome 2> /dev/null | awk -v kind="$1" '$1 == kind { n += $2 } END { print n + 0 }'
}

for tool in "${tools[@]}"; do
  out=$large
  [[ $tool == memcheck ]] || out="$large|$library|$repeated"
  for room in core ops layers; do
    program="$programs/${room}_tests" number=0 running=0 start=$SECONDS
    tests_of "$program" > "$folder/all" || stop "$program does not list its tests"
    grep -E -- "$only" "$folder/all" > "$folder/chosen" || continue
    # Rows of the op table go twenty at a time, all else alone.
    while read -r names; do
      run "$tool" "$program" "$names" $number &
      number=$((number + 1)) running=$((running + 1))
      if ((running >= jobs)); then wait -n || true; running=$((running - 1)); fi
    done < <(grep -vE -- "$out" "$folder/chosen" | awk '
      !/OpTable/ { print; next }
      { list = list (count++ ? ":" : "") $0 }
      count == 20 { print list; list = ""; count = 0 }
      END { if (count) print list }')
    wait
    of="$tool-${room}_tests"
    echo "$tool ${room}_tests: $(count clean "$of") tests clean, $(count errors "$of") with errors," \
         "$(count failed "$of") failed, $(count slow "$of") out of time, $(count skipped "$of") skipped," \
         "$(grep -cE -- "$out" "$folder/chosen" || true) left out; $((SECONDS - start)) s"
  done
done

bad=$(($(count errors) + $(count failed) + $(count slow)))
if ((bad > 0)); then
  echo "not clean:"
  cat "$folder"/*.outcome | awk '$1 ~ /errors|failed|slow/ { print "  " $3 ", " $1 ": " $4 }'
  exit 1
fi
! grep -qs "no CUDA device" "$folder"/*-[0-9]* || stop "there is no CUDA device here"
(($(count clean) > 0)) || stop "no test ran, $(count skipped) were skipped"
echo "all $(count clean) clean, $(count skipped) skipped"
