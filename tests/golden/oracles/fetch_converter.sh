#!/usr/bin/env bash
# Puts the source of llama.cpp, which holds its converter, into a folder: it is in the source package of llama-cpp-python.
#
#     tests/golden/oracles/fetch_converter.sh .venv-peers/bin/python .venv-peers/llama.cpp
set -euo pipefail
python=$1 target=$2

version=$("$python" -c 'from importlib.metadata import version; print(version("llama-cpp-python"))')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$work" "llama-cpp-python==$version"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
mv "$work"/llama_cpp_python-*/vendor/llama.cpp "$target"
