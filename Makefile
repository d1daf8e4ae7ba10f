# Needs make and a Python 3.11 or newer with venv; the rest is installed into .venv on the first run.
PYTHON ?= python3
# The first that runs: pyenv leaves a python3.12 in PATH even where it is switched off.
PYTHON312 ?= $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do \
    "$$p" -c "import ensurepip" 2>/dev/null && { command -v "$$p"; break; }; done)

BIN := .venv/bin
# A file stays on one worker: its models and compiled programs are made once.
PYTEST := -m pytest -n 2 --dist loadscope
# Two workers on two cores: threads of the BLAS behind triangular solves would wait for each other.
export OPENBLAS_NUM_THREADS := 1

.PHONY: demo test test-slow test-312 test-all notebooks lint clean
.NOTPARALLEL:

demo: .venv/.base
	$(BIN)/k3jax generate --model checkpoints/k3-tiny --prompt "And God said" --max-tokens 64 --temperature 0.8 --seed 1

# Most of the time goes into compiling: the quick suite has XLA optimise less, the slow one as for users.
QUICK := XLA_FLAGS=--xla_backend_optimization_level=0

test:
	@rm -f .venv/.quick
	@$(MAKE) --no-print-directory .venv/.quick

# A stamp: `test-all` does not run again what has passed since the last change.
.venv/.quick: .venv/.test Makefile $(shell git ls-files k3jax tests checkpoints scripts benchmarks 2>/dev/null)
	$(QUICK) $(BIN)/python $(PYTEST) -m "not slow"
	@touch $@

# In the order of the files: the longest of them has few tests, and would come last.
test-slow: .venv/.test
	$(BIN)/python $(PYTEST) --no-loadscope-reorder -m slow

# Python 3.12 gets a newer jax and flax.
test-312:
	@if [ -n "$(PYTHON312)" ]; then \
	    $(MAKE) --no-print-directory .venv312/.test PYTHON="$(PYTHON312)" && $(QUICK) .venv312/bin/python $(PYTEST) -m "not slow"; \
	else echo "No Python 3.12 found: the suite was not run on it (name one with PYTHON312=...)."; fi

test-all: .venv/.quick test-slow test-312

# The notebooks, written anew from their Python files and run.
notebooks: .venv/.test
	$(BIN)/jupytext --quiet --to ipynb notebooks/*.py
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

lint: .venv/.test
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-cache
	$(BIN)/basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv312 dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a set of packages is installed again only when pyproject.toml has changed.
%/.base: pyproject.toml
	$(call install,$*,.)
	@touch $@

%/.test: pyproject.toml
	$(call install,$*,.[test])
	@touch $*/.base $@

define install
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
	    || { echo "k3jax needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $1/bin/python || $(PYTHON) -m venv $1
	@echo "Installing $2 into $1 (a few minutes the first time)"
	@$1/bin/python -m pip install -q --disable-pip-version-check -e "$2"
endef
