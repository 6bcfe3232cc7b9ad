PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEGRATIONS := $(VENV)/.integrations
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.ready
LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/lint-imports && $(BIN)/mypy

# PyPI's torch for Linux brings several GB of CUDA libraries. Where the CPU build is enough:
#   make setup TORCH_INDEX='--index-url https://download.pytorch.org/whl/cpu'
TORCH_INDEX ?=

# Where it is set, each of the many processes that the tests start would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-oldest lint format docs demo bench-check gpu clean
.DELETE_ON_ERROR:

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 18

setup: $(READY)  ## Create .venv with everything that is needed; again only when pyproject.toml or the pins change

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit( \
		f"Python 3.10 or newer is needed, {sys.executable} is {v[0]}.{v[1]}; try: make PYTHON=python3.12 <target>")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH_INDEX) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
# pip compiles on one core. Templates that are no Python are left out, and make compileall fail: that is no error here.
	$(BIN)/python -m compileall -qq -j 0 $(VENV) || true
	@touch $@

test: $(READY)  ## Lint, check types, run the tests, of grids all pairs; PYTEST_ARGS is passed on
	($(LINT)) & lint=$$!; \
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal $(PYTEST_ARGS); tests=$$?; \
	wait $$lint && exit $$tests

test-all: override PYTEST_ARGS += -m ''
test-all: $(INTEGRATIONS) test  ## The same with full grids and other trainers, as before a release

$(INTEGRATIONS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations]'
	@touch $@

test-oldest: $(OLDEST_READY)  ## Run the tests with the oldest versions that are supported, in .venv-oldest; Python 3.10 to 3.12
	$(OLDEST)/bin/python -m pytest --numprocesses 3 --dist worksteal -W default $(PYTEST_ARGS)

# Old releases use what newer ones of their own needs deprecate, so warnings are no errors above.
$(OLDEST_READY): pyproject.toml constraints-oldest.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 13) or sys.exit( \
		f"numpy 1.26 needs Python 3.10 to 3.12, {sys.executable} is {v[0]}.{v[1]}; try: make PYTHON=python3.11 test-oldest")'
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(TORCH_INDEX) --constraint constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]'
	@touch $@

lint: $(READY)  ## Lint, check the formatting and the types
	$(LINT)

format: $(READY)  ## Fix what ruff can fix, and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## Build the documentation site, docs/_build/index.html, with warnings as errors
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build

demo: $(READY)  ## Train for real, print and plot the comparison; output in demo_output/
	$(BIN)/python -m examples.demo
	$(BIN)/python -m examples.demo.same_bits

bench-check: $(READY)  ## Fail if a step or an epoch became a tenth slower beside stock; on an idle machine, 8 minutes
	$(BIN)/python -m benchmarks.check

gpu: $(READY)  ## Run every path on CUDA and NCCL, on the GPUs of this machine, and time it; see docs/accelerators.md
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('make gpu needs a CUDA device, and torch finds none')"
	$(BIN)/python -m pytest -m gpu -s; tests=$$?; \
	$(BIN)/python -m benchmarks.gpu && exit $$tests

clean:  ## Remove the environments, caches and output
	rm -rf $(VENV) $(OLDEST) dist demo_output docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
