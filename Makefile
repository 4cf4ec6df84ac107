# make demo and make test need nothing but Python >= 3.11, a C++ compiler and a network (or a pip that finds wheels).
#
# PYTHON=...      the interpreter to start from                        (default: python3)
# VENV=...        where the environment is built                       (default: .venv)
# NO_VENV=1       install nothing: run in PYTHON's own environment, which already has torch
# WHEELS=...      with NO_VENV=1: a folder of wheels for what PYTHON lacks besides torch
# PIP_ARGS=...    handed to pip install
# CHROMIUM=...    a Chromium for make test-browser                     (default: Playwright's, which it downloads)
# TORCHES=...     for make wheel: folders site-packages/torch of more PyTorchs to compile the C++ functions for  (default: that of VENV only)
# WORKERS=...     processes that make test runs the tests in, 0 for none beside itself  (default: 3)
# MADE_UP_ENVS=... for make test-made-up-gpu: environments that have the CUDA build of torch  (default: it makes them, 4.5 GB each)
# ARGS=...        handed to the demo, to pytest (make test, make soak, make test-gpu) or to the benchmark
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
NO_VENV ?=
WHEELS ?=
PIP_ARGS ?=
CHROMIUM ?=
MADE_UP_ENVS ?=
TORCHES ?=
WORKERS ?= 3
ARGS ?=
TORCH := torch==2.13.0
# pip compiles nothing (--no-compile), so what the first process imports is kept for the others, whatever the caller's settings are.
export PYTHONDONTWRITEBYTECODE :=

ifeq ($(NO_VENV),)
  RUN := $(VENV)/bin/python
  READY := $(VENV)/.ready
else
  RUN := PYTHONPATH="$(CURDIR)/build/site:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
  READY := build/site/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-models test-browser soak coverage check lint types imports docs wheel bench require-gpu test-gpu test-made-up-gpu test-versions bench-gpu clean

help:  ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^# \([A-Z_]*=\)/    \1/p' Makefile

setup: $(READY)  ## build the environment (every other target does this by itself)

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python >= 3.11 is needed, $(PYTHON) is %s: make PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --no-compile $(PIP_ARGS) -c constraints.txt $(TORCH)
	$(VENV)/bin/python -m pip install -q --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

build/site/.ready: pyproject.toml tools/site_folder.py tools/gpu-wheels.txt
	PYTHONPATH="$(CURDIR)" $(PYTHON) -m tools.site_folder build/site $(WHEELS)
	@touch $@

demo: $(READY)  ## train a 38M-parameter GPT on real text, with all the memory and with half of it
	$(RUN) -m examples.train_text $(ARGS)

test: $(READY)  ## run the tests (those for a GPU: make test-gpu)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest --ignore=tests/gpu --ignore=tests/models --ignore=tests/soak -n $(WORKERS) --dist worksteal $(ARGS)

test-long: $(READY)  ## run the tests with more examples and more steps: for nights, not for every change
	TEST_PROFILE=long $(MAKE) test ARGS="--timeout=1200 $(ARGS)"

test-models: $(READY)  ## train real models (transformers, diffusers, peft, timm) with and without a budget, and write docs/models.md
	$(RUN) -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev,models,frameworks]'
	$(RUN) -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps --upgrade --target build/timm timm torchvision
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONPATH=build/timm $(RUN) -m pytest tests/models --timeout=1200 \
	  -n $(WORKERS) --dist worksteal --models-out docs/models.json $(ARGS)
	$(RUN) -m tools.models_page

test-browser: $(READY)  ## open the page of `teraio report` in a headless Chromium (CHROMIUM=... for one that is installed)
	$(RUN) -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev,plot]' playwright
	test -n "$(CHROMIUM)" || $(RUN) -m playwright install chromium
	CHROMIUM="$(CHROMIUM)" $(RUN) -m pytest tests/teraio/cli/report --timeout=600 $(ARGS)

soak: $(READY)  ## train for thousands of iterations, train 50 times, and print what the process holds
	TEST_PROFILE=$${TEST_PROFILE:-long} OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest tests/soak -p no:logging --timeout=7200 $(ARGS)

coverage: $(READY)  ## run the tests and tell which lines and branches of the three packages they reach
	$(MAKE) test ARGS="--cov --cov-report=term --cov-report=html:build/coverage $(ARGS)"

check: lint types imports docs test wheel  ## ruff, mypy, import-linter, the docs, the tests, and the built wheel in a clean environment

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)
	$(RUN) -m mypy

imports: $(READY)
	$(VENV)/bin/lint-imports

docs: $(READY)  ## build the documentation, in strict mode, into build/site-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

wheel: $(READY)  ## build the wheel with its compiled C++ functions, and train with it, first where there is no compiler
	rm -rf build/dist build/clean
	TORCHES="$(TORCHES)" $(RUN) -m build --wheel --no-isolation --outdir build/dist/untagged .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --only-plat --exclude libc10.so --exclude libtorch_cpu.so \
	  --wheel-dir build/dist build/dist/untagged/*.whl
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install -q --no-compile $(PIP_ARGS) -c constraints.txt $(TORCH) build/dist/*.whl
	cd "$${TMPDIR:-/tmp}" && export clean="$(CURDIR)/build/clean" && \
	  PATH="$$clean/bin" CXX= TORCHINDUCTOR_CACHE_DIR="$$clean/cache" "$$clean/bin/python" -P "$(CURDIR)/tests/smoke/smoke.py" no-compiler && \
	  "$$clean/bin/python" -P "$(CURDIR)/tests/smoke/smoke.py"
	rm -rf build/clean

bench: $(READY)  ## measure on the CPU; a table and a JSON file under benchmarks/results
	$(RUN) -m benchmarks $(ARGS)

require-gpu: $(READY)
	@$(RUN) -m tools.require_gpu

test-gpu: require-gpu  ## run the tests for a GPU; fails where there is none
	$(RUN) -m tools.gpu_tests $(ARGS)

test-made-up-gpu:  ## run the tests for a GPU on one made of software, with the oldest and the newest torch that is built for CUDA
	$(PYTHON) -m tools.made_up_gpu_tests $(addprefix --environment ,$(MADE_UP_ENVS)) --pip-args="$(PIP_ARGS)" $(ARGS)

test-versions: $(READY)  ## try other versions of Python and PyTorch in environments of their own, and write docs/versions.md
	$(RUN) -m tools.versions --pip-args="$(PIP_ARGS)" $(ARGS)

bench-gpu: require-gpu  ## train Llamas on the GPU and measure, for about 8 minutes; fails where there is none
	$(RUN) -m benchmarks --device cuda $(ARGS)

clean:  ## remove what make built, the environment too
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	rm -rf benchmarks/out $(if $(NO_VENV),,$(VENV))
