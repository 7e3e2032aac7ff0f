PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt
PYTEST := $(BIN)/python -m pytest

# Hundreds of processes of the tests import the package: without bytecode each would compile it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo lint check test test-ranks test-clusters test-all mutate golden pages docs rehearse soak cuda-books test-cuda-books

# TORCH_INDEX: the package index that torch comes from, such as that of its CPU builds; empty is pip's own.
# Thirty thousand files are compiled on all cores; pip would take one, and some packages' files are of other languages.
setup: $(VENV)/.ok

$(VENV)/.ok: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	test -z "$(TORCH_INDEX)" || $(PIP) --index-url $(TORCH_INDEX) torch
	$(PIP) -e '.[dev,hf,eval,trackers]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	@touch $@

demo: setup
	$(BIN)/python jobs/demo.py

# Seconds: what .pre-commit-config.yaml runs.
lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

check: lint
	$(BIN)/mypy raymega benchmarks

# Ranks that wait for each other and clusters that start leave a core idle: both parts run at once, the first on two
# workers. The second, whose tests share clusters and servers, says at its end what it has to say.
test: setup
	@$(MAKE) --no-print-directory -j 2 test-ranks test-clusters

CLUSTERS := tests/ray tests/s3 tests/chaos
SELECTION :=

test-ranks: setup
	$(PYTEST) -n 2 --dist worksteal $(SELECTION) $(addprefix --ignore ,$(CLUSTERS))

test-clusters: setup
	@log=$$(mktemp); $(PYTEST) $(SELECTION) $(CLUSTERS) >$$log 2>&1; code=$$?; \
	printf '\n%s\n' 'pytest $(SELECTION) $(CLUSTERS)'; cat $$log; rm -f $$log; exit $$code

# All cases, planted mistakes and faults: 80 minutes of two cores, in shards of equal cost and a last one, cuda-books.
# SHARD=3/10 or SHARD=cuda-books runs one of them. What has passed since a file last changed is not run again.
SHARDS := 10

test-all: setup
	@failed=; for shard in $${SHARD:-$$(seq -f '%g/$(SHARDS)' $(SHARDS)) cuda-books}; do \
	  case $$shard in \
	    cuda-books) $(MAKE) --no-print-directory test-cuda-books;; \
	    *) $(MAKE) --no-print-directory -j 2 test-ranks test-clusters \
	      SELECTION="--everything --resume --shard $$shard";; \
	  esac || failed="$$failed $$shard"; \
	done; test -z "$$failed" || { echo "failed in shards$$failed; the same command runs what has not passed"; exit 1; }

# Mistakes drawn by SEED, planted one by one in a copy of the repository; those that no test sees are listed at the end.
# What was tried is kept in .mutate/: the same command continues, SHARD=2/5 tries a part.
N := 200
SEED := 0

mutate: setup
	$(BIN)/python -m tests.mutate --num $(N) --seed $(SEED) --shard $(or $(SHARD),1/1)

# Writes tests/golden/files anew: after a change of output that is meant. Read the diff.
golden: setup
	$(BIN)/python -m tests.golden.write

# Writes what is generated in docs/ anew: the tables of job-file.md and the outputs in tour.md. Read the diff.
pages: setup
	$(BIN)/python -m tests.docs.write

# The pages as a site, in site/; a link that leads nowhere is an error. Not --quiet: it hides what --strict counts.
docs: setup
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A small job for 20,000 steps with deaths in between, 10 to 20 minutes: memory, descriptors, threads and disk must stay flat.
STEPS := 20000

soak: setup
	$(BIN)/python -m benchmarks.soak --steps $(STEPS)

# As root. Brings the cluster files up for real on machines of namespaces, and breaks them: minutes.
rehearse: setup
	$(PYTEST) -m cluster -s tests/cluster

# A rank of each layout on a CUDA device that executes nothing (docs/gpu.md). It makes an environment of its own, with
# torch's CUDA build: 6.2 GB, kept in build/. Then it takes three minutes, the first time two more to compile kernels.
BOOKS := build/cuda-books
KEEP_BOOKS := $(BOOKS)/venv/bin/python -m tests.cuda_books --build $(BOOKS)
ROOFLINE := $(BOOKS)/venv/bin/python -m tests.cuda_books.roofline --build $(BOOKS)
GPU_DAY := $(BOOKS)/venv/bin/python -m tests.cuda_books.gpu_day --build $(BOOKS)
LOSE_PEER := $(BOOKS)/venv/bin/python -m tests.cuda_books.lost_peer --build $(BOOKS)

$(BOOKS)/.ok: pyproject.toml constraints.txt
	test -x $(BOOKS)/venv/bin/pip || $(PYTHON) -m venv --clear $(BOOKS)/venv
	$(BOOKS)/venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e .
	$(BOOKS)/venv/bin/python -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} has no CUDA path"'
	@touch $@

cuda-books: $(BOOKS)/.ok
	$(KEEP_BOOKS)
	$(ROOFLINE)
	$(GPU_DAY)
	$(LOSE_PEER)

# As a shard of test-all: without what has passed, and without failing where there is no CUDA build of torch.
test-cuda-books: setup
	@if $(MAKE) --no-print-directory $(BOOKS)/.ok; then \
	  $(KEEP_BOOKS) --resume $$($(BIN)/python -c 'from tests.support.selection import passed_file; print(passed_file())') \
	  && $(ROOFLINE) && $(GPU_DAY) && $(LOSE_PEER); \
	else echo "cuda-books: skipped, as torch's CUDA build could not be installed here: the lines above say why"; fi
