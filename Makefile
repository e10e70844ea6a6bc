# Tasks of this repository. `make setup` is implied by those that need it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.setup-done
# The locked version, so that it is written down once.
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.PHONY: setup demo demo-fp8 test lint types bench clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# torch goes first and pinned: resolved together with the rest, a newer and much larger build could be fetched before the
# constraint rules it out.
# Transformer Engine's wheel goes beside the environment, not into it: without its binary its import fails, and only the
# tests that put something in the binary's place want it.
$(STAMP): constraints.txt pyproject.toml tests/transformer-engine.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,cli,tensorboard]'
	$(BIN)/python -m pip install --no-deps --upgrade --target .venv/transformer-engine -r tests/transformer-engine.txt
	touch $@

demo: setup
	$(BIN)/python examples/train_text.py

demo-fp8: setup
	$(BIN)/python examples/fp8_text.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy --strict lightning_amp_plus

# Two workers with one thread each: more would only wait for each other on a small machine.
test: export OMP_NUM_THREADS = 1
test: lint types
	$(BIN)/python -m pytest -n 2

# Benchmarks whose names begin with gpu_ need an accelerator and are run by hand.
bench: setup
	set -e; for script in $(filter-out benchmarks/gpu_%,$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script; \
	done

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache lightning_logs
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
