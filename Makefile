# make demo      set up .venv and run the main job on the embedded model
# make test      set up .venv and run the suite, then again on the oldest supported transformers
# make test-gpu  the whole suite with this machine's own python and packages (needs CUDA)
# make bench-kernels  time the kernels against PyTorch's attention (needs CUDA)
# make bench-damp  time the DAMP update against flash-linear-attention's FP32 kernels (needs CUDA and fla)
# make bench-gpu  all tables of `hf-lowbit bench` into docs/benchmarks, with a summary and a plot (needs CUDA)
# make lint      ruff
# make clean     remove what these targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_TRANSFORMERS := 5.17.0
OLDEST := $(VENV)/oldest-$(OLDEST_TRANSFORMERS)
TEST_ENV := env -u CUDA_VISIBLE_DEVICES OMP_NUM_THREADS=1 TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST_ARGS ?=

.PHONY: demo test test-latest test-oldest test-gpu bench-kernels bench-damp bench-gpu lint format clean

demo: $(VENV)/.installed
	$(BIN)/hf-lowbit demo

test: test-latest test-oldest

test-latest: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-oldest: $(VENV)/.installed $(OLDEST)/.installed
	$(TEST_ENV) PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -m "not gpu and (compat or not slow)" $(PYTEST_ARGS)

test-gpu:
	PYTHONPATH=.:kernels/torch-ext $(PYTHON) -m pytest -m "gpu or not gpu" $(PYTEST_ARGS)

bench-kernels:
	PYTHONPATH=kernels/torch-ext $(PYTHON) -m hf_lowbit_kernels.benchmarks.vq_attention --json docs/benchmarks/vq_attention.json

bench-damp:
	PYTHONPATH=kernels/torch-ext $(PYTHON) -m hf_lowbit_kernels.benchmarks.damp_update --json docs/benchmarks/damp_update.json $(BENCH_ARGS)

bench-gpu:
	PYTHONPATH=.:kernels/torch-ext $(PYTHON) -m hf_lowbit.cli bench all --json docs/benchmarks $(BENCH_ARGS)

lint: $(VENV)/.linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that the tests see the working tree; it also puts the optimum-cli command in place.
$(VENV)/.installed: tests/requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -r tests/requirements.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

$(OLDEST)/.installed: | $(BIN)/python
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --no-deps --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

$(VENV)/.linter: | $(BIN)/python
	$(BIN)/python -m pip install -r tests/requirements-lint.txt
	touch $@
