# Everything a developer or a newcomer runs. Each target makes what it needs by itself, and is quick when it is there.
PYTHON ?= python3
BIN := .venv/bin
PEERS := .venv-peers/bin
INSTALLED := .venv/installed
NATIVE := CMakeLists.txt $(wildcard src/native/*)
# A file of tests runs in one process, since its tests share servers and models.
PARALLEL := --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
CXX_FILES := $(wildcard src/native/*.cpp src/native/*.h tests/native/*.cpp)

.PHONY: clients page check-page docs demo test soak soak-store fuzz torture torture-replicas test-models wheel test-wheel sanitize serve check bench peers oracles format clean help

help:
	@echo "make demo    install, pull a small model; two agents talk, the server is killed, both return"
	@echo "make test    install what the tests need and run them"
	@echo "make soak    the long forms of tests that \`make test\` runs in a short form"
	@echo "make torture  thousands of processes that are killed while agents talk (CYCLES=5000)"
	@echo "make torture-replicas  processes on one object storage that are killed or frozen while agents talk (CYCLES=700)"
	@echo "make soak-store  faults, power loss and threads in the agent store, over new seeds (MINUTES=20)"
	@echo "make fuzz    the property-based tests with new random examples"
	@echo "make test-models  logits and perplexity on Qwen2.5-Coder too (fetches 480 MB)"
	@echo "make sanitize  kernel tests under AddressSanitizer and UBSan, thread pool under ThreadSanitizer (needs g++)"
	@echo "make serve   OpenAI-compatible chat server on 127.0.0.1:8080, with a page that it opens in the browser"
	@echo "make page    build the page from page/src (needs Node; the result is committed)"
	@echo "make check   formatting, lint, types, direction of imports"
	@echo "make wheel   a wheel in dist/, which installs without a compiler; make test-wheel installs it and has it answer"
	@echo "make bench   measure, on this machine"
	@echo "make clients  install the agent programs of docs/clients.md into .clients, each with a home of its own"
	@echo "make peers   second environment with llama.cpp and transformers, to compare with"
	@echo "make oracles  tiny models of every architecture and what these two compute on them (CASES='gemma2 phi3' for some)"

demo: $(INSTALLED)
	@$(BIN)/everwarm pull smollm2 >/dev/null
	@$(BIN)/python examples/demo.py

test: $(INSTALLED)
	@$(BIN)/everwarm pull smollm2 >/dev/null
	$(BIN)/pytest $(PARALLEL)

soak: $(INSTALLED)
	@$(BIN)/everwarm pull smollm2 >/dev/null
	$(BIN)/pytest $(PARALLEL) --timeout 3600 -m soak

fuzz: $(INSTALLED)
	$(BIN)/pytest --hypothesis-profile=fuzz -m hypothesis

torture: $(INSTALLED)
	$(BIN)/python tests/kv/torture.py $(or $(CYCLES),5000)

torture-replicas: $(INSTALLED)
	$(BIN)/python tests/kv/replica_torture.py $(or $(CYCLES),700)

soak-store: $(INSTALLED)
	$(BIN)/python tests/kv/soak.py $(or $(MINUTES),20)

test-models: $(INSTALLED)
	EVERWARM_TEST_QWEN=$$($(BIN)/python tests/golden/fetch_models.py qwen2.5-coder) $(BIN)/pytest -s -m 'soak or not soak' tests/model/test_golden_logits.py

# A second build beside .venv's. -S leaves out the hook of the editable install, which would win over PYTHONPATH. Sanitizers abort, so that
# pytest prints the test it was in; they write to a stderr that pytest must not capture. Python leaks by design.
SANITIZED := build/sanitize
sanitize: $(INSTALLED)
	@mkdir -p $(SANITIZED)
	g++ -std=c++17 -O1 -g -Wall -Wextra -fsanitize=thread -pthread -Isrc/native tests/native/threads_test.cpp src/native/threads.cpp -o $(SANITIZED)/threads_test
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZED)/threads_test
	@$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_CXX_COMPILER=g++ \
		-DCMAKE_BUILD_TYPE=Debug -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DEVERWARM_SANITIZE=address,undefined >/dev/null
	@$(BIN)/cmake --build $(SANITIZED)
	@rm -rf $(SANITIZED)/stage && mkdir $(SANITIZED)/stage && cp -R src/everwarm $(SANITIZED)/stage
	@$(BIN)/cmake --install $(SANITIZED) --prefix $(SANITIZED)/stage >/dev/null
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
	export PYTHONPATH=$(CURDIR)/$(SANITIZED)/stage:$$site PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1 && \
	export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1 && \
	export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" && \
	$(BIN)/python -S -c 'import sys; from everwarm.kernels import _native as n; "$(SANITIZED)" in n.__file__ or sys.exit(f"not sanitised: {n.__file__}")' && \
	$(BIN)/python -S -m pytest -p no:cacheprovider --capture=sys tests/kernels/test_native.py tests/kernels/test_tape.py

# Without isolation, so that it shares the build folder and the objects of the editable install.
wheel: $(INSTALLED)
	@rm -f dist/everwarm-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	@ls -l dist/everwarm-*.whl

test-wheel: wheel
	$(BIN)/python tests/wheels/check_wheel.py dist/everwarm-*.whl $(if $(MODEL),--model $(MODEL))

serve: $(INSTALLED)
	$(BIN)/everwarm serve --open

# The page: its source is page/src, what it becomes is committed, so that installing needs no Node.
page/node_modules/.installed: page/package.json page/package-lock.json
	@command -v npm >/dev/null || { echo "building the page needs Node 20 or newer with npm; using it does not" >&2; exit 2; }
	cd page && npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

page: page/node_modules/.installed
	cd page && npx tsc --noEmit && node build.mjs

# Whether the committed files are what the source gives. Where there is no Node this is said and left out.
check-page:
	@if command -v npm >/dev/null && $(MAKE) --no-print-directory page/node_modules/.installed; then cd page && npx tsc --noEmit && node build.mjs --check; \
	else echo "no Node here, or its packages can't be had: whether src/everwarm/server/page/files is what page/src gives is not checked" >&2; fi

check: $(INSTALLED) check-page
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

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

.venv-peers/installed: tests/golden/peers.txt benchmarks/build_llama_cpp.sh
	@test -x $(PEERS)/python || $(PYTHON) -m venv .venv-peers
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/python -m pip install --quiet --disable-pip-version-check --requirement $<
	benchmarks/build_llama_cpp.sh
	@touch $@

# LLAMA_CPP may name the source of llama.cpp, whose converter is used; else it is fetched, without building anything.
LLAMA_CPP ?= .venv-peers/llama.cpp
oracles: .venv-peers/installed
	@test -d $(LLAMA_CPP)/conversion || tests/golden/oracles/fetch_converter.sh $(PEERS)/python $(LLAMA_CPP)
	LLAMA_CPP=$(LLAMA_CPP) $(PEERS)/python tests/golden/oracles/make.py $(CASES)

clients:
	scripts/clients.sh .clients

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
