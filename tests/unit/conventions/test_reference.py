"""docs/reference/ is what scripts/reference.py writes, and its descriptions are complete."""

import runpy

import pytest

from torchtune_ext.cli.options import USUAL_COMPONENTS, arguments_of
from torchtune_ext.objective.loss import CHOICES


@pytest.fixture(scope="module")
def script(repo_root):
    return runpy.run_path(str(repo_root / "scripts" / "reference.py"))


@pytest.mark.parametrize("page", ["config.md", "presets.md", "metrics.md", "cli.md", "api.md"])
def test_reference_page_equals_generated_text(page, script, repo_root):
    written = (repo_root / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == script["page_text"](page), "run: python scripts/reference.py"


def test_reference_has_no_other_pages(script, repo_root):
    assert {path.name for path in (repo_root / "docs" / "reference").iterdir()} == set(script["PAGES"])


@pytest.mark.parametrize("section", USUAL_COMPONENTS)
def test_reference_describes_every_component_argument(section):
    for path in USUAL_COMPONENTS[section]:
        arguments = arguments_of(section, path)
        assert arguments and not [each.name for each in arguments if not each.description], path


def test_reference_lists_every_choice_of_loss():
    texts = {each.name: each.description for each in arguments_of("loss", *USUAL_COMPONENTS["loss"])}
    missing = [
        (name, choice)
        for name, known in CHOICES.items()
        for choice in known
        if f'"{choice}"' not in texts[f"loss.{name}"]
    ]
    assert not missing
