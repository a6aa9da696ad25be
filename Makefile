# The same targets for people and CI. Everything lives in .venv; a target that is up to date costs nothing.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,\
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
NAME ?= ttft
QUICK ?=
WORKERS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALL_INPUTS := pyproject.toml setup.py $(wildcard prfaas/codecs/csrc/* gateway/csrc/*) prfaas_connect/pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv venv-dev venv-vllm run test test-real test-vllm test-clients test-sanitized lint format bench bench-gpu soak docs proto clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "prfaas needs Python 3.11 or newer on PATH (or make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-run: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing prfaas and its pinned packages into $(VENV): a minute or two, torch is large"
	$(PIP_INSTALL) --editable ./prfaas_connect --editable '.[engine]'
	@touch $@

$(VENV)/.installed-dev: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "installing prfaas, its pinned packages, and the test and lint tools into $(VENV): some minutes"
	$(PIP_INSTALL) --editable ./prfaas_connect --editable '.[engine,test,dev]'
	@touch $(VENV)/.installed-run $@

venv: $(VENV)/.installed-run ## Virtual environment to run in
venv-dev: $(VENV)/.installed-dev ## The same with test and lint tools

venv-vllm: ## vLLM for CPUs, in .venv-vllm: 2 GB, some minutes
	@scripts/vllm_env.sh

run: venv ## Everything on this machine with the demo model (ARGS=--once: show and exit)
	@$(BIN)/python -m prfaas up $(ARGS)

test: venv-dev ## All tests but the long ones, WORKERS=2 at once where that disturbs none
	@BIN=$(BIN) WORKERS=$(WORKERS) scripts/run_tests.sh $(ARGS)

test-real: venv-dev ## The long exactness tests on the demo model
	$(BIN)/python -m pytest -m "real_model" $(ARGS)

test-vllm: venv-dev ## A real vLLM on both sides; skips loudly where it cannot be had
	@scripts/vllm_env.sh || { code=$$?; [ $$code = 3 ] && exit 0; exit $$code; }; \
	$(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-clients: venv-dev ## OpenAI's client and two public load tools against a local stack
	$(BIN)/python -m pytest tests/clients/test_openai_client.py $(ARGS)
	@scripts/clients_env.sh || { code=$$?; [ $$code = 3 ] && exit 0; exit $$code; }; \
	$(BIN)/python -m pytest -m slow tests/clients/test_load_tools.py $(ARGS)

test-sanitized: venv-dev ## The tests of gateway/csrc with address and undefined-behaviour sanitizers
	@BIN=$(BIN) scripts/sanitized_events.sh $(ARGS)

lint: venv-dev ## ruff, formatting, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv-dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## make bench NAME=ttft [QUICK=1]
	@$(BIN)/python -m bench $(NAME) $(if $(QUICK),--quick) $(ARGS)

bench-gpu: ## Engine and pair on CUDA tensors; without a GPU it says so
	@bench/gpu.sh

soak: venv-dev ## Random faults under load: make soak ARGS="--minutes 10 --seed 1"
	@$(BIN)/python -m scripts.soak $(ARGS)

docs: venv ## Write the generated pages and tables anew
	@$(BIN)/python -m scripts.gen_docs

proto: ## Generate the gRPC stubs anew
	scripts/gen_proto.sh

clean: ## Remove what the targets made
	rm -rf $(VENV) .venv-vllm .venv-clients .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
