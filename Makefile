# make demo | test | test-all | lint: each sets up .venv first (once, and again when pyproject.toml or constraints.txt changes).
PYTHON ?= python3
BIN := .venv/bin

# One thread for each process: the tests and the demo start two ranks, and more threads than cores only fight.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint clean

demo: .venv/.demo-stamp
	rm -rf out/graphs
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_demo.py
	$(BIN)/fsdp-compile bench --modes fsdp2,fsdp --nproc 2 --layers 4 --dim 256 --heads 4 --ffn 688 --vocab 512 \
		--seq 128 --batch 4 --warmup 2 --steps 4 --rounds 3 --json out/bench.json
	@echo
	@echo "Graphs before and after each pass: out/graphs    Measurements: out/bench.json"

test: .venv/.test-stamp
	$(BIN)/python -m pytest -q --durations=12 -m "not extra"

test-all: .venv/.test-stamp
	$(BIN)/python -m pytest -q --durations=12

lint: .venv/.test-stamp
	$(BIN)/ruff check .
	rm -rf build/lint && $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/lint .
	cd build/lint && $(CURDIR)/$(BIN)/mypy --config-file ../../pyproject.toml -p fsdp_compile  # as installed: editable hides passes/

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo-stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/.test-stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,hf]'
	@touch $@ .venv/.demo-stamp
