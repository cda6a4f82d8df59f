# `make demo` runs the main job, `make test` passes the tests; each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More than there are cores: most tests wait.
TEST_WORKERS ?= 4
# After a worker has crashed, the session ends with the other workers. With a new worker it can wait forever.
NO_RESTART := --max-worker-restart 0
export DAGSTER_HOME ?= $(or $(BRANCHLAKE_STATE_DIR),$(CURDIR)/.branchlake)/dagster

.PHONY: help setup demo dev test test-extended test-fast test-soak durations lint types check wheel bench docs lock lock-jars clean

help:  ## list what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Images set it to stay small. Without byte code every process that is started compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

# The locks are complete, so no resolver runs (pip stumbles over extras in hash mode). What is run needs a
# third of what is tested; its byte code is left to the first import, which compiles only what it needs.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

setup: $(VENV)/.ready  ## virtual environment from the lock file, jars through Ivy

$(VENV)/.running: requirements-run.lock setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …"; exit 1; }
	@echo "Installing what the demo needs into $(VENV) …"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-compile --require-hashes -r requirements-run.lock
	$(INSTALL) --no-build-isolation -e .
	$(BIN)/branchlake fetch --prepare
	@touch $@

$(VENV)/.ready: $(VENV)/.running requirements.lock
	@echo "Installing what tests and tools need into $(VENV) …"
	$(INSTALL) --require-hashes -r requirements.lock
	@touch $@

demo: $(VENV)/.running  ## the main job: runs on branches, one of them blocked, the rest published
	$(BIN)/branchlake demo

dev: $(VENV)/.running  ## the Dagster UI with sensors and schedules running
	$(BIN)/branchlake up
	$(BIN)/dagster dev -w workspace.yaml -h 127.0.0.1

test: setup  ## the tests that have to pass
	$(BIN)/python -m pytest -m "not extended" -n $(TEST_WORKERS) $(NO_RESTART) --junitxml=build/tests.xml

test-extended: setup  ## the long tests that `make test` leaves out; CI runs both
	$(BIN)/python -m pytest -m extended -n $(TEST_WORKERS) $(NO_RESTART) --junitxml=build/tests-extended.xml

durations: $(VENV)/.ready  ## record how long the tests of the last `make test` and `make test-extended` took
	$(BIN)/python -m branchlake_dagster_tests.suite.durations $(wildcard build/tests.xml build/tests-extended.xml)

test-fast: setup  ## the tests that start no server, but for the long ones
	$(BIN)/python -m pytest -m "unit and not long" -n 2

# Takes hours: the tests marked `soak`, and many more schedules, histories, kills and lost requests.
test-soak: SOAK_SEED := $(shell date +%s)
test-soak: setup  ## hours: every variant, many simulated schedules, histories and kills; writes build/soak-SEED.xml
	@echo "Seed $(SOAK_SEED)"
	BRANCHLAKE_TEST_SOAK=1 \
	BRANCHLAKE_TEST_SIM_SCHEDULES=50000 BRANCHLAKE_TEST_SIM_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_HISTORIES=50000 BRANCHLAKE_TEST_HISTORIES_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_REAL_HISTORIES=400 BRANCHLAKE_TEST_REAL_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_INGEST_HISTORIES=200 BRANCHLAKE_TEST_INGEST_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_KILLS=100 BRANCHLAKE_TEST_KILL_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_LOSSY_RUNS=200 BRANCHLAKE_TEST_LOSSY_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_UNDO_HISTORIES=1000 BRANCHLAKE_TEST_UNDO_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_MAINTENANCE_SCHEDULES=1500 BRANCHLAKE_TEST_ROOTS_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_SHUFFLES=10 BRANCHLAKE_TEST_SHUFFLE_SEED=$(SOAK_SEED) \
	BRANCHLAKE_TEST_HOSTILE=100000 BRANCHLAKE_TEST_HOSTILE_SEED=$(SOAK_SEED) \
	$(BIN)/python -m pytest -n 2 $(NO_RESTART) --timeout 14400 --junitxml=build/soak-$(SOAK_SEED).xml

lint: setup  ## linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## strict type checker
	$(BIN)/mypy

check: lint types test test-extended  ## what CI runs

wheel: setup  ## a wheel of the package, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

bench: setup  ## where the time goes
	$(BIN)/branchlake bench lifecycle

docs: setup  ## the API reference, in build/api
	$(BIN)/python docs/make_api.py build/api

lock: EXTRAS := sda embedded ui postgres query kafka receive dev
lock: RUNNING := sda embedded ui query
lock: COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras \
	--no-emit-index-url --no-emit-find-links
lock: setup  ## resolve both locks anew
	$(COMPILE) $(EXTRAS:%=--extra %) -o requirements.lock setup.cfg
	$(COMPILE) $(RUNNING:%=--extra %) --build-deps-for editable -c requirements.lock -o requirements-run.lock setup.cfg

# Without `setup`, which fetches jars and refuses those that are not locked yet.
lock-jars:  ## write the SHA-256 of each jar, after a version in the package has changed
	$(BIN)/python -m branchlake_dagster.cli.lock_jars

clean:  ## stop the servers, remove .venv and .branchlake with the data
	-$(BIN)/branchlake down
	rm -rf $(VENV) .branchlake
