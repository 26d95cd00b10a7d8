"""A real vocabulary, where there is one."""

import gzip
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def qwen_dir(data_dir, tmp_path_factory) -> Path:
    """The vocabulary of Qwen, without a template."""
    path = tmp_path_factory.mktemp("qwen")
    (path / "tokenizer.json").write_bytes(gzip.decompress((data_dir / "tokenizer-qwen/tokenizer.json.gz").read_bytes()))
    return path
