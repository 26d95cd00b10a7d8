"""OmegaConf nodes of a YAML file as recipes get them."""

from omegaconf import DictConfig, OmegaConf

from torchtune_ext.settings.components import Component


def component(node: DictConfig) -> Component:
    """Return the component of a node, as `load_config` passes it to a recipe."""
    return Component(OmegaConf.to_container(node, resolve=True), node._get_full_key(None))
