"""The card beside a saved model."""

from __future__ import annotations

from depthroute.models.card import card_of_folder, model_card, with_section
from support.models import routed


def test_a_model_without_a_card_gets_one_of_its_configuration(tmp_path):
    routed({"scheme": "mhar", "num_heads": 2}).save_pretrained(tmp_path / "model")
    card = card_of_folder(tmp_path / "model")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# model\n" in card
    assert "`scheme: mhar`" in card
    assert "`num_heads: 2`" in card
    assert 'from_pretrained("path/to/model")' in card


def test_the_card_that_is_there_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n")
    assert card_of_folder(tmp_path) == "# Mine\n"


def test_a_section_is_added_then_replaced():
    card = model_card("name", "What it is.", ["a fact"], "More.")
    first = with_section(card, "Evaluation", "old")
    assert first.endswith("More.\n\n## Evaluation\n\nold\n")
    later = with_section(first + "\n## Licence\n\nfree\n", "Evaluation", "### new\n\n# not a section?\n"[:8])
    assert "old" not in later
    assert later.index("### new") < later.index("## Licence")
    assert later.count("## Evaluation") == 1
