"""The settings of a run that are needed where it is started from: what its servers and its end depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_ext.host.command_line import check_words
from torchtune_ext.host.config import build
from torchtune_ext.run.agent import own_folder
from torchtune_ext.run.catalog import config_files, config_path, folder, recipe_of
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.training.state import CheckpointConfig


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a config and the words behind it say of a run that samples."""

    recipe: str | None  # that the config is written for, if it says so
    own_file: str  # the file of the config, if it is none of ours; ""
    model_dir: str
    output_dir: str
    engine: EngineConfig
    saving: CheckpointConfig


def run_settings(config: str, words: Sequence[str]) -> RunSettings:
    """Reads a config, a file or one of ours by its name, and the settings behind it, key=value.

    Raises:
        ValueError: it is no config, it has no engine, or a value that is needed here is missing or wrong.
    """
    check_words(["", f"--config={config}", *words])
    path = Path(config_path(config))
    name = next((each for each, file in config_files(folder("configs")).items() if file == path), None)
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(words)))
    if not isinstance(cfg.get("engine"), DictConfig):
        raise ValueError(f"--config {config}: it has no `engine:`, so it samples nothing; start it with tune run")
    return RunSettings(
        recipe_of(name or "", path),
        "" if name else config,
        str(_value(cfg, config, "model_dir")),
        own_folder(str(_value(cfg, config, "output_dir"))),
        build(EngineConfig, _value(cfg, config, "engine"), "engine"),
        build(CheckpointConfig, _value(cfg, config, "checkpoints") if "checkpoints" in cfg else {}, "checkpoints"),
    )


def _value(cfg: DictConfig, config: str, key: str) -> Any:
    """Returns a value without references. Raises ValueError."""
    try:
        value = cfg.get(key)
        value = (
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value
        )
    except OmegaConfBaseException as error:
        raise ValueError(f"--config {config}: {key}: {str(error).splitlines()[0]}") from None
    if value is None:
        raise ValueError(
            f"--config {config}: {key} has no value; set it in the YAML or on the command line as {key}=..."
        )
    return value
