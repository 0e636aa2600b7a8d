# Everything the course does. Each target first sets up what it needs; a second call finds it done.
#   make lab    opens the course in JupyterLab      make test   checks everything
PYTHON ?= python3
VENV ?= .venv
export PIP_DISABLE_PIP_VERSION_CHECK = 1

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
READY := $(VENV)/.ready
# JupyterLab refuses to start as root unless told; in a container, root is the usual user.
ROOT_FLAG := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)

.PHONY: setup lab test run lint exercises peers gpu clean

setup: $(READY)

# The stamp is written last, so an interrupted set-up starts again. requirements.lock constrains versions and installs
# nothing by itself; it was made with Python 3.11, and an older Python takes what pyproject.toml allows.
$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		set -x; $(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev]'; \
	else \
		echo "Python older than 3.11: installing without requirements.lock"; \
		set -x; $(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	$(BIN)/llm-latency fetch
	touch $(READY)

lab: $(READY)
	$(BIN)/llm-latency fetch
	$(BIN)/jupyter lab --ip=127.0.0.1 $(ROOT_FLAG) $(LAB_FLAGS) notebooks/00_start_here.ipynb

# Tests run without any network: tests/offline refuses every connection that leaves this machine, in notebooks too. Unit
# tests and solved exercises measure nothing and share the cores, a thread each; notebooks measure, so they run alone.
OFFLINE = PYTHONPATH=tests/offline LLM_LATENCY_SCORECARD=$(CURDIR)/run/test-scorecard.json \
	LLM_LATENCY_PROGRESS=$(CURDIR)/run/test-progress.json
NBVAL = -m pytest --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout=600 -p no:cacheprovider
test: $(READY)
	$(BIN)/llm-latency fetch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 PYTHONPATH=tests/offline $(BIN)/python -m pytest tests -n 2 --dist loadfile $(TEST_FLAGS)
	OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python $(NBVAL) -n 2 --dist loadscope solutions
	$(OFFLINE) $(BIN)/python $(NBVAL) notebooks

run: $(READY)
	$(BIN)/llm-latency run $(RUN_FLAGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# exercises/ is written from solutions/ and never edited.
exercises: $(READY)
	$(BIN)/python tools/make_exercises.py

peers: $(READY)
	$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[peers]'
	$(BIN)/llm-latency peers $(PEERS_FLAGS)

gpu: $(READY)
	$(BIN)/llm-latency gpu-check

clean:
	rm -rf $(VENV) run
