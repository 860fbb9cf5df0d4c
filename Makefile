# `make` lists the verbs. Each sets up what it needs; `make test PYTHON=python3.12` chooses the interpreter (3.11 or newer).

PYTHON ?= python3
WORKERS ?= auto
SOURCES := pyproject.toml constraints.txt
INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest
# By name: a machine with a GPU need not have what the other files import.
GPU_TESTS := tests/kernels/test_cuda.py tests/radixtrain/test_loss.py \
  tests/claims/test_no_sync.py tests/claims/test_pinned_batches.py
TEST_ALL_CORES := OMP_NUM_THREADS=1 $(TEST) -n $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: help fit test test-full check bench test-gpu test-newest test-plugins test-versions docs setup clean
.NOTPARALLEL:

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

fit: .venv/.user runs/demo/train.jsonl  ## write a demo and fine-tune a tiny model on it: one to two minutes on two CPU cores
	.venv/bin/python -m radixtrain fit --config configs/demo.yaml --overwrite true

test: setup  ## prove each claim once: seven minutes on two cores
	$(TEST_ALL_CORES) -m "not gpu and not full"

test-full: export RADIXTRAIN_TRIES ?= 50
test-full: setup  ## the same, every model family, and more of the generated cases, kills, signals and ranks
	$(TEST_ALL_CORES) -m "not gpu"

check: setup  ## check style, formatting, types, and which module imports which: ruff, mypy, import-linter
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	rm -rf build/imports && mkdir -p build/imports && cp -RL radixtrain build/imports/
	touch build/imports/radixtrain/kernels/__init__.py build/imports/radixtrain/collators/__init__.py
	cd build/imports && PYTHONPATH=. ../../.venv/bin/lint-imports --no-cache --no-logo --config ../../pyproject.toml

bench: .venv/.user  ## time a training step on this machine, deduplicated and not
	.venv/bin/python recipes/benchmarks/step.py --attention auto cascade path expand --repeats 7
	.venv/bin/python recipes/benchmarks/step.py --attention auto cascade path expand --repeats 7 \
	  --prompt 2048 --own 256 --sequences 1

test-gpu: setup  ## run the tests that need a CUDA device; one that skips says what it lacks
	$(TEST) -m gpu -rs $(GPU_TESTS)

test-newest: setup  ## try pip's newest transformers, trl, peft, lightning ...: families, images, trainers, fit
	.venv/bin/python recipes/compat/versions.py --newest $(if $(QUICK),--quick)

test-plugins: setup  ## train in TRL, ms-swift, Axolotl, LLaMA-Factory and verl, untouched and shared; installs each by itself
	.venv/bin/python recipes/compat/plugins.py

test-versions: setup  ## test the library beside older transformers, and write a page: 20 minutes on two cores
	.venv/bin/python recipes/compat/versions.py

docs:  ## write the pages as a site into build/site; a broken link is an error
	$(PYTHON) -m venv build/docs
	build/docs/bin/pip install --quiet --disable-pip-version-check zensical==0.0.73
	build/docs/bin/python docs/site.py build/pages
	build/docs/bin/zensical build --clean --strict

setup: .venv/.dev  ## install into .venv for development

clean:  ## remove caches and builds; .venv and runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Stamps: set-up runs again only after one of the SOURCES has changed.
.venv/.user: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[fit]'
	touch $@

.venv/.dev: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[dev]'
	touch .venv/.user $@

runs/demo/train.jsonl: | .venv/.user
	.venv/bin/python recipes/demo.py --output_dir runs/demo
