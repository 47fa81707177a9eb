# Every target sets up what it needs: a fresh clone and a Python >= 3.12 are enough.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
READY := $(VENV)/.ready
CUDA_READY := $(VENV)/.ready-cuda
# A worker keeps the engines that a file of tests compiles, so files are not split; in the order of
# their names, for the file of fewest tests takes longest and must not come last.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Arguments for pytest or for the demo: make test ARGS="tests/test_plan.py -k window"
ARGS ?=

.PHONY: help demo test lint format nightly device-test lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## a trained mini answers questions about long documents, cold and under every policy
	$(BIN)/python scripts/demo.py $(ARGS)

test: $(READY) ## the test suite on the CPU, without the slow and the device tests
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

lint: $(READY) ## ruff and pyright, as the pre-commit hooks run them
	@failed=0; \
	    $(BIN)/ruff check || failed=1; \
	    $(BIN)/ruff format --check --output-format concise || failed=1; \
	    $(BIN)/pyright --pythonpath $(BIN)/python || failed=1; \
	    exit $$failed

format: $(READY) ## sort imports and reformat in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

nightly: $(READY) ## the slow tests too, and every property with ten times the examples
	$(BIN)/python -m pytest $(WORKERS) -m "not device" --hypothesis-profile=nightly --timeout=1800 $(ARGS)

device-test: $(CUDA_READY) ## the tests that need an NVIDIA Hopper GPU
	$(BIN)/python -m pytest -m device $(ARGS)

lock: ## resolve pyproject.toml into requirements.lock again
	$$(sh scripts/find_python.sh) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv
	build/lock/bin/uv pip compile pyproject.toml --extra dev \
	    --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
	    --generate-hashes --custom-compile-command "make lock" --output-file requirements.lock

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .jax_cache .pytest_cache .ruff_cache .hypothesis

$(READY): requirements.lock pyproject.toml
	@python=$$(PYTHON="$(PYTHON)" sh scripts/find_python.sh) && \
	    { test -x $(BIN)/python || { echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV); }; }
	$(PIP_INSTALL) --require-hashes -r requirements.lock
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(CUDA_READY): $(READY)
	version=$$($(BIN)/python -c "from importlib.metadata import version; print(version('jax'))") && \
	    $(PIP_INSTALL) "jax[cuda13]==$$version"
	@touch $@
