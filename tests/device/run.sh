#!/usr/bin/env bash
# Checks maxmoe on a machine with a GPU: in under 10 minutes, each step bounded, without a network. In the repository's
# root:
#
#     bash tests/device/run.sh
#     bash tests/device/run.sh --device cpu --tiny    # the dry run, with the core that is installed
#
# results.json, log.txt and the C++ core come to $OUT, runs/device by default. STEPS="operators speed" runs some of the
# steps, THREADS_SECONDS bounds the longest one. `python -m benchmarks.device_report $OUT` makes tables of results.json.
#
# The core is built for the torch that is there, also for one that is older than maxmoe supports (MAXMOE_ANY_TORCH).
# That needs a C++ compiler, cmake and ninja there, and Eigen as a wheel in .device, which git ignores:
#
#     python3 -m pip download --no-deps --only-binary=:all: --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 --platform any --python-version 3.12 -d .device 'cmeel-eigen>=3.4'
#
# A core in .device, such as the libmaxmoe_torch2_11.so of an earlier run, is used as it is. Take it
# out after a change of C++.
set -uo pipefail
: "${OUT:=runs/device}" "${PYTHON:=python3}" "${STEPS:=operators layers models speed kernels threads}"
: "${THREADS_SECONDS:=100}"
declare -A limits=([operators]=60 [layers]=50 [models]=50 [speed]=50 [kernels]=40)
device=cuda
[[ " $* " == *" --device cpu "* ]] && device=cpu
mkdir -p "$OUT"
exec > >(tee "$OUT/log.txt") 2>&1
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1
failed=""

step() { # step NAME SECONDS COMMAND...
  echo "== $1"
  local start=$SECONDS code=0
  timeout -k 5 "$2" "${@:3}" || code=$?
  echo "== $1: exit code $code after $((SECONDS - start)) s"
  ((code == 0)) || failed+=" '$1'"
}

check() { # check NAME SECONDS STEP [OPTION...]: no case begins in the last third of the time
  step "$1" "$2" "$PYTHON" -W ignore -m "device.$3" --out "$OUT/results.json" --seconds $(($2 * 2 / 3)) "${@:4}"
}

build() {
  export MAXMOE_ANY_TORCH=1 CMAKE_PREFIX_PATH="$PWD/build/eigen/cmeel.prefix"
  export CMAKE_ARGS="-DMAXMOE_ISAS=runnable -DMAXMOE_UNITY_BATCH_SIZE=2 ${CMAKE_ARGS:-}"
  step "Eigen" 20 "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target build/eigen .device/*.whl
  step "build" 150 "$PYTHON" setup.py -q build_ext --inplace
  cp maxmoe/libmaxmoe_torch*.so "$OUT"
}

[[ $device == cpu ]] || nvidia-smi
rm -f "$OUT/results.json"
if compgen -G ".device/libmaxmoe_torch*.so"; then
  cp .device/libmaxmoe_torch*.so maxmoe/
elif [[ $device == cuda ]]; then
  build
fi
[[ $* == *--tiny* ]] || step "info" 20 "$PYTHON" -m maxmoe info
for name in $STEPS; do
  if [[ $name != threads ]]; then
    check "$name" "${limits[$name]}" "$name" "$@"
  else
    check "threads" $((THREADS_SECONDS / 2)) threads "$@"
    # The kernels that processors without matrix units (AMX) and without AVX-512 run.
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 check "threads, no AMX" $((THREADS_SECONDS / 4)) threads "$@"
    MAXMOE_ISA=avx2 check "threads, AVX2" $((THREADS_SECONDS / 4)) threads "$@"
  fi
done
echo "failed:${failed:- nothing}"
[[ -z $failed ]]
