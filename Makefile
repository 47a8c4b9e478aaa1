# Holdfast's few commands. Needs Python 3.11+ (with venv), make and pip; nothing else.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
VERSION := -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null
WANTED := $(shell $(PYTHON) $(VERSION))
HAVE := $(shell $(BIN)/python $(VERSION))
MINUTES ?= 5
HOURS ?= 1
REPORTS := build/reports/$(shell date +%Y%m%d-%H%M%S)
# A suite joins `make test` as soon as its directory exists.
SUITES := $(wildcard tests/unit tests/conformance tests/integration tests/faults tests/security tests/docs tests/uptime examples)
# Tests mostly wait for servers and processes, so three for each core keep the machine busy. A file
# runs in one process, so that its tests share one server. A process that dies fails the run: with a
# new one in its place, the run may wait forever for tests that nobody has.
CORES := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))')
PARALLEL ?= $(shell expr 3 '*' $(CORES))
PYTEST = $(BIN)/python -m pytest -q -n $(PARALLEL) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Two things at once, each with its output in one piece.
BOTH := $(MAKE) --no-print-directory --jobs=2 --output-sync=target

# Without bytecode files every process that a test starts would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: another-python help setup demo test check static compiled unit k8s bench bench-full bench-growth bench-limits bench-flows bench-claims bench-pages chaos soak house coverage costs docs site release-check locks clean system

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with everything, pinned (quick when nothing changed)

# `make test PYTHON=python3.12` must not test with the Python of an earlier `make`.
$(STAMP): pyproject.toml constraints.txt apps/uptime/pyproject.toml $(if $(filter-out $(WANTED),$(HAVE)),another-python)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11: install Python 3.11+," \
	       "or name one: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv package" \
	       "(Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@[ "$(HAVE)" = "$(WANTED)" ] || rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[dev]' --editable apps/uptime --constraint constraints.txt
	@touch $@

demo: setup ## see it work: a shop, retries, dead letters, a fleet, killed workers (ARGS=--seconds=60)
	$(BIN)/holdfast demo $(ARGS)

test: system ## everything: lint, format, types, layers, then every test suite
	+@$(BOTH) static compiled
	$(PYTEST) --durations=20 $(SUITES)

check: setup ## the quick part of `test`: all but the tests with a server
	+@$(BOTH) static unit

static: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Or else each process of pytest would compile all tests itself, for 8 seconds of each core.
compiled: setup
	@$(BIN)/python -m pytest -q --collect-only $(SUITES) >/dev/null || true

unit: PARALLEL := $(CORES)
unit: setup
	$(PYTEST) tests/unit

k8s: setup ## apply the rendered manifests to a real API server (KUBEBUILDER_ASSETS=dir of envtest)
	@[ -x "$$KUBEBUILDER_ASSETS/kube-apiserver" ] && command -v kubectl >/dev/null || { \
	  echo "needs kubectl, and KUBEBUILDER_ASSETS: a directory with etcd and kube-apiserver;" \
	       "docs/kubernetes.md says where they come from"; exit 1; }
	$(BIN)/python -m pytest -q tests/k8s

bench: setup ## measure Holdfast beside its peers (about 7 minutes)
	$(BIN)/python -m benchmarks.environments
	$(BIN)/python -m benchmarks

bench-full: setup ## the same with more and longer samples
	$(BIN)/python -m benchmarks.environments
	$(BIN)/python -m benchmarks --full

bench-growth: setup ## what more runs, schedules, jobs and workers cost, at 1, 10 and 100 times (8 minutes)
	$(BIN)/python -m benchmarks.growth

bench-claims: setup ## 10,000 publishes about 1,000 documents with kills, 50,000 waits, the cost of logs (7 minutes)
	$(BIN)/python -m benchmarks.documents
	$(BIN)/python -m benchmarks.documents --guard
	$(BIN)/python -m benchmarks.waits
	$(BIN)/python -m benchmarks.kept

bench-pages: setup ## every page with 1,000,000 ended runs, 1,000 nodes and 10,000 agents (5 minutes)
	$(BIN)/python -m benchmarks.pages

bench-limits: setup ## what limits cost and how fair they are, beside DBOS and taskiq (10 minutes)
	$(BIN)/python -m benchmarks.limits

bench-flows: setup ## flows beside DBOS and Temporal, fan-outs of 10,000, 100,000 sleepers (6 minutes)
	$(BIN)/python -m benchmarks.flows

chaos: setup system ## break everything for 5 minutes, check every promise (MINUTES=5 SEED=…)
	$(BIN)/python -m chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	  --out $(REPORTS)/chaos

soak: setup system ## the long things: 100,000 histories, hours of chaos (HOURS=1), a rollout under load
	HOLDFAST_SOAK=1 HOLDFAST_HISTORIES=100000 $(BIN)/python -m pytest -q --timeout=0 \
	  $(wildcard tests/unit tests/security tests/faults)
	$(BIN)/python -m chaos --minutes $$(( $(HOURS) * 60 )) \
	  $(if $(SEED),--seed $(SEED)) --out $(REPORTS)/chaos
	$(BIN)/python -m chaos --rolling --minutes 15 --out $(REPORTS)/rollout

# What the tests need from the system: libfaketime sets a process's clock wrong, Chromium opens the
# pages, Prometheus (with promtool) scrapes and checks, openssl makes certificates. Installed here
# when that is allowed.
system:
	@missing=; ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing="$$missing libfaketime"; \
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null || missing="$$missing postgresql"; \
	command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || missing="$$missing chromium-headless-shell"; \
	for tool in prometheus openssl; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; apt-get update -qq >/dev/null 2>&1; \
	  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $$missing \
	    >/dev/null 2>&1 && exit 0; fi; \
	echo "please install$$missing (Debian, Ubuntu: sudo apt install$$missing): their tests fail without"

house: setup ## measure the code: lines, repeats, files on the way of each flow (TREES='COMMIT .')
	$(BIN)/python tools/house.py $(TREES)

coverage: setup system ## every suite with coverage; branches of model and ownership at least 95 %
	$(BIN)/coverage erase
	$(PYTEST) --cov --cov-report= $(SUITES)
	$(BIN)/coverage report --format=total
	$(BIN)/coverage report --include='src/holdfast/model/*,src/holdfast/ownership/*' --fail-under=95
	$(BIN)/coverage html --directory build/coverage

costs: setup system ## measure what each file of tests takes, for the order of `make test`
	$(PYTEST) -p tests.spread $(SUITES)

docs: setup ## write the generated pages: configuration, command line, metrics
	$(BIN)/python tools/generate_docs.py

# The site and the release have tools of their own, by hash, so that .venv stays small.
.venv-%: locks/%.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

site: setup system .venv-site ## build the documentation site in build/site, strictly, and follow every link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python tools/site_tools.py

release-check: setup .venv-release ## build sdist and wheel, and try them as installed on every Python here
	$(BIN)/python tools/release_check.py

LOCK := .venv-release/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-header --constraint constraints.txt
locks: .venv-release ## write the locks with hashes anew, from pyproject.toml and locks/*.in
	$(LOCK) pyproject.toml --extra web --extra taskiq --extra otel --extra s3 --extra sqlalchemy --extra django \
	  -o locks/runtime.txt
	$(LOCK) pyproject.toml --extra web --extra otel --extra s3 -o locks/image.txt
	for name in build release site; do $(LOCK) locks/$$name.in -o locks/$$name.txt; done

clean: ## remove .venv, caches and build output
	rm -rf .venv .venv-release .venv-site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
