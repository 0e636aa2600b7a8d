# Everything the course does. Each target first sets up what it needs; a second call finds it done.
#   make lab    opens the course in JupyterLab      make test   checks everything
PYTHON ?= python3
VENV ?= .venv
# Where pip finds PyTorch, if not where it finds everything else: see "A smaller set-up" in the README.
TORCH_INDEX ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Threads that wait spin for a moment and then sleep: long spins halve the speed beside another program (openmp.py).
export GOMP_SPINCOUNT ?= 1000

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
READY := $(VENV)/.ready
# JupyterLab refuses to start as root unless told; in a container, root is the usual user.
ROOT_FLAG := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)

.PHONY: setup lab test test-long soak run lint exercises peers gpu clean

setup: $(READY)

# The stamp is written last, so an interrupted set-up starts again; pip is what a new environment gets last.
$(READY): pyproject.toml requirements.lock tools/set_up.py
	@test -x $(BIN)/pip || { echo "1/3 a Python of its own in $(VENV)/ (some seconds)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python tools/set_up.py $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")
	@touch $(READY)

lab: $(READY)
	@$(BIN)/llm-latency fetch
	$(BIN)/jupyter lab --ip=127.0.0.1 $(ROOT_FLAG) $(LAB_FLAGS) notebooks/00_start_here.ipynb

test: $(READY)
	@$(BIN)/python tools/run_tests.py $(TEST_FLAGS)

# What `make test` leaves out: sanitizers, all sixty prompts, interpreted kernels at their largest, grading with nbgrader,
# processes that are killed. CI runs both.
test-long: $(READY)
	@$(BIN)/python tools/run_tests.py --only long

# What `make test` takes on trust, at length: every exercise over 2,000 seeds, property tests with ten times the
# examples, the notebooks beside a busy core. Some hours.
soak: $(READY)
	$(BIN)/python tools/soak.py $(SOAK_FLAGS)
	PROPERTY_EXAMPLES_FACTOR=10 $(BIN)/python tools/run_tests.py --only library
	$(BIN)/python tools/run_tests.py --only notebooks --busy

run: $(READY)
	$(BIN)/llm-latency run $(RUN_FLAGS)

lint: $(READY)
	@$(BIN)/python tools/run_tests.py --only lint

# exercises/ is written from solutions/ and never edited.
exercises: $(READY)
	$(BIN)/python tools/make_exercises.py

# In an environment of their own: transformers imports torchao where it finds it, and warns in every notebook.
PEERS_VENV ?= .venv-peers
peers: $(READY)
	@test -x $(PEERS_VENV)/bin/pip || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet -c requirements.lock -e '.[peers]'
	$(PEERS_VENV)/bin/llm-latency peers $(PEERS_FLAGS)

# On a CUDA machine: GPU_FLAGS="--minutes 15 --profile qwen2.5-7b"; a second call continues. See docs/gpu.md.
gpu: $(READY)
	$(BIN)/llm-latency gpu-check $(GPU_FLAGS)

clean:
	rm -rf $(READY) $(VENV) $(PEERS_VENV) run
