# Every target is a thin call of `python -m train`, `python -m serve` or a script; see their --help.
# It is `exec`uted, so that a signal to make reaches the program and not the shell alone.
# POSIX sh and the syntax of GNU make 3.81, so that it runs on macOS too (tests/scripts/test_makefile.py).

PYTHON ?= python3.11
CONFIG ?= configs/digits.yaml
ARGS ?=
IMAGE ?=
TARGET ?= serve
BUNDLE ?=
N ?= 100000
PROFILE ?= cpu
RELEASE ?=
NAME ?=
FROM ?=

ENVIRONMENT = "$(PYTHON)" scripts/environment.py
TRAIN_PYTHON = .venv/train/bin/python
SERVE_PYTHON = .venv/serve/bin/python
TRAIN = $(TRAIN_PYTHON) -m train
SERVE = $(SERVE_PYTHON) -m serve
DEPLOY = $(SERVE_PYTHON) -m deploy
OPTIONS = --config "$(CONFIG)" $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup data plan train profile evaluate export publish promote rollback releases serve gateway stack smoke \
	predict report pipeline test test-fast chaos-train chaos-serve soak equivalence fuzz-preprocessing \
	benchmark-preprocessing benchmark-training benchmark-export benchmark-pretrained benchmark-serving trend \
	image smoke-deploy sbom lint format lock programs extras rename update clean distclean \
	python train-environment serve-environment server deploy-environment dev-environments

help: ## Show this help
	@echo 'make TARGET [CONFIG=configs/….yaml] [ARGS="--optimizer.lr 0.1 …"] [PYTHON=python3.11]'
	@echo
	@awk 'BEGIN { FS = ":.*## " } /^[a-z][a-z-]*:.*## / { printf "  %-23s %s\n", $$1, $$2 }' Makefile

pipeline: train-environment server ## The main job: data, train, evaluate, export, publish, smoke, promote, report
	@exec "$(PYTHON)" scripts/pipeline.py $(OPTIONS)

setup: train-environment server ## Make or update the environments (the other targets do it themselves)

data: train-environment ## Write the embedded data set, and find images that must not be trained on
	@exec $(TRAIN) data $(OPTIONS)

plan: train-environment ## Say what memory a training step takes, and what ranks send, before there are GPUs
	@exec $(TRAIN) plan $(OPTIONS)

train: train-environment ## Train, or go on with a run that was cut short
	@exec $(TRAIN) fit $(OPTIONS)

profile: train-environment ## Train a few steps, and say what they spend their time on and what makes them slow
	@exec $(TRAIN) profile $(OPTIONS)

evaluate: train-environment ## Evaluate the best checkpoint on the test split
	@exec $(TRAIN) evaluate $(OPTIONS)

export: train-environment ## Export a bundle, if it passes the parity gate
	@exec $(TRAIN) export $(OPTIONS)

publish: train-environment server ## Export, publish the bundle as a release, try it, and let it be served
	@bundle="$$($(TRAIN) export $(OPTIONS))" && exec $(SERVE) publish --bundle "$$bundle"

promote: server ## Try a release and let it be served: make promote RELEASE=name
	@test -n "$(RELEASE)" || { echo 'error: name the release: make promote RELEASE=name' >&2; exit 2; }
	@exec $(SERVE) promote "$(RELEASE)" $(ARGS)

rollback: serve-environment ## Serve the release from before again
	@exec $(SERVE) rollback $(ARGS)

releases: serve-environment ## List the releases, and say which is served
	@exec $(SERVE) list $(ARGS)

serve: server ## Serve the current release in the foreground (Ctrl-C stops it)
	@exec $(SERVE) up $(ARGS)

gateway: serve-environment ## TLS, keys, limits and the try-it page in front of a running `make serve` (Ctrl-C stops it)
	@exec $(SERVE_PYTHON) -m deploy.gateway up $(ARGS)

stack: deploy-environment ## Start the whole service with Docker Compose, for a CPU or a GPU: make stack PROFILE=gpu
	@exec $(SERVE_PYTHON) -m deploy.stack up --profile "$(PROFILE)"

smoke: train-environment server ## Publish, and send every test image through a server of its own; promote nothing
	@data="$$($(TRAIN) data $(OPTIONS))" \
	&& evaluation="$$($(TRAIN) evaluate $(OPTIONS))" \
	&& bundle="$$($(TRAIN) export $(OPTIONS))" \
	&& release="$$($(SERVE) publish --bundle "$$bundle" --no-promote)" \
	&& exec $(SERVE) smoke --release "$$release" --images "$$data" --bundle "$$bundle" --evaluation "$$evaluation" \
		--output "$$(mktemp)"

predict: serve-environment ## Ask the running server about a file, a folder or a pattern: make predict IMAGE=path
	@test -n "$(IMAGE)" || { echo 'error: name the image: make predict IMAGE=path' >&2; exit 2; }
	@exec $(SERVE) predict "$(IMAGE)" $(ARGS)

report: train-environment ## Write the report page of the run
	@exec $(TRAIN) report $(OPTIONS)

test: dev-environments ## Run every test in both environments, with coverage
	@exec "$(PYTHON)" scripts/run_tests.py $(ARGS)

test-fast: dev-environments ## Run the tests that start no real training and no server
	@exec "$(PYTHON)" scripts/run_tests.py -m "not integration and not slow" $(ARGS)

chaos-train: dev-environments ## Kill real training 52 times at random moments; it must not lose or repeat a step
	@exec $(TRAIN_PYTHON) -m pytest tests/integration/test_kill_anywhere.py --kills 13 -v -s $(ARGS)

equivalence: dev-environments ## Train in every combination of strategy, compilation, micro-batches and precision
	@exec $(TRAIN_PYTHON) -m pytest tests/integration/test_equivalence.py --whole-matrix -v $(ARGS)

chaos-serve: dev-environments ## Kill, overload, switch, starve a real service under load; no answer may be wrong
	@exec $(SERVE_PYTHON) -m pytest tests/serve/test_chaos.py tests/serve/test_chaos_of_the_machine.py --rounds 5 -s $(ARGS)

soak: dev-environments ## Ask a real service for 30 minutes at 70 % of what it can; nothing may grow or leak
	@exec $(SERVE_PYTHON) -m pytest tests/serve/test_soak.py --soak-minutes 30 -s $(ARGS)

fuzz-preprocessing: serve-environment ## Feed N damaged images to preprocessing: they are read, or refused in words
	@exec $(SERVE_PYTHON) -m tests.slipway.fuzz $(N)

benchmark-preprocessing: python ## Preprocessing beside torchvision, OpenCV and Pillow; fails above a target
	@$(ENVIRONMENT) train --benchmark
	@exec $(TRAIN_PYTHON) -m benchmarks.preprocessing $(ARGS)

benchmark-training: python ## Our step and data path beside a bare loop, Lightning, timm and torchvision
	@$(ENVIRONMENT) train --benchmark
	@exec $(TRAIN_PYTHON) -m benchmarks.training $(ARGS)

benchmark-export: train-environment ## Latency of every format against ONNX Runtime, and what each costs in accuracy
	@exec $(TRAIN_PYTHON) -m benchmarks.export $(ARGS)

benchmark-pretrained: python ## What fp16, bf16 and int8 cost a pretrained network on real photographs
	@$(ENVIRONMENT) train --benchmark
	@exec $(TRAIN_PYTHON) -m benchmarks.pretrained $(ARGS)

# Without BUNDLE it trains one, twice exported: as peers would serve it, and as it is fastest.
benchmark-serving: train-environment server ## Served, against the same work without a server, and behind other servers
	@$(ENVIRONMENT) serve --peers
	@if test -n "$(BUNDLE)"; then exec $(SERVE_PYTHON) -m benchmarks.serving "$(BUNDLE)" $(ARGS); fi; \
	options="--config benchmarks/serving.yaml" \
	&& $(TRAIN_PYTHON) -m benchmarks.photographs build/photographs && $(TRAIN) fit $$options >&2 \
	&& plain="$$($(TRAIN) export $$options)" \
	&& best="$$($(TRAIN) export $$options --recommend --export.formats '[onnx, onnx-int8, openvino-int8]')" \
	&& exec $(SERVE_PYTHON) -m benchmarks.serving "$$plain" --best "$$best" $(ARGS)

trend: python ## Make a page of what benchmarks found so far, with ARGS="--json trend/results.jsonl"
	@exec "$(PYTHON)" scripts/trend.py trend/results.jsonl trend/index.html

image: deploy-environment ## Build an image, in the engine that runs here: make image TARGET=serve, gateway or train
	@exec $(DEPLOY) image --target "$(TARGET)" $(ARGS)

smoke-deploy: deploy-environment ## Try the serving image in a container, with BUNDLE=path or what `make export` makes
	@bundle="$(BUNDLE)"; test -n "$$bundle" || bundle="$$($(MAKE) --no-print-directory export ARGS=)" \
	&& exec $(DEPLOY) smoke --bundle "$$bundle" $(ARGS)

sbom: deploy-environment ## List what the locks install, as CycloneDX, in build/sbom
	@exec $(DEPLOY) sbom $(ARGS)

lint: dev-environments ## Check every file with its linter: locks, style, types, scripts, YAML, workflows, manifests
	@exec $(SERVE_PYTHON) scripts/lint.py $(ARGS)

format: dev-environments ## Format the code and mend what can be mended
	@exec $(TRAIN_PYTHON) -m ruff check --fix .
	@exec $(TRAIN_PYTHON) -m ruff format .

# The lock tool comes with the smaller environment; ARGS=--upgrade moves what no .in file pins.
lock: python ## Pin requirements/*.in, with hashes, in requirements/*.lock
	@$(ENVIRONMENT) serve --dev
	@exec $(SERVE_PYTHON) scripts/lock.py $(ARGS)

rename: python ## Give a fork a name of its own, everywhere: make rename NAME=harbour
	@test -n "$(NAME)" || { echo 'error: say how it shall be called: make rename NAME=harbour' >&2; exit 2; }
	@$(ENVIRONMENT) serve --dev
	@exec "$(PYTHON)" scripts/fork.py rename "$(NAME)"

update: python ## Merge what upstream has done since into a fork, under its name: make update FROM=upstream/main
	@test -n "$(FROM)" || { echo 'error: name a commit: make update FROM=upstream/main' >&2; exit 2; }
	@$(ENVIRONMENT) serve --dev
	@exec "$(PYTHON)" scripts/fork.py update "$(FROM)"

clean: ## Remove what the stages made (never .venv, nor an image folder of your own)
	rm -rf data/digits data/photos data/.cache runs bundles model_repository
	rm -rf .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis

programs: python ## Install, as root, the Debian packages that the tests of deploy/ use
	@exec "$(PYTHON)" scripts/programs.py

extras: train-environment ## Install experiment trackers, and the reader of Hugging Face data sets
	@$(ENVIRONMENT) train --extras

distclean: clean ## The same, and the environments
	rm -rf .venv

python:
	@command -v "$(PYTHON)" >/dev/null || { echo 'error: $(PYTHON) was not found; install Python 3.11,' \
		'or say where it is: make PYTHON=/path/to/python3.11 …' >&2; exit 1; }

train-environment: python
	@$(ENVIRONMENT) train

serve-environment: python
	@$(ENVIRONMENT) serve

server: python
	@$(ENVIRONMENT) serve server

deploy-environment: server
	@$(ENVIRONMENT) serve --dev --deploy

dev-environments: python
	@$(ENVIRONMENT) train serve server --dev
	@$(ENVIRONMENT) train --dev --extras
	@$(ENVIRONMENT) serve --dev --deploy
