# make run and make test set .venv up first. PYTHON=... names the Python to build it with;
# make record uses PYTHON=... as it is and installs nothing, for machines without a network.

VENV := .venv/bin/python
TESTS := tests notebooks
# The Triton of the recorded runs; tests compile all kernels under it too.
OLDER_TRITON := .triton-3.6.0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# pip would compile 11,000 modules in a minute; Python compiles the 500 that are used as it goes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help .venv run test coverage lab site test-site test-faults test-conditions record lint clean

help: ## print this list
	@sed -n 's/^\([-.a-z]*\):[^#]*## /\1\t/p' Makefile | expand -t 17
	@echo 'ARGS="..." is passed on: make run ARGS="02 --profile smoke", make test ARGS="-k mirrors"'

.venv: .venv/installed ## the environment: the exact versions of requirements.txt

# A python3 that cannot run, lacks venv or has another version is passed over.
.venv/installed: requirements.txt pyproject.toml
	@if ! $(VENV) -c '' 2>/dev/null; then \
	  for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 /usr/bin/python3); do \
	    if "$$python" -c 'import sys, venv, ensurepip; \
	        sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No Python 3.11 to 3.13 with its venv module found$(if $(PYTHON), at $(PYTHON)):' \
	      'install one, or name it with PYTHON=/path/to/python.' >&2; \
	    exit 1; \
	  fi; \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo 'Installing the packages of requirements.txt into .venv (a few minutes the first time)'
	@$(VENV) -m pip install --quiet --no-compile -r requirements.txt
	@touch $@

run: .venv ## execute the notebooks; report in runs/<device>-<date>/index.html
	@$(VENV) -m helpers.run $(ARGS)

$(OLDER_TRITON): | .venv/installed
	@echo 'Installing a second Triton into $@ (640 MB, for the tests alone)'
	@rm -rf $@.part
	@if $(VENV) -m pip install --quiet --no-compile --no-deps --target $@.part \
	    triton==$(@:.triton-%=%); \
	then mv $@.part $@; else echo 'It cannot be had here: tests that need it are skipped.'; fi

ifeq ($(shell uname -sm),Linux x86_64)
test: $(OLDER_TRITON)
endif

test: .venv ## run the tests, two at a time
	@$(VENV) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) $(TESTS)

# test_notebooks.py executes a notebook as a whole, which is no unit test.
coverage: .venv ## the lines of helpers that the unit tests run: a table, and 90% or more
	@rm -rf build/coverage
	@$(VENV) -m coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) \
	    --ignore=tests/site --ignore=tests/test_notebooks.py tests
	@$(VENV) -m coverage combine --quiet
	@$(VENV) -m coverage report

test-faults: .venv ## run notebooks through a hundred faults; nothing finished may be lost
	@FAULTS=1 $(VENV) -m pytest -n 2 $(ARGS) tests/test_faults.py

test-conditions: .venv ## run all notebooks on awkward machines: half an hour
	@$(VENV) -m pytest $(ARGS) tests/conditions.py

lab: .venv ## open JupyterLab
	@.venv/bin/jupyter lab --notebook-dir=. $(ARGS)

ifdef PYTHON
record: ## re-run everything at full size and rewrite the committed outputs
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$(PYTHON)" -m helpers.record $(ARGS)
else
record: .venv
	@$(VENV) -m helpers.record $(ARGS)
endif

.venv/docs: docs/requirements.txt | .venv/installed
	@echo 'Installing what builds the site into .venv'
	@$(VENV) -m pip install --quiet --no-compile -r docs/requirements.txt
	@touch $@

site: .venv .venv/docs ## build the site from the committed outputs: build/site/index.html
	@$(VENV) docs/build.py

test-site: site ## build the site and read it in headless Chromium
	@$(VENV) -m pytest $(ARGS) tests/site

lint: .venv ## check style and formatting
	@$(VENV) -m ruff check
	@$(VENV) -m ruff format --check

clean: ## remove the environment and caches; runs/ is kept
	rm -rf .venv .triton-* *.egg-info build .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -prune -exec rm -rf {} +
