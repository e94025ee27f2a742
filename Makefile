# Every target does its own set-up: a fresh machine needs Python 3.12 to 3.14 with pip, and nothing else.

BIN := .venv/bin
JOBS ?= 2

.PHONY: help setup system demo test check lint types unit redteam compiled test-gpu lock clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: .venv/.complete  ## Create .venv with everything pinned in requirements.lock

.venv/.complete: requirements.lock pyproject.toml scripts/setup.sh
	bash scripts/setup.sh

system:  ## Install what the sandbox and the browser tests need from Debian, where that is possible
	bash scripts/system.sh

demo: setup system  ## Rehearse the whole loop on this CPU and write a report to open
	$(BIN)/mkb run examples/demo.toml
	$(BIN)/mkb report examples/demo.toml --out runs/demo/report.html

test: setup system check unit  ## Everything that is checked: format, types, tests

check: lint types  ## Format and types only

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

CLOCKED := tests/grading tests/exploits tests/judging tests/cli/test_grade.py tests/cli/test_redteam.py \
  tests/cli/test_rematch.py tests/cli/test_export.py tests/cli/test_run.py tests/cli/test_witnesses.py tests/examples

# On a machine that others use, clocks may be too disturbed to be compared: such a test, and no other, is tried again.
unit: setup  ## The tests alone; those that compare clocks run by themselves, so that nothing disturbs them
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(CLOCKED))
	$(BIN)/pytest -n 0 --reruns 2 --only-rerun 'too busy to compare clocks|clock-disagreement' $(CLOCKED)

redteam: setup system  ## Grade every exploit and every honest oddity on this CPU
	$(BIN)/mkb redteam
	$(BIN)/mkb redteam --honest

compiled: setup  ## Compile the witnesses that are new or changed, and put them on record
	$(BIN)/python -m tests.witnesses.compiled

test-gpu: setup  ## The tests that need a GPU; fails where there is none
	MKB_REQUIRE_GPU=1 $(BIN)/pytest -m gpu -n 0

lock: setup  ## Pin the newest versions that pyproject.toml allows
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.12 \
	  --no-emit-index-url --no-header --no-annotate --upgrade --quiet --output-file requirements.lock

clean:  ## Remove the environment and what runs have left
	rm -rf .venv runs .mypy_cache .ruff_cache .hypothesis
