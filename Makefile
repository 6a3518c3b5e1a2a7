# `make demo` and `make test` do all the set-up themselves; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Not compiled while installing, which takes half the time: Python compiles what is imported, when it is imported.
COMPILE := --no-compile
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(COMPILE) --constraint constraints.txt

.PHONY: bench demo docs notebooks test-docs test-notebooks test test-slow test-system lint types format clean

demo: $(VENV)/.ready-demo
	$(BIN)/fedfa demo

test: lint types
	$(BIN)/pytest -n auto -q

test-slow: $(VENV)/.ready-test
	$(BIN)/pytest -q -m slow

test-system: $(VENV)/.ready-test
	$(BIN)/pytest -q -m system

# Serves the documentation site and follows changes; http://127.0.0.1:8000
docs: $(VENV)/.ready-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# Runs the notebooks in examples/ and stores what they print and draw.
notebooks: $(VENV)/.ready-test
	$(PIP) --editable '.[notebooks]'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/run_notebooks.py

test-notebooks: $(VENV)/.ready-test
	$(PIP) --editable '.[notebooks]'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -q -m "slow or not slow" tests/test_notebooks.py

# Builds the site strictly and checks every link.
test-docs: $(VENV)/.ready-test
	$(BIN)/pytest -q -m "slow or not slow" tests/test_site.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-test
	$(BIN)/mypy

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With other simulators, each in an environment of its own. Takes an hour; leave the machine idle meanwhile.
# ARGS chooses sections and more: make bench ARGS="--only pair --only tuned"
bench: $(VENV)/.ready-demo .bench/pfl/.ready .bench/flower/.ready .bench/fedlab/.ready
	$(BIN)/python -m benchmarks.bench --peers benchmarks/peers.toml --out results/bench \
	  --picture docs/pictures/performance.svg --page docs/performance.md $(ARGS)

# torch first, and again with the requirements, so that they install no other version.
.bench/%/.ready: benchmarks/requirements/%.txt
	$(PYTHON) -m venv .bench/$*
	PIP_DISABLE_PIP_VERSION_CHECK=1 .bench/$*/bin/python -m pip install --quiet torch==2.13.0 numpy
	PIP_DISABLE_PIP_VERSION_CHECK=1 .bench/$*/bin/python -m pip install --quiet torch==2.13.0 --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedfa needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-torch: constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV); torch first, which takes a minute or two."
	PIP_DISABLE_PIP_VERSION_CHECK=1 TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python tools/install_torch.py $(COMPILE)
	@touch $@

$(VENV)/.ready-demo: pyproject.toml constraints.txt $(VENV)/.ready-torch
	$(PIP) --editable '.[plots]'
	@touch $@

$(VENV)/.ready-test: pyproject.toml constraints.txt $(VENV)/.ready-torch
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.ready-demo
