# Six verbs. Each sets up what it needs; `make test PYTHON=python3.12` chooses the interpreter (3.11 or newer for the pins).

PYTHON ?= python3
WORKERS ?= auto
SOURCES := pyproject.toml constraints.txt
INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest

.PHONY: fit test test-full check bench test-gpu setup clean
.NOTPARALLEL:

fit: .venv/.user runs/demo/train.jsonl  ## fine-tune the demo model on the demo chats
	.venv/bin/python -m radixtrain fit --config configs/sft.yaml

test: setup  ## everything that runs without a GPU, one thread per worker
	OMP_NUM_THREADS=1 $(TEST) -n $(WORKERS) --maxprocesses 8 --dist worksteal -m "not gpu"

test-full: export RADIXTRAIN_TRIES = 500
test-full: export RADIXTRAIN_FAMILIES = all
test-full: test  ## the same with ten times the generated tries and every model family

check: setup  ## lint, formatting, types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv/.user  ## a training step, deduplicated and not
	.venv/bin/python -m radixtrain bench --attention '[auto, cascade, path, expand]' --repeats 7
	.venv/bin/python -m radixtrain bench --attention '[auto, cascade, path, expand]' --repeats 7 \
	  --num_sequences 1 --prompt_length 2048 --suffix_length 256

test-gpu: setup  ## what needs a CUDA device; a test that skips says what it lacks
	$(TEST) -m gpu -rs

setup: .venv/.dev

clean:  ## caches and builds; .venv and runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Stamps: set-up runs again only after one of the SOURCES changed.
.venv/.user: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/.dev: $(SOURCES)
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[dev,peft]'
	touch .venv/.user $@

runs/demo/train.jsonl: | .venv/.user
	.venv/bin/python recipes/demo.py --output_dir runs/demo
