# The developers' front door. The tools live in .venv; `make install` makes it.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install test test-fast lint types ci

# a virtual environment with the package, editable, and every tool
install:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --editable '.[dev]'

# all tests; those that need a real model fetch it once
test:
	$(BIN)/pytest

# what takes seconds and needs no real model
test-fast:
	$(BIN)/pytest -m "not slow and not model"

# style and import rules
lint:
	$(BIN)/ruff check .

# strict types, on an installed copy: mypy does not see the mapped folders of an editable install
types:
	rm -rf build/typecheck
	$(BIN)/pip install --quiet --no-deps --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p edgeinfer

# what continuous integration runs: everything, in a fresh environment
ci:
	.ci/run
