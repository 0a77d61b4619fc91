# Everything a developer or a newcomer runs. Each target makes what it needs by itself, and is quick when it is there.
PYTHON ?= python3
BIN := .venv/bin
PEERS := .venv-peers/bin
INSTALLED := .venv/installed
NATIVE := CMakeLists.txt $(wildcard src/native/*)

.PHONY: docs demo test test-models serve check bench peers format clean help

help:
	@echo "make demo    install, pull a small model, ask it two questions"
	@echo "make test    install what the tests need and run them"
	@echo "make test-models  logits and perplexity on Qwen2.5-Coder too (fetches 480 MB)"
	@echo "make serve   OpenAI-compatible chat server on 127.0.0.1:8080"
	@echo "make check   formatting, lint, types, direction of imports"
	@echo "make bench   measure, on this machine"
	@echo "make peers   second environment with llama.cpp and transformers, to compare with"

demo: $(INSTALLED)
	@$(BIN)/everwarm pull smollm2 >/dev/null
	@printf '%s\n' "What is the capital of France?" "Why is the sky blue? Answer in two sentences." | $(BIN)/everwarm chat smollm2 --max-tokens 120

test: $(INSTALLED)
	@$(BIN)/everwarm pull smollm2 >/dev/null
	$(BIN)/pytest

test-models: $(INSTALLED)
	EVERWARM_TEST_QWEN=$$($(BIN)/python tests/golden/fetch_models.py qwen2.5-coder) $(BIN)/pytest -s tests/model/test_golden_logits.py

serve: $(INSTALLED)
	$(BIN)/everwarm serve

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

bench: $(INSTALLED)
	@model=$$($(BIN)/everwarm pull smollm2) && $(BIN)/python benchmarks/gguf_open.py "$$model"
	@$(BIN)/python benchmarks/dequant.py

peers: .venv-peers/installed

# Built without isolation, so that a change of the native code rebuilds in seconds.
$(INSTALLED): pyproject.toml $(NATIVE)
	@command -v $(PYTHON) >/dev/null || { echo "everwarm needs Python 3.11 or newer; set PYTHON to its path" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "everwarm needs Python 3.11 or newer, found $$($(PYTHON) -V); set PYTHON to a newer one" >&2; exit 2; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "everwarm needs a C++17 compiler (g++ or clang++) and found none: install one, or set CXX to its path" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "python3 -m venv failed: on Debian or Ubuntu, install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	@touch $@

.venv-peers/installed: tests/golden/peers.txt
	@test -x $(PEERS)/python || $(PYTHON) -m venv .venv-peers
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
