#!/usr/bin/env bash
# Checks maxmoe on a machine with a GPU: in under 10 minutes, each step bounded, without a network. In the repository's
# root:
#
#     bash tests/device/run.sh
#     bash tests/device/run.sh --device cpu --tiny    # the dry run, with the core that is installed
#
# results.json, log.txt and the C++ core come to $OUT, runs/device by default. STEPS="operators speed" runs some of the
# steps. `python -m benchmarks.device_report $OUT` makes tables of results.json, and says for each operator and size
# which implementation was faster. MAXMOE_CUDA_KERNELS=all,-gmm switches a kernel off that fails.
#
# First what must be right, then how fast it is, then layers and models. The step "tests" needs the kernels' GoogleTest
# suite, build/cuda/maxmoe_cuda_tests of `make cuda-tests`, in .device, "rows" times candidates of kernels if
# libmaxmoe_cuda_candidates.so of `make cuda-candidates` is there too, "sanitizers" compute-sanitizer and "ncu" the
# profiler of that name, which writes ncu.csv; without them they are left out.
#
# The core is built for the torch that is there, also for one that is older than maxmoe supports (MAXMOE_ANY_TORCH).
# That needs a C++ compiler, cmake, ninja and the headers of Python there, and wheels in .device, which git ignores:
#
#     python3 -m pip download --no-deps --only-binary=:all: --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 --platform any --python-version 3.12 -d .device 'cmeel-eigen>=3.4' 'pybind11>=3'
#
# With an nvcc there the CUDA kernels are built as well; operators are then checked and timed with and without them.
#
# A core in .device, such as the libmaxmoe_torch2_11.so of an earlier run, is used as it is, with the libmaxmoe_cuda.so
# beside it. Take them out after a change of C++.
set -uo pipefail
: "${OUT:=runs/device}" "${PYTHON:=python3}" "${STEPS:=tests operators sanitizers rows speed kernels ncu layers models}"
declare -A limits=([operators]=60 [rows]=40 [layers]=50 [models]=50 [speed]=50 [kernels]=40 [threads]=100)
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
  export MAXMOE_ANY_TORCH=1 CMAKE_PREFIX_PATH="$PWD/build/wheels/cmeel.prefix" PYTHONPATH="$PWD/build/wheels:$PYTHONPATH"
  export CMAKE_ARGS="-DMAXMOE_ISAS=runnable -DMAXMOE_UNITY_BATCH_SIZE=2 ${CMAKE_ARGS:-}"
  step "Eigen and pybind11" 20 "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target build/wheels .device/*.whl
  step "build" 150 "$PYTHON" setup.py -q build_ext --inplace
  cp -r maxmoe/libmaxmoe_torch*.so maxmoe/torch*.* "$OUT"
  compgen -G maxmoe/libmaxmoe_cuda.so && cp maxmoe/libmaxmoe_cuda.so "$OUT"
}

kernel_tests() { # a failed assertion makes the device unusable for the process
  if [[ ! -x .device/maxmoe_cuda_tests ]]; then
    echo "== tests: left out, .device has no maxmoe_cuda_tests"
  else
    CUDA_LAUNCH_BLOCKING=1 step "tests" 20 .device/maxmoe_cuda_tests --gtest_brief=1 --gtest_filter=-*Error*
  fi
}

sanitizers() { # few small operators; every tensor has an allocation of its own
  if [[ $device == cpu ]] || ! command -v compute-sanitizer >/dev/null; then
    echo "== sanitizers: left out, there is no compute-sanitizer or no GPU"
    return
  fi
  for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$PYTHON" -W ignore -m device.operators --here --tiny --out "$OUT/$tool.json" --seconds 30
  done
}

ncu_of_kernels() { # the first launches of six kernels: share of the memory's speed, and what warps wait for
  if [[ $device == cpu ]] || ! command -v ncu >/dev/null; then
    echo "== ncu: left out, there is no ncu or no GPU"
    return
  fi
  step "ncu" 60 ncu --target-processes all --launch-count 12 --section SpeedOfLight --section WarpStateStats --csv \
    --kernel-name 'regex:gather_rows|sum_rows|multiply_rows|add_slots|activate_elements|backward_of_rows' \
    --log-file "$OUT/ncu.csv" "$PYTHON" -W ignore -m device.speed --here --out "$OUT/ncu.json" --seconds 20
}

[[ $device == cpu ]] || nvidia-smi
rm -f "$OUT/results.json"
if compgen -G ".device/libmaxmoe_torch*.so"; then
  cp -r .device/libmaxmoe_torch*.so .device/torch*.* maxmoe/
  compgen -G .device/libmaxmoe_cuda.so && cp .device/libmaxmoe_cuda.so maxmoe/
elif [[ $device == cuda ]]; then
  build
fi
[[ $* == *--tiny* ]] || step "info" 20 "$PYTHON" -m maxmoe info
for name in $STEPS; do
  case $name in
    tests) kernel_tests ;;
    sanitizers) sanitizers ;;
    ncu) ncu_of_kernels ;;
    *) check "$name" "${limits[$name]}" "$name" "$@" ;;
  esac
done
echo "failed:${failed:- nothing}"
[[ -z $failed ]]
