#!/usr/bin/env bash
# compute-sanitizer's four tools over a reduced matrix of calls, forward and backward, on one GPU.
#
#     tools/sanitize.sh [TOOL...]        # default: memcheck racecheck synccheck initcheck
#     CASES=causal tools/sanitize.sh     # only cases whose name holds that word (sanitize_cases.py --list)
#
# flash_attn has to be installed with a GPU engine. Prints one line a tool; what a tool found goes to standard
# error in full, with seconds a case. Exit status 1 if any tool found anything, a case failed, or no case ran;
# 2 without compute-sanitizer, or if a tool does not find a bug that is there (sanitize_bugs.cu, by nvcc). PYTHON
# (default python3) runs the cases; SANITIZER is the tool, if not on the path.
#
# Only our kernels are instrumented (their names hold "flash"), except by initcheck, which has to see every
# write. Without torch's caching allocator each tensor is an allocation of its own, so that memcheck sees the
# first byte past it, and initcheck what a former tensor left.
#
# racecheck and initcheck need kernels built with FLASH_ATTN_SANITIZE=1. In those every lane of a warp arrives at
# barriers where otherwise one does for all: racecheck does not know that __syncwarp orders what they did, and
# would report every buffer that is used again; where one warpgroup hands another one numbers both wait, as it does
# not know what bar.arrive orders either. The counter for which Hopper's blocks wait in memory that may hold
# anything is cleared, and no output is stored by the copy engine, whose writes initcheck does not see.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sanitizer=${SANITIZER:-$(command -v compute-sanitizer)}
[ -n "$sanitizer" ] || sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
[ -x "$sanitizer" ] || { echo "there is no compute-sanitizer; it comes with the CUDA toolkit" >&2; exit 2; }
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck initcheck)
log=$(mktemp)
bugs=$(mktemp)
trap 'rm -f "$log" "$bugs"' EXIT
failed=0
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
"$nvcc" -arch=native -o "$bugs" "$here/sanitize_bugs.cu" || exit 2

# A filter that matches no kernel would find nothing.
if ! "${PYTHON:-python3}" "$here/sanitize_cases.py" "${tools[0]}" -k "${CASES:-}" --kernels >"$log" 2>&1; then
    cat "$log" >&2
    echo "kernels: FAILED"
    exit 1
fi
echo "kernels: $(grep -c flash "$log") with flash in their names are watched"

for tool in "${tools[@]}"; do
    ours=(--kernel-name kns=flash) uncached=() more=() begin=$SECONDS status=0
    case $tool in
        # What torch tries out on the driver as it starts is no finding.
        memcheck) uncached=(PYTORCH_NO_CUDA_MEMORY_CACHING=1) more=(--report-api-errors no --padding 64) ;;
        initcheck) uncached=(PYTORCH_NO_CUDA_MEMORY_CACHING=1) ours=() ;;
        racecheck) more=(--racecheck-report all) ;;
        synccheck) ;;
        *) echo "$tool is none of memcheck, racecheck, synccheck, initcheck" >&2; exit 2 ;;
    esac
    "$sanitizer" --tool "$tool" ${ours[@]+"${ours[@]}"} "$bugs" "$tool" >"$log" 2>&1
    if ! grep -qE 'SUMMARY: [1-9][0-9]* (error|hazard)' "$log"; then
        cat "$log" >&2
        echo "$tool: does not see bugs on this machine"
        exit 2
    fi
    env ${uncached[@]+"${uncached[@]}"} "$sanitizer" --tool "$tool" --error-exitcode 9 \
        ${ours[@]+"${ours[@]}"} ${more[@]+"${more[@]}"} \
        "${PYTHON:-python3}" "$here/sanitize_cases.py" "$tool" -k "${CASES:-}" >"$log" 2>&1 || status=$?
    ran=$(grep -oE '^[0-9]+ cases$' "$log" || echo "not all cases")
    found=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | tail -n 1)
    if [ $status = 0 ] && [[ $ran != not* ]] && [[ $found =~ SUMMARY:\ 0\ (errors|hazards) ]]; then
        echo "$tool: clean, $ran, $((SECONDS - begin)) s"
    else
        cat "$log" >&2
        echo "$tool: FAILED (status $status), $ran, ${found:-no summary}, $((SECONDS - begin)) s"
        failed=1
    fi
done
exit $failed
