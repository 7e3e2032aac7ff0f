PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-all check rehearse

setup: $(VENV)/.ok

$(VENV)/.ok: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python jobs/demo.py

# Two at a time, as ranks that wait for each other leave a core idle; what shares clusters and servers alone.
test: setup
	$(BIN)/python -m pytest -n 2 --ignore tests/ray --ignore tests/s3 --ignore tests/chaos
	$(BIN)/python -m pytest tests/ray tests/s3 tests/chaos

# And the rest of long lists, and every fault in every phase of a run, alone and in pairs: more than an hour on 2 idle cores.
test-all: test
	$(BIN)/python -m pytest -n 2 -m wide
	$(BIN)/python -m pytest -m matrix -s tests/chaos

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy raymega benchmarks
	$(BIN)/lint-imports

# As root. Brings the cluster files up for real on machines of namespaces, and breaks them: minutes.
rehearse: setup
	$(BIN)/python -m pytest -m cluster -s tests/cluster
