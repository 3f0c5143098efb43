# Tongguan. `make` alone explains the targets.
PYTHON ?= python3
BIN := .venv/bin
# The question reaches the shell through the environment, so quotes and dollars in it stay text.
# An empty one is passed on, to be refused.
ASKED := $(filter-out undefined,$(origin ASK))
override ASK := $(value ASK)
export ASK

# Seconds of `make fuzz`, shared by the fuzzers.
FUZZ_S ?= 600

ROOMS := proxy agent kernels ebpf
# A worker for each core, up to four: all that times a sidecar goes to one of them (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4
PURE_TESTS := tests/test_tidy.py tests/test_docs.py tests/unit

.DEFAULT_GOAL := help
.PHONY: help up test check lint fuzz page interop mutants bench bench-proxy soak soak-rotation kernels vm clean setup-dev

help:
	@echo 'make up              first run: set up .venv, start agent and sidecar, ask one question'
	@echo '                     over the SM4 channel, show the verified audit record, then serve'
	@echo '                     until Ctrl-C.  ONESHOT=1 stops after the answer;'
	@echo '                     ASK="..." asks your own question;'
	@echo '                     TONGGUAN_UP_BASE_PORT=15000 takes ports 15080 to 15190, not 14080 to 14190'
	@echo 'make test            everything: make check, then all tests (10 to 20 minutes on 2 cores)'
	@echo 'make check           format, lint, types, import directions, unit tests'
	@echo '                     (a few minutes the first time, when it installs the tools)'
	@echo 'make fuzz            all fuzzers (heads, chunks, JSON, event streams, envelopes, SM4), 10 minutes together;'
	@echo '                     FUZZ_S=3600 takes an hour (make test has a minute of kernels/sm4)'
	@echo 'make page            the page on 14190 in a headless Chromium (apt-get install chromium-headless-shell);'
	@echo '                     and the audit report; PAGE_PNG=docs/page.png and REPORT_PNG=docs/report.png'
	@echo '                     keep what they look like'
	@echo 'make interop         real vLLM on a CPU, in an environment of its own (3.5 GB; several minutes)'
	@echo 'make mutants         put one-line faults into the data path, one at a time: the test named for each'
	@echo '                     has to fail (about 15 minutes)'
	@echo 'make bench           cost of the sidecar, of SM4 beside AES-256, of the engine (perf/README.md)'
	@echo 'make bench-proxy     the sidecar beside seven other proxies, every gate, with a plot (10 minutes;'
	@echo '                     installs the peers under perf/work, nginx and haproxy by your system)'
	@echo 'make bench-audit     cost of the audit log: a record, 2 million of them written and verified,'
	@echo '                     200 kills (3 minutes, 5 GB of disk; perf/README.md)'
	@echo 'make soak            10 minutes of load, deaths and checks that nothing leaks (perf/README.md)'
	@echo 'make soak-rotation   10 minutes of rotating and revoking keys under load; no request may be lost'
	@echo 'make kernels        compile the CUDA kernels for every architecture (needs nvcc)'
	@echo 'make vm              tests that need a kernel of their own (not built yet; says why)'
	@echo 'make clean           remove what these targets made; keys and audit logs are kept'
	@echo
	@echo 'Another Python (3.11 or newer):  make up PYTHON=python3.12'
	@echo 'A CPU build of torch:            README.md, "A CPU build of torch"'

up:
	@$(PYTHON) deploy/setup/bootstrap.py
	@exec $(BIN)/tongguan up $(if $(filter 1 yes true,$(ONESHOT)),--oneshot) $(if $(ASKED),--ask "$$ASK")

setup-dev:
	@$(PYTHON) deploy/setup/bootstrap.py --dev

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(PYTEST) -q -m 'not slow and not model' $(PURE_TESTS)

test: lint
	$(PYTEST)

fuzz: setup-dev
	@case '$(FUZZ_S)' in ''|*[!0-9]*) echo 'FUZZ_S: expected whole seconds' >&2; exit 2;; esac
	$(BIN)/python -m tests.fuzz.wire --seconds $$(( $(FUZZ_S) / 5 * 2 ))
	$(BIN)/python -m tests.fuzz.sse --seconds $$(( $(FUZZ_S) / 5 ))
	$(BIN)/python -m tests.fuzz.envelope --seconds $$(( $(FUZZ_S) / 5 ))
	$(BIN)/python -m tests.fuzz.sm4 --seconds $$(( $(FUZZ_S) / 5 ))

page: setup-dev
	$(BIN)/python -m pytest -q -rs tests/page

interop: setup-dev
	$(BIN)/python -m tests.interop.vllm_env
	$(BIN)/python -m pytest -q -rs tests/interop

mutants: setup-dev
	$(BIN)/python -m tests.mutants

bench: setup-dev
	$(BIN)/python -m perf.proxy --setup
	$(BIN)/python -m perf.proxy --peers relay,envoy,direct,tongguan
	$(BIN)/python -m perf.sm4
	$(BIN)/python -m perf.channel
	$(BIN)/python -m perf.engine

bench-proxy: setup-dev
	$(BIN)/python -m perf.proxy --setup --peers all
	$(BIN)/python -m perf.proxy --peers all --resume --json perf/work/proxy.json --plot perf/work/proxy.png

bench-audit: setup-dev
	@mkdir -p perf/work
	$(BIN)/python -m perf.audit --dir perf/work --json perf/work/audit.json
	$(BIN)/python -m perf.killing --dir perf/work --json perf/work/killing.json

soak: setup-dev
	$(BIN)/python -m perf.soak --minutes 10 --json perf/work/soak.json

soak-rotation: setup-dev
	$(BIN)/python -m perf.rotation_soak --minutes 10 --json perf/work/rotation_soak.json

kernels: setup-dev
	$(BIN)/python -m kernels.build --out build/kernels
	cp build/kernels/manifest.json perf/results/kernels.json

vm:
	@echo 'make vm: nothing to run yet. The kernel guard (ebpf/: LSM, ioctl tracing) is not built, so' >&2
	@echo 'there is no program to load in a kernel of its own. This target exits 2 until there is.' >&2
	@exit 2

# Only what the targets above made: .tongguan/ holds keys and audit logs and is left alone.
clean:
	rm -rf .venv build dist perf/work tongguan.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -f kernels/*/*.so
	find $(ROOMS) tests perf deploy -name __pycache__ -type d -prune -exec rm -rf {} +
