from __future__ import annotations

import pytest

import d5p4
from d5p4.view import drafts
from d5p4.view.pieces import piece, spell
from tests.checkpoints import write_llada
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


@pytest.mark.parametrize("options", [{"distinct": True, "eos": "free"}, {"method": "independent"}])
def test_drafts_are_the_beams_so_far(options):
    model, steps = FakeModel(), []

    def listen(shot):
        steps.append([drafts(model, shot, place) for place in range(len(shot.prompts))])
        for place, rows in enumerate(steps[-1]):
            assert len(rows) == 3
            for beam, draft in enumerate(rows):
                row, chances = (x[place, beam * shot.choice.children] for x in (shot.next_tokens, shot.next_logprobs))
                length = len(draft["tokens"])  # a draft ends before the first end-of-text token
                assert row[length : length + 1].tolist() in ([], *([token] for token in model.eos_ids))
                assert not set(row[:length].tolist()) & set(model.eos_ids)
                for token, chance, text, shown in zip(row, chances, draft["tokens"], draft["logprobs"], strict=False):
                    masked = token == model.mask_id
                    assert (text is None, shown is None) == (masked, masked)
                    assert masked or (text == chr(97 + token) and shown == pytest.approx(float(chance), abs=1e-4))
                assert draft["text"] == "".join("░" if text is None else text for text in draft["tokens"])

    asked = {"method": "d5p4", "k": 3, "w": 2, "gen_length": 6, "seed": 3} | options
    d5p4.generate(model, ["abc", "ba"], callback=listen, **asked)
    assert steps[0][0][0]["text"].count("░") == 5  # one revealed, five to come
    assert "░" not in "".join(draft["text"] for place in steps[-1] for draft in place)


def test_characters_that_take_several_tokens(tmp_path):
    """The byte-level vocabularies of LLaDA and Dream split rare characters."""
    model = d5p4.load(str(write_llada(tmp_path / "llada")))
    text = "a b"
    assert "".join(spell(piece(model, token) for token in model.tokenizer.encode(text))) == text
    assert all(piece(model, token) == "" for token in model.eos_ids)
    assert spell(["a", [0xE2, 0x82], [0xAC], "b"]) == ["a", "", "€", "b"]
    assert spell([[0xE2], None, [0x61]]) == ["\ufffd", None, "a"]
    assert spell(["x", [0xE2, 0x82]]) == ["x", "\ufffd"]
