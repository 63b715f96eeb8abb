#!/bin/sh
# memcheck, racecheck, synccheck and initcheck of NVIDIA's compute-sanitizer on every kernel, over awkward shapes.
#
#   tests/gpu/sanitize.sh [FOLDER]      FOLDER takes one log a tool (default: sanitize); exit status 1 if one complains
#
# Needs a GPU and compute-sanitizer (CUDA toolkit). Only our kernels are watched: torch's would take hours. initcheck has
# to see who writes the inputs, so it watches all. Failing driver calls are no errors: kernels that a module may not have
# are asked for by name.
set -u
cd "$(dirname "$0")/../.."
out=${1:-sanitize}
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "no compute-sanitizer: install the CUDA toolkit, or set SANITIZER" >&2; exit 2; }
mkdir -p "$out"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # one allocation a tensor, so that a byte too far is seen
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
$python -m tests.gpu.sanitize_calls --build || exit 1 # outside of the tools: compilers are slow under them
failed=0
for tool in memcheck racecheck synccheck initcheck; do
  echo "$tool"
  filter='--kernel-name regex=rope|fna'
  [ $tool = initcheck ] && filter=
  # shellcheck disable=SC2086
  timeout "${LIMIT_S:-600}" "$sanitizer" --tool $tool --report-api-errors no --error-exitcode 1 $filter \
    "$python" -m tests.gpu.sanitize_calls > "$out/$tool.log" 2>&1 || failed=1
  grep -E "ERROR SUMMARY|RACECHECK SUMMARY|launched" "$out/$tool.log" || echo "no summary: see $out/$tool.log"
done
exit $failed
