VENV ?= .venv
PYTHON ?= python3.13 python3.12 python3.11 python3

export DO_NOT_TRACK = 1
# With it every process that the tests start would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE
export PREFECT_SERVER_ANALYTICS_ENABLED = false
# Otherwise LiteLLM, which the benchmarks' peer imports, asks the network for a list of prices when it is imported.
export LITELLM_LOCAL_MODEL_COST_MAP = True

READY = $(VENV)/.ready
# Stands beside $(VENV) for as long as it is incomplete, so that a half-made one is made anew.
MAKING = $(VENV).making
INSTALL = install --constraint constraints.txt

.PHONY: help demo test test-programs test-full chaos check docs format bench pictures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## run the example sweep, each trial in a sandbox of its own on this machine
	@$(VENV)/bin/rlm-batch sweep examples/learning_rate.py \
	  --grid lr=0.001,0.01 --grid batch_size=32,64 --minimize loss

# pytest's own script: `python -m pytest` would put the root on sys.path, and its rooms there as top-level packages.
test: $(READY) ## run the tests (ARGS="-x -k sweep" is handed to pytest)
	@$(VENV)/bin/pytest --numprocesses 4 --dist worksteal --durations 10 $(ARGS)

test-programs: $(READY) ## run only the tests that need installed programs, such as bubblewrap, podman or Postgres
	@$(VENV)/bin/pytest -m "programs and (services or not full) and not chaos" --numprocesses 4 --dist worksteal --durations 10 $(ARGS)

test-full: $(READY) ## run the scenarios at their full size, which takes minutes
	@$(VENV)/bin/pytest -m "full and not alone" --numprocesses 4 --dist worksteal --durations 10 $(ARGS)
	@$(VENV)/bin/pytest -m "full and alone" --durations 10 $(ARGS) || [ $$? = 5 ]  # 5: ARGS leave none

chaos: $(READY) ## break things at random, for about ten minutes (SEED=... throws the same dice again)
	@CHAOS_SEED=$(SEED) $(VENV)/bin/pytest -m chaos -s -rs tests/chaos $(ARGS)

check: $(READY) build/typing/rlm_batch ## check format, lint and types
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

docs: $(READY) ## build the documentation as a site in build/docs, with the API reference
	@$(VENV)/bin/python -m sphinx -W --keep-going -q -c docs . build/docs && echo "Open build/docs/README.html"

format: $(READY) ## format the code and apply the linter's safe fixes
	@$(VENV)/bin/ruff check --fix-only --quiet .
	@$(VENV)/bin/ruff format --quiet .

bench: $(READY) ## measure against the peers and print the ratios
	@$(VENV)/bin/python benchmarks/start.py
	@$(VENV)/bin/python benchmarks/interpreter.py
	@$(VENV)/bin/python benchmarks/batch.py
	@$(VENV)/bin/python benchmarks/providers.py
	@$(VENV)/bin/python benchmarks/queries.py

pictures: $(READY) ## make the documentation's pictures from a real run (needs chromium)
	@$(VENV)/bin/python -m tests.browser.pictures

clean: ## remove what make made: .venv, build, dist and the caches
	@rm -rf .venv .venv.making build dist ./*.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A candidate is believed once it has run: pyenv puts names on PATH that it then refuses to start. Its own file is
# taken, and no link to it: .ci/hide-programs puts links on PATH, which go with build/.
# setuptools goes in first and builds without isolation, so that it is the one that constraints.txt names.
$(READY): pyproject.toml constraints.txt
	@set -eu; \
	begun=$$(date +%s); \
	finish() { now=$$(date +%s); echo "  done in $$((now - begun)) s"; begun=$$now; }; \
	uv=$$(command -v uv >/dev/null && echo uv || true); \
	if [ -e $(MAKING) ]; then rm -rf $(VENV); fi; \
	if [ ! -e $(VENV) ]; then \
	  python=; needs=sys; if [ -z "$$uv" ]; then needs=ensurepip; fi; \
	  for candidate in $(PYTHON); do \
	    python=$$($$candidate -c "import os, sys, venv, $$needs; v = sys.version_info; \
	(3, 11) <= v < (3, 14) or sys.exit(1); print(os.path.realpath(sys.executable))" 2>/dev/null) && break; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "rlm-batch needs Python 3.11, 3.12 or 3.13 with its venv module, and none of these is that:" \
	      "$(PYTHON) (on Debian: apt-get install python3 python3-venv; or name yours: make PYTHON=...)." >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$python"; \
	  : > $(MAKING); \
	  if [ -z "$$uv" ] || ! uv venv --quiet --seed --python "$$python" $(VENV) 2>/dev/null; then \
	    rm -rf $(VENV); "$$python" -m venv $(VENV); \
	  fi; \
	  finish; \
	  echo "Installing Prefect, the SDKs and the tests' tools with $${uv:-pip}: about $${uv:+half }a minute, once"; \
	else \
	  if [ -e $(READY) ]; then : > $(MAKING); fi; \
	  echo "Bringing $(VENV) up to date, as pyproject.toml or constraints.txt is newer: a minute at most"; \
	fi; \
	into() { "$$@" setuptools && "$$@" --no-build-isolation --editable '.[dev]'; }; \
	if [ -z "$$uv" ] || \
	  ! into uv pip $(INSTALL) --quiet --python $(VENV)/bin/python 2>/dev/null; then \
	  into $(VENV)/bin/python -m pip $(INSTALL) -qq; \
	fi; \
	touch $(READY); rm -f $(MAKING); finish

build/typing/rlm_batch:
	@mkdir -p $(@D) && ln -sfn ../.. $@
