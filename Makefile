# Thin targets: each shows the real commands. PYTHON picks the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TOOLS := .venv/.tools

# The demo's size; CI runs it smaller.
DEMO_WORKLOAD ?= examples/gpt.py:workload(width=192)
DEMO_STEPS ?= 40
# One worker; the best plan with one worker a stage and one stage a worker; the best of all, in which workers may share
# stages, where that is faster here.
DEMO_PLANS := single pipeline plan

.NOTPARALLEL:  # the steps of an installation are of one environment
.PHONY: demo test test-all other-torch test-other-torch gpu lint types docs clean

# What the program needs, and in TOOLS what its tests, checks and documentation need as well.
.venv/.torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy
	touch .venv/.torch

$(READY): .venv/.torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $(READY)

$(TOOLS): .venv/.torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY) $(TOOLS)

demo: $(READY)
	mkdir -p demo
	$(BIN)/assigner profile '$(DEMO_WORKLOAD)' -o demo/profile.json --workers 2 --threads 1 --force --force-busy
	$(BIN)/assigner show demo/profile.json
	$(BIN)/assigner --quiet solve demo/profile.json -o demo/single.json --baseline single --force
	$(BIN)/assigner --quiet solve demo/profile.json -o demo/pipeline.json --schedule one-stage --max-replicas 1 --force
	$(BIN)/assigner solve demo/profile.json -o demo/plan.json --force
	rm -f $(DEMO_PLANS:%=demo/%-trace.json)
	for plan in $(DEMO_PLANS); do \
		$(BIN)/assigner run demo/$$plan.json -- \
			examples/train.py --steps $(DEMO_STEPS) --trace demo/$$plan-trace.json || exit 1; done
	@echo "Where the last losses differ, it is by rounding: other micro-batches, other sums (docs/training.md)."
	$(BIN)/assigner report $(DEMO_PLANS:%=demo/%.json) -o demo/report.html --force \
		$(DEMO_PLANS:%=--measured demo/%-trace.json)
	$(BIN)/assigner compare $(DEMO_PLANS:%=demo/%.json) $(DEMO_PLANS:%=--measured demo/%-trace.json)

# What is long by nature (the lab, launchers, the browser, every block of the documentation) is marked `long`, and so are
# tests that take most of a second of a processor or more, but for some that all training stands on. Tests of which the first case
# alone is run daily are `slow`, and further draws of what another test claims too (seeds, models of others) `sweep`.
# SWEEPS=2/12 runs the second of twelve parts of these, and of the further cases of what is `slow`.
SWEEPS ?= 1/1
# Three files at a time on two cores: many tests wait for ranks and for messages that must not come. Python's own cache of
# compiled files is kept, also where the environment says otherwise: it halves what collecting takes.
IN_PARALLEL := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python $(IN_PARALLEL)

test: $(TOOLS)
	$(PYTEST) -m 'not long and not sweep'

# In one go: what tests import, collect and capture is paid once.
test-all: $(TOOLS)
	$(PYTEST) --sweeps $(SWEEPS)

# With another torch of the range in pyproject.toml than constraints.txt has, in an environment of its own: both ends of
# the range before a release, and in CI what captures and trains a model, under the newest one that can be had.
TORCH ?= torch>=2.14,<2.16
OTHER := .venv-other
OTHER_TESTS ?= -m 'not long and not sweep'
$(OTHER)/.torch: pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet '$(TORCH)'
	touch $(OTHER)/.torch

$(OTHER)/.tools: $(OTHER)/.torch
	$(OTHER)/bin/pip install --quiet '$(TORCH)' --editable '.[dev]'
	touch $(OTHER)/.tools

other-torch: $(OTHER)/.tools

test-other-torch: other-torch
	PYTHONDONTWRITEBYTECODE= $(OTHER)/bin/python $(IN_PARALLEL) $(OTHER_TESTS)

# What needs a GPU, in 15 minutes and without a network, on the interpreter that has torch for it; benchmarks/gpu/README.md.
gpu:
	$(PYTHON) benchmarks/gpu/run.py

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/mypy
	for folder in benchmarks/*/; do (cd $$folder && MYPYPATH=../..:../../tests:../../examples ../../$(BIN)/mypy \
		--config-file ../../pyproject.toml --cache-dir ../../.mypy_cache *.py) || exit 1; done

# The site, in site/; a broken link or anchor ends the build.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf .venv $(OTHER) demo site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
