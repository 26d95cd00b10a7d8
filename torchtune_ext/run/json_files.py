"""Read JSON files."""

import json
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError, UsageFileError

_LFS_HEADER = b"version https://git-lfs"
_BOM = b"\xef\xbb\xbf"


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        UsageFileError: the file is not readable or is a Git LFS pointer.
        UsageError: the file is not a JSON object in UTF-8.
    """
    require_no_lfs_pointer(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageFileError(f"{file} cannot be read: {error.strerror}") from error
    if data.startswith(_BOM):
        raise UsageError(
            f"{file} begins with a byte order mark, which transformers and vLLM do not support. Fix: save it as UTF-8 "
            "without one"
        )
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        content_text = f"not JSON in UTF-8 ({error})" if data.strip() else "empty"
        raise UsageError(f"{file} is {content_text}. Fix: copy the file again from the model repository") from None
    if not isinstance(content, dict):
        raise UsageError(
            f"{file} holds {json.dumps(content):.40}; expected a JSON object, {{...}}. Fix: copy the file again from "
            "the model repository"
        )
    return content


def read_json_or_empty(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; {} if the file is missing or has other content."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def require_no_lfs_pointer(file: Path) -> None:
    """Raise UsageFileError if a file is a Git LFS pointer instead of the content."""
    try:
        with open(file, "rb") as opened:
            pointer = opened.read(len(_LFS_HEADER)) == _LFS_HEADER
    except OSError:
        return
    if pointer:
        raise UsageFileError(
            f"{file} is a pointer of Git LFS, not the file itself. Fix: run `git lfs pull` in {file.parent}, "
            "or download the file"
        )
