# Everything a developer and CI need; `make` lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SAMPLES := $(basename $(notdir $(wildcard sample_runs/*.py)))

.PHONY: help demo test check unit e2e samples screenshots clean chromium
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev --editable ".[dashboard]"
	@touch $@

demo: $(STAMP)  ## Train a small failing network, diagnose it, fix it, open the dashboard
	$(BIN)/gradaudit demo

test: check unit e2e  ## Everything: checks, unit tests with coverage, browser tests

check: $(STAMP)  ## Lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)  ## Tests that need no browser
	rm -f .coverage .coverage.*
	$(BIN)/pytest -n 2 -m "not e2e" --cov --cov-report= --durations=10
	$(BIN)/coverage report --fail-under=90

e2e: $(STAMP) chromium  ## Dashboard tests in headless Chromium
	$(BIN)/pytest -n 2 -m e2e

chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

samples: $(STAMP)  ## Record sample_runs/ again and write the reports beside them
	for name in $(SAMPLES); do \
	  OMP_NUM_THREADS=1 $(BIN)/gradaudit run --quiet --force --out sample_runs/$$name sample_runs/$$name.py && \
	  $(BIN)/gradaudit report sample_runs/$$name --format json --output sample_runs/$$name.report.json || exit 1; \
	done

screenshots: $(STAMP) chromium  ## Draw docs/images from sample_runs/
	$(BIN)/python docs/screenshots.py

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
