# Thin targets: each shows the real commands. PYTHON picks the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TOOLS := .venv/.tools

# The demo's size; CI runs it smaller.
DEMO_WORKLOAD ?= examples/gpt.py:workload(width=192)
DEMO_STEPS ?= 40

.PHONY: demo test test-long test-all gpu lint types docs clean

# What the program needs, and in TOOLS what its tests, checks and documentation need.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $(READY)

$(TOOLS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(TOOLS)

demo: $(READY)
	mkdir -p demo
	$(BIN)/assigner profile '$(DEMO_WORKLOAD)' -o demo/profile.json --workers 2 --threads 1 --force
	$(BIN)/assigner show demo/profile.json
	$(BIN)/assigner solve demo/profile.json -o demo/single.json --baseline single --force
	$(BIN)/assigner solve demo/profile.json -o demo/plan.json --force
	rm -f demo/single-trace.json demo/plan-trace.json
	$(BIN)/assigner run demo/single.json -- examples/train.py --steps $(DEMO_STEPS) --trace demo/single-trace.json
	$(BIN)/assigner run demo/plan.json -- examples/train.py --steps $(DEMO_STEPS) --trace demo/plan-trace.json
	@echo "Where the two last losses differ, it is by rounding: other micro-batches, other sums (docs/training.md)."
	$(BIN)/assigner report demo/single.json demo/plan.json -o demo/report.html --force \
		--measured demo/single-trace.json --measured demo/plan-trace.json
	$(BIN)/assigner compare demo/single.json demo/plan.json \
		--measured demo/single-trace.json --measured demo/plan-trace.json

# What is long by nature (the lab, architectures of transformers, the browser, every block of the documentation) is
# marked `long` and runs in test-long.
test: $(TOOLS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not long'

test-long: $(TOOLS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long

test-all: test test-long

# What needs a GPU, in 15 minutes and without a network, on the interpreter that has torch for it; benchmarks/gpu/README.md.
gpu:
	$(PYTHON) benchmarks/gpu/run.py

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/mypy

# The site, in site/; a broken link or anchor ends the build.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf .venv demo site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
