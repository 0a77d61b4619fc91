#!/usr/bin/env bash
# Builds llama.cpp's own llama-bench and llama-server into .venv-peers/bin, for this machine's processor.
#
# The source is vendor/llama.cpp of the llama-cpp-python release installed there, so that the binding and the programs
# are one version. The programs are what we compare speed with: the binding copies logits at each step and would
# flatter us. Takes about 5 minutes on 2 cores; returns at once when both programs are newer than this script and than
# the installed binding.
#
#     benchmarks/build_llama_cpp.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

script=benchmarks/build_llama_cpp.sh
bin=.venv-peers/bin
programs=(llama-bench llama-server)
jobs=${JOBS:-2}

if [[ ! -x $bin/python ]]; then
    echo "$script: there is no $bin/python: run 'make peers'" >&2
    exit 2
fi
# The binding's RECORD is written anew by every installation, so its time tells a changed binding.
read -r version record < <("$bin/python" -c '
from importlib.metadata import distribution
binding = distribution("llama-cpp-python")
print(binding.version, next(file.locate() for file in binding.files if file.name == "RECORD"))')

up_to_date() {
    local program
    for program in "${programs[@]}"; do
        [[ -x $bin/$program && $bin/$program -nt $script && $bin/$program -nt $record ]] || return 1
    done
}
if up_to_date; then
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "llama.cpp of llama-cpp-python $version: fetching the source" >&2
# pip runs the package's metadata step even for a download; with build isolation it brings what that needs.
"$bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$work" "llama-cpp-python==$version"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
source=$(echo "$work"/llama_cpp_python-*/vendor/llama.cpp)

if ! command -v cmake >/dev/null; then
    "$bin/python" -m pip install --quiet --disable-pip-version-check cmake
    PATH=$PWD/$bin:$PATH
fi

echo "llama.cpp of llama-cpp-python $version: building ${programs[*]} with $jobs jobs (about 5 minutes)" >&2
{
    cmake -S "$source" -B "$work/build" \
        -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF \
        -DGGML_NATIVE=ON \
        -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_BUILD_WEBUI=OFF &&
        cmake --build "$work/build" --target "${programs[@]}" --parallel "$jobs"
} >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    echo "$script: the build of llama.cpp failed; its last lines stand above" >&2
    exit 1
}

# Under their final name only once complete: an interrupted copy must not look like a program that is up to date.
for program in "${programs[@]}"; do
    cp "$work/build/bin/$program" "$bin/$program.new"
    mv "$bin/$program.new" "$bin/$program"
done
