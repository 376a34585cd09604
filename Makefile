# Everything a checkout needs, from Python 3.11 or later and a package index; `make help` says what there is.
# The recipes are POSIX sh. Packages go into .venv and nowhere else; pip's own settings (PIP_INDEX_URL, PIP_CACHE_DIR,
# PIP_NO_INDEX, pip.conf, …) hold as always.

define HELP
make serve       start the OpenAI-compatible server; with no model named it serves a small one that it fetches once
make test        all tests but the slow ones
make test-full   the slow ones too
make nightly     these, and more for hours: kernels under ThreadSanitizer, a crowd of clients on a server, and faults made
                 by rule, which go on from where the last night ended; the results go into conformance/results
make lint        ruff (rules, format) and mypy
make format      put the code into ruff's format
make clean       remove .venv, caches and build outputs; fetched models stay

The first run makes .venv and installs into it; later ones do so again only after pyproject.toml has changed.

ARGS="…"         for engine.serve or pytest:  make serve ARGS="--model DIR --port 9000"
                                              make test ARGS="tests/engine -k sampler"
PYTHON=…         the Python (3.11 or later) that .venv is made with; else the first that fits of those in the PATH
PARTS="…"        of make nightly: $(NIGHT); each can be made alone
CROWD_S=… FAULTS_S=…   seconds that the last two of them take (here: $(CROWD_S), $(FAULTS_S))
CUDA=12|13|none  the CUDA packages to add; else 13 for an NVIDIA driver from 580 on, 12 for an older one, none without
                 (here: $(CUDA_FOUND)); tests have a compiler for GPUs in any case
GLINT_OFFLINE=1  tests fetch nothing; those of the starter model are skipped unless it has been fetched before
endef

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-full nightly lint format clean

VENV := .venv
PY := $(VENV)/bin/python
PYTHON :=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
CUDA := auto
ARGS :=
NIGHT := tests threads crowd faults
PARTS := $(NIGHT)
CROWD_S := 1800
FAULTS_S := 28800

# The file is asked first, since nvidia-smi can take a second; under WSL there is only nvidia-smi.
DRIVER_FILE := /proc/driver/nvidia/version
ifeq ($(CUDA),auto)
  DRIVER := $(shell { said=$$(cat $(DRIVER_FILE) || nvidia-smi --query-gpu=driver_version --format=csv,noheader) \
    && echo "$$said"; } 2>/dev/null | sed -n 's/^\(.* \)*\([0-9][0-9][0-9]\)\.[0-9].*/\2/p' | sed -n 1p)
  CUDA_FOUND := $(shell test -z "$(DRIVER)" && echo none || { test "$(DRIVER)" -ge 580 && echo 13 || echo 12; })
else
  CUDA_FOUND := $(CUDA)
endif
ifeq ($(filter none 12 13,$(CUDA_FOUND)),)
  $(error CUDA=$(CUDA): expected 12, 13 or none)
endif
CUDA_EXTRA := $(patsubst %,cuda%,$(filter-out none,$(CUDA_FOUND)))
# the two CuPy packages own the same files, so only one of them may be there
OTHER_CUDA := $(patsubst %,cuda%,$(filter-out $(CUDA_FOUND),$(if $(CUDA_EXTRA),12 13)))

comma := ,
empty :=
extras = $(subst $(empty) $(empty),$(comma),$(strip $(1)))
SERVE_READY := $(VENV)/.installed-serve-$(CUDA_EXTRA)
TEST_CUDA := $(or $(CUDA_EXTRA),nvrtc)
TEST_READY := $(VENV)/.installed-test-$(TEST_CUDA)

help:
	$(info $(HELP))
	@:

serve: $(SERVE_READY)
	@exec $(PY) -m engine.serve $(ARGS)

test: $(TEST_READY)
	@exec $(PY) -m pytest -m "not slow" $(ARGS)

test-full: $(TEST_READY)
	@exec $(PY) -m pytest $(ARGS)

# What fails stops nothing before the end: the night is long enough for the rest.
RESULTS := conformance/results
nightly: $(TEST_READY)
	@failed=; for part in $(PARTS); do case $$part in \
	  tests) $(PY) -m pytest $(ARGS) ;; \
	  threads) $(PY) -m conformance --target host --quick --sanitizer thread --json $(RESULTS)/nightly-threads.json ;; \
	  crowd) $(PY) -m tests.serve.crowd --seconds $(CROWD_S) --json $(RESULTS)/nightly-crowd.json ;; \
	  faults) $(PY) -m tests.cuda.mutation --quiet --seconds $(FAULTS_S) --json $(RESULTS)/nightly.json ;; \
	  *) echo "glint: make nightly has no part $$part; it has $(NIGHT)" >&2; false ;; \
	esac || failed="$$failed $$part"; done; \
	test -z "$$failed" || { echo "glint: not all is well in:$$failed" >&2; exit 1; }

lint: $(TEST_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(TEST_READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVE_READY): EXTRAS := $(CUDA_EXTRA)
$(TEST_READY): EXTRAS := test $(TEST_CUDA)

# An empty file that stands for a finished install. What pip downloads is shown as it goes, the rest of its talk is not;
# its warnings and errors are. A .venv without pip is one that was cut short or made by another tool.
$(SERVE_READY) $(TEST_READY): pyproject.toml $(PY)
	@echo "glint: installing into $(VENV) what pyproject.toml asks for$(if $(EXTRAS), (with $(call extras,$(EXTRAS))))"
	@rm -f $@ $(patsubst %,$(VENV)/.installed-*-%,$(OTHER_CUDA))
	@$(PY) -c 'import pip' 2>/dev/null || $(PY) -m ensurepip
	@$(if $(OTHER_CUDA),$(PY) -m pip uninstall --quiet --yes $(OTHER_CUDA:cuda%=cupy-cuda%x) 2>/dev/null)
	@{ $(PY) -m pip install --editable '.$(if $(EXTRAS),[$(call extras,$(EXTRAS))])' && touch $@; } \
	  | while read -r word rest; do case "$$word $$rest" in \
	    "Downloading "*) echo "  $$rest" ;; \
	    "Installing collected"*) echo "  putting them in place" ;; \
	  esac; done
	@test -f $@ || { echo "glint: the install failed, see above; the same command tries again" >&2; exit 1; }

$(PY):
	@for python in $(PYTHONS); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "glint: making $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV) && exit 0; \
	  echo "glint: $$python cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; \
	done; \
	echo "glint: found no Python 3.11 or later among: $(PYTHONS)" >&2; \
	for python in $(PYTHONS); do \
	  found=$$($$python --version 2>&1) && echo "  $$python is $$found" >&2; \
	done; \
	echo "  install one, or name it: make PYTHON=/path/to/python3.12 …" >&2; exit 1
