#!/usr/bin/env bash
# Install the agent programs that docs/clients.md tells of, each into a folder and with a home of its own.
#
#   scripts/clients.sh FOLDER [NAME ...]     NAME: npm or one of the Python packages; all of them by default
#
# Nothing that is already on the machine is touched. Programs are run with HOME=FOLDER/home/NAME and made-up keys.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
npm_packages=(@openai/codex @anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code)
python_packages=(aider-chat pydantic-ai-slim[openai,anthropic] openai-agents langchain-openai instructor smolagents[openai] litellm llm)
chosen=("$@")

wanted() {
  [ ${#chosen[@]} -eq 0 ] || printf '%s\n' "${chosen[@]}" | grep -qx "$1"
}

if wanted npm; then
  npm install --prefix "$folder/npm" --no-audit --no-fund --loglevel error "${npm_packages[@]}"
fi
for package in "${python_packages[@]}"; do
  name=${package%%[*}
  if wanted "$name"; then
    test -x "$folder/$name/bin/python" || python3 -m venv "$folder/$name"
    also=()
    if [ "$name" = litellm ]; then also=(mcp); fi  # it imports it as soon as there are tools
    "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$package" "${also[@]}"
    "$folder/$name/bin/python" -m pip freeze > "$folder/$name.versions"
  fi
done
for name in codex claude opencode qwen "${python_packages[@]%%[*}"; do
  mkdir -p "$folder/home/$name"
done
echo "installed into $folder"
