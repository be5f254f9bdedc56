# make train   sets up everything in .venv and trains a small model on text   (ARGS="--help": its options)
# make test    sets up everything in .venv and runs all tests                 (ARGS="-n 0 -k gmm": of pytest)
#
# TORCH=2.15.0 sets up another torch, in .venv-torch2.15.0, for both commands.
# For developers: make lint, format, docs, sanitize, test-aarch64, cuda, benchmark, wheel,
# try-wheel, clean (CONTRIBUTING.md).

# pip does not compile modules to bytecode, because that takes 20 s for torch alone. Python compiles a module when it is
# first imported. PYTHONDONTWRITEBYTECODE, which many containers set, would make every process compile again.
export PIP_COMPILE := no
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.PHONY: help setup train test lint lint-python lint-cpp format docs sanitize test-aarch64 cuda cuda-tests \
  cuda-candidates benchmark wheel try-wheel clean

PYTHON ?= python3
ARGS ?=
# The releases of torch in pyproject.toml. The environment of the first one is .venv, of every other one
# .venv-torch<release>.
TORCHES := $(shell sed -n 's/^torch = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
TORCH ?= $(firstword $(TORCHES))
# The environment with a release of torch.
environment = .venv$(if $(filter-out $(firstword $(TORCHES)),$(1)),-torch$(1))
VENV := $(call environment,$(TORCH))
BIN := $(VENV)/bin

# The list of pyproject.toml.
BUILD_REQUIRES := $(shell sed -n '/^requires = \[/,/^\]/s/^ *\("[^"]*"\),$$/\1/p' pyproject.toml)
# PyPI's torch for Linux depends on CUDA, some gigabytes. Without an NVIDIA GPU the CPU build comes from this index.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
REACHABLE = import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)
PIP_TORCH = $(if $(TORCH_INDEX),$(shell $(BIN)/python -c '$(REACHABLE)' "$(TORCH_INDEX)" 2>/dev/null \
  && echo --extra-index-url "$(TORCH_INDEX)" || echo "$(TORCH_INDEX) cannot be reached: torch comes from pip's own index" >&2))
KERNELS := $(shell find cpp/kernels -type f)
CORE := pyproject.toml setup.py CMakeLists.txt $(wildcard cpp/*.cpp cpp/*.h cpp/cmake/*.cmake cpp/ops/* cpp/ops/*/* cpp/python/*) $(KERNELS)
CPP = $(shell find cpp -name "*.cpp" -o -name "*.h" -o -name "*.cu")

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(VENV)/examples

train: $(VENV)/examples
	@$(BIN)/python examples/pretrain.py $(ARGS)

# A file stays in one process, for its fixtures. Files keep their order: otherwise files with few, long tests would run
# last. On two processors, three processes took 585 s, two 540 s.
IN_TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/test
	@$(BIN)/python -m pytest $(IN_TWO_PROCESSES) $(ARGS)

# The stubs of maxmoe._C, from the signatures and docstrings of the module.
stubs = $(BIN)/pybind11-stubgen maxmoe._C --output-dir build/stubs >/dev/null && $(BIN)/ruff format --quiet build/stubs
# `make -j2 lint` runs both at the same time.
lint: lint-python lint-cpp

lint-python: $(VENV)/dev
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(stubs)
	diff maxmoe/_C.pyi build/stubs/maxmoe/_C.pyi || { echo "maxmoe/_C.pyi is not the module's: make format"; exit 1; }
	$(BIN)/python tests/repository/check_sizes.py

lint-cpp: $(VENV)/dev
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	EIGEN="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cmeel.prefix/include/eigen3"
	tidy() { xargs -P "$$(getconf _NPROCESSORS_ONLN)" -I {} $(BIN)/clang-tidy --quiet {} "$$@" -std=c++20 -Icpp -isystem "$$EIGEN"; }
	printf '%s\n' $(filter-out %.amx.cpp,$(filter %.cpp,$(KERNELS))) | tidy -- -DMAXMOE_ISA_NAMESPACE=baseline
	# The analyzer takes the matrices of absent products for ones that are read.
	printf '%s\n' $(filter %.amx.cpp,$(KERNELS)) | tidy '--checks=-clang-analyzer-core.N*' -- \
	  -DMAXMOE_ISA_NAMESPACE=amx_emulated -DMAXMOE_EMULATES_TILES=1

format: $(VENV)/dev
	@$(stubs)
	cp build/stubs/maxmoe/_C.pyi maxmoe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The site, from docs/ and the docstrings: build/docs/index.html. A warning is an error, including unresolved
# references.
docs: $(VENV)/docs
	@$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	echo "build/docs/index.html"

# The kernels' GoogleTest suite under the address and undefined-behaviour sanitizers, for the instruction sets of this
# machine.
sanitize: $(VENV)/test
	@export PATH="$(abspath $(BIN)):$$PATH"
	cmake -S . -B build/sanitize -GNinja -DMAXMOE_BUILD_OPERATORS=OFF -DMAXMOE_BUILD_TESTS=ON -DMAXMOE_DEVELOPER=ON \
	  -DMAXMOE_SANITIZE=address,undefined -DMAXMOE_ISAS=runnable -DPython_EXECUTABLE="$(abspath $(BIN))/python"
	cmake --build build/sanitize
	ctest --test-dir build/sanitize --parallel "$$(getconf _NPROCESSORS_ONLN)" --no-tests=error --output-on-failure

# The kernels' GoogleTest suite for aarch64, cross-compiled and run under an emulator, so that the sources stay portable.
test-aarch64: $(VENV)/test
	@if ! command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null || ! test -d /usr/src/googletest; then
	  echo "Missing system packages. On Debian or Ubuntu: sudo apt-get install g++-aarch64-linux-gnu qemu-user googletest"
	  exit 1
	fi
	export PATH="$(abspath $(BIN)):$$PATH"
	cmake -S . -B build/aarch64 -GNinja -DCMAKE_TOOLCHAIN_FILE=cpp/cmake/aarch64.cmake -DMAXMOE_BUILD_OPERATORS=OFF \
	  -DMAXMOE_BUILD_TESTS=ON -DMAXMOE_DEVELOPER=ON -DPython_EXECUTABLE="$(abspath $(BIN))/python"
	cmake --build build/aarch64
	ctest --test-dir build/aarch64 --parallel "$$(getconf _NPROCESSORS_ONLN)" --no-tests=error --output-on-failure

# build/cuda/libmaxmoe_cuda.so: the CUDA kernels for compute capability 8.0, 9.0, 10.0 and 12.0 and, as PTX, for later
# ones. Two PTX versions are enough: with PTX for 9.0 and 12.0 as well, the machine code was the same. Compiled by the
# nvcc of PyPI in a separate environment; no GPU is needed. The report of registers and stacks and the machine code are
# checked.
CUDA_PACKAGES := nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 \
  nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37
CUDA_HOME = $(firstword $(wildcard $(abspath .venv-cuda)/lib/python*/site-packages/nvidia/cu13))
NVCC_FLAGS := -std=c++20 -O3 --expt-relaxed-constexpr -compress-mode=size -Icpp -Xcompiler=-fPIC,-Wall \
  -gencode=arch=compute_80,code=[sm_80,sm_90] -gencode=arch=compute_100,code=[sm_100,sm_120,compute_100]
CUDA_OBJECTS := $(patsubst cpp/cuda/%.cu,build/cuda/%.o,$(wildcard cpp/cuda/*.cu))
cuda: $(CUDA_OBJECTS)
	@export PATH="$(CUDA_HOME)/bin:$$PATH"
	nvcc -shared -cudart static -L"$(CUDA_HOME)/lib" -Xlinker --exclude-libs=ALL $^ -o build/cuda/libmaxmoe_cuda.so
	$(PYTHON) tests/repository/check_cuda.py build/cuda

build/cuda/%.o: cpp/cuda/%.cu .venv-cuda/packages $(wildcard cpp/cuda/*.h) $(filter %.h,$(KERNELS))
	@mkdir -p build/cuda
	export PATH="$(CUDA_HOME)/bin:$$PATH"
	echo "nvcc $<"
	nvcc $(NVCC_FLAGS) -Xptxas -v -c $< -o $@ 2>$(@:.o=.log) || { cat $(@:.o=.log); exit 1; }

# build/cuda/maxmoe_cuda_tests: the tests of cpp/cuda/tests for a machine with an NVIDIA GPU, run by
# CUDA_LAUNCH_BLOCKING=1 maxmoe_cuda_tests --gtest_filter=-*Error*. Tests of errors are left out, because a failed
# assertion makes the device unusable for the process.
CUDA_TESTS := $(patsubst cpp/cuda/tests/%.cpp,build/cuda/%.o,$(filter-out %_emulator.cpp %_candidates.cpp,$(wildcard cpp/cuda/tests/*.cpp)))
cuda-tests: $(CUDA_OBJECTS) $(CUDA_TESTS) build/cuda/managed_memory.o
	@$(CXX) $^ -L"$(CUDA_HOME)/lib" -lgtest_main -lgtest -static-libstdc++ -static-libgcc -lcudart_static -ldl -lrt -lpthread \
	  -o build/cuda/maxmoe_cuda_tests

# build/cuda/libmaxmoe_cuda_candidates.so: variants of kernels, which a device check times beside the kernels.
cuda-candidates: build/cuda/candidates.o
	@export PATH="$(CUDA_HOME)/bin:$$PATH"
	nvcc -shared -cudart static -L"$(CUDA_HOME)/lib" $< -o build/cuda/libmaxmoe_cuda_candidates.so

build/cuda/candidates.o: cpp/cuda/tests/device/candidates.cu .venv-cuda/packages $(wildcard cpp/cuda/*) $(filter %.h,$(KERNELS))
	@mkdir -p build/cuda
	export PATH="$(CUDA_HOME)/bin:$$PATH"
	nvcc $(NVCC_FLAGS) -c $< -o $@

build/cuda/test_%.o: cpp/cuda/tests/test_%.cpp $(wildcard cpp/cuda/*.h cpp/cuda/tests/*.h cpp/tests/*.h) $(filter %.h,$(KERNELS))
	@mkdir -p build/cuda
	$(CXX) -std=c++20 -O1 -Icpp -Icpp/tests -Icpp/cuda/tests -c $< -o $@

build/cuda/managed_memory.o: cpp/cuda/tests/device/managed_memory.cpp .venv-cuda/packages
	@mkdir -p build/cuda
	$(CXX) -std=c++20 -O1 -I"$(CUDA_HOME)/include" -c $< -o $@

.venv-cuda/packages:
	@$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet $(CUDA_PACKAGES)
	touch $@

# The kernels, each beside an upper bound of its speed.
benchmark: $(VENV)/test
	@export PATH="$(abspath $(BIN)):$$PATH"
	cmake -S . -B build/benchmarks -GNinja -DMAXMOE_BUILD_OPERATORS=OFF -DMAXMOE_BUILD_BENCHMARKS=ON \
	  -DPython_EXECUTABLE="$(abspath $(BIN))/python" >/dev/null
	cmake --build build/benchmarks
	build/benchmarks/cpp/benchmarks/maxmoe_kernels_benchmarks $(ARGS)

# dist/: sdist and manylinux wheel, checked; one wheel for every Python and every torch of TORCHES. Repaired and tried
# with the commands of cibuildwheel in pyproject.toml. Files of an earlier build are removed, because setuptools would
# include them.
CIBUILDWHEEL = $(shell sed -n 's/^$(1) = "\(.*\)"$$/\1/p' pyproject.toml)
# Separate environments, one for each torch.
PYTHON_MINOR := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
WHEEL_TORCHES = $(TORCHES:%=build/python$(PYTHON_MINOR)-torch%)
# The headers of an environment of `make test`, if there is one, because the operators are already compiled for it.
WHEEL_HEADERS = $(foreach torch,$(TORCHES),$(firstword $(patsubst %/requirements,%,\
  $(wildcard $(call environment,$(torch))/requirements)) build/python$(PYTHON_MINOR)-torch$(torch)))
wheel: $(VENV)/dev $(WHEEL_TORCHES:%=%/requirements)
	@rm -rf dist build/lib.* build/bdist.* build/wheel
	mkdir -p build
	echo "== sdist and wheel"
	export MAXMOE_TORCH="$$(ls -d $(addsuffix /lib/python*/site-packages,$(abspath $(WHEEL_HEADERS))) | paste -sd:)"
	headers="$$($(BIN)/python cpp/cmake/python_headers.py build/headers)"
	export MAXMOE_PYTHON_HEADERS="$$headers"
	export MAXMOE_CUDA=off # no CUDA kernels in wheels, until they have run on a GPU
	$(BIN)/python -m build --no-isolation --sdist --outdir dist . >build/sdist.log
	$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel . >build/wheel.log
	export PATH="$(abspath $(BIN)):$$PATH"
	$(subst {wheel},build/wheel/*.whl,$(subst {dest_dir},dist,$(call CIBUILDWHEEL,repair-wheel-command)))
	$(BIN)/python tests/repository/check_packages.py dist/*
	ls -lh dist
	$(MAKE) --no-print-directory try-wheel

# The wheel of dist/ with each torch. PYTHON=python3.12: with another Python than the one that built it.
try-wheel: $(WHEEL_TORCHES:%=%/tried)

.PHONY: $(WHEEL_TORCHES:%=%/tried)
$(WHEEL_TORCHES:%=%/tried): %/tried: %/requirements
	@echo "== the wheel with $(notdir $*)"
	rm -rf $*/try
	mkdir $*/try
	cp -r pyproject.toml tests $*/try
	$*/bin/pip install --quiet --force-reinstall --no-deps dist/*.whl
	$*/bin/pip check
	export PATH="$(abspath $*/bin):$$PATH"
	cd $*/try
	$(call CIBUILDWHEEL,test-command)

# For the wheel: an environment with a release of torch and pytest.
build/python$(PYTHON_MINOR)-torch%/requirements: pyproject.toml
	@echo "== torch $*"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(PIP_TORCH) torch==$* PyYAML numpy 'pytest>=9' pytest-timeout
	touch $@

clean:
	rm -rf .venv .venv-torch* .venv-cuda build dist *.egg-info maxmoe/*.so maxmoe/torch*

# The package, built in place, and the dependencies of one use: examples, test, docs or dev. The environments share the
# build of the kernels (setup.py). They are built for this machine alone, until tests need all instruction sets and the
# programs that tests/repository/test_cpp.py runs.
ISAS = $(if $(filter test dev,$(@F) $(notdir $(wildcard .venv*/test .venv*/dev))),all,native)
CPP_TESTS = $(if $(filter test,$(@F)),-DMAXMOE_BUILD_TESTS=ON -DMAXMOE_BUILD_BENCHMARKS=ON)
$(VENV)/examples $(VENV)/test $(VENV)/docs $(VENV)/dev: $(VENV)/requirements $(CORE)
	@echo "== the C++ core"
	export CMAKE_ARGS="-DMAXMOE_ISAS=$(ISAS) $(CPP_TESTS) $${CMAKE_ARGS:-}"
	$(BIN)/python setup.py --quiet build_ext
	echo "== maxmoe and the dependencies of '$(@F)'"
	$(BIN)/pip install --quiet --no-build-isolation -e '.[$(@F)]'
	touch $@

$(VENV)/requirements: $(VENV)/python pyproject.toml
	@echo "== torch and the build tools"
	$(BIN)/pip install $(PIP_TORCH) torch==$(TORCH) $(BUILD_REQUIRES)
	touch $@

# Packages that pip cannot install are installed by apt, for root on Debian and Ubuntu; otherwise a message names them.
$(VENV)/python:
	@missing() {
	  command -v c++ >/dev/null || echo g++
	  $(PYTHON) -c 'import ensurepip' 2>/dev/null || echo python3-venv
	  $(PYTHON) -c "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" 2>/dev/null || echo python3-dev
	}
	googletest() { echo '#include <gtest/gtest.h>' | c++ -E -x c++ - >/dev/null 2>&1 || echo libgtest-dev; }
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
	  echo "maxmoe needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12"
	  exit 1
	fi
	packages="$$(missing) $$(googletest)"
	if [[ -n "$${packages// }" && $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then
	  echo "== system packages:" $$packages
	  export DEBIAN_FRONTEND=noninteractive
	  apt-get -qq update || true
	  apt-get -qq install -y --no-install-recommends $$packages >/dev/null
	fi
	packages="$$(missing)"
	if [[ -n "$$packages" ]]; then
	  echo "Missing system packages. On Debian or Ubuntu: sudo apt-get install" $$packages
	  exit 1
	fi
	echo "== virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	touch $@
