from collections import Counter
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.demo_model.cleaning import Section, drop_repeats, html_sections, plain_sections
from tools.demo_model.debian import Package, split_groups
from tools.demo_model.encode import Answer, Encoded, encode_chat, encode_example
from tools.demo_model.evalset import lookups
from tools.demo_model.feed import running_texts
from tools.demo_model.prompt import TURN_END, choice, decision_prompt, user_turn
from tools.demo_model.rows import ALIGN, Packer, collate
from tools.demo_model.tables import Tables, ValenceWord
from tools.demo_model.tasks.chats import draw_chat
from tools.demo_model.tasks.drawing import Draw, Turn, is_sound, make_choice, make_claim
from tools.demo_model.tasks.lookups import draw_find
from tools.demo_model.tasks.mixture import LOOKUPS, NATURAL, draw_example
from tools.demo_model.tasks.packages import draw_debtag_claim, draw_debtags
from tools.demo_model.texts import Document, document_parts
from tools.demo_model.vocabulary import train_tokenizer
from tools.demo_model.wordnet import parse_line, split_gloss

ANIMALS = ["cat", "dog", "cow", "fox", "owl", "emu", "ant", "bee", "eel", "hen", "pig", "yak"]
SENTENCE = "The quick brown fox jumps over the lazy dog near the quiet river bank."


def make_package(name: str, section: str, text: str) -> Package:
    works_with = "audio" if name.endswith(("3", "6", "9")) else "text"
    tags = ["interface::commandline", f"works-with::{works_with}"]
    return Package(name, name, section, f"synopsis of {name}", [text, f"{SENTENCE} {name}."], tags)


def make_tables() -> Tables:
    rng = Random(0)
    sections = ("games", "mail", "database", "sound")
    packages = [
        make_package(f"{section}{number}", section, f"Text number {number} about {section} things.")
        for section in sections
        for number in range(15)
    ]
    lines = [
        f"0000{i:04d} 05 n 02 {word} 0 {word}like 0 001 @ 0000999{i % 5} n 0000 | {word} kind; "
        f'"see the {word}"'
        for i, word in enumerate(ANIMALS * 3)
    ]
    lines += [f"0000999{i} 05 n 01 creature{i} 0 000 | a living thing" for i in range(5)]
    synsets = [parse_line(line, "n", []) for line in lines]
    for number, synset in enumerate(synsets[:-5]):
        synset.category = rng.choice(("noun.animal", "noun.food", "noun.plant"))
        synset.lemmas = [f"{lemma}{'abcdefghij'[number % 10]}" for lemma in synset.lemmas]
    first = Section("A good heading", [SENTENCE, f"{SENTENCE} So it does."])
    second = Section("Another heading", [f"{SENTENCE} It went home."])
    document = Document("python", "train", [first])
    other = Document("sqlite", "train", [second])
    valence = [ValenceWord("good", 2.0, "train"), ValenceWord("awful", -3.0, "train")]
    tables = Tables("train", packages, synsets, valence, [document, other], [["Hi", "Hello."]])
    tables.senses = {synset.id: synset for synset in synsets}
    tables.index()
    return tables


TABLES = make_tables()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = Random(1)
    texts = [SENTENCE] * 5 + [" ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"), "\nYes<\nNo<"] * 50
    for _ in range(30):
        example = draw_example(TABLES, rng, 0.5)
        texts.append(decision_prompt(example.state, example.turns[0].question()))
    return train_tokenizer(texts, 600)


def test_html_loses_code_and_keeps_headed_prose() -> None:
    page = f"<h2>1.2. Title</h2><p>{SENTENCE}<p>{SENTENCE.upper()}</p><pre>x = 1</pre><p>short</p>"
    (section,) = html_sections(page)
    assert section.heading == "Title"
    assert section.paragraphs == [SENTENCE, SENTENCE.upper()]


def test_repeated_paragraphs_are_dropped_across_sections() -> None:
    seen: set[bytes] = set()
    sections = list(plain_sections(f"{SENTENCE}\n\n{SENTENCE} And more."))
    assert [len(s.paragraphs) for s in drop_repeats([*sections, *sections], seen)] == [2]


def test_near_copies_share_a_group_and_boilerplate_does_not_tie() -> None:
    shared = "This paragraph is long enough to tie two packages together."
    packages = [make_package(f"p{i}", "games", f"{SENTENCE} {i}") for i in range(8)]
    for package in packages:
        package.paragraphs.append("Boilerplate that every one of these eight packages has.")
    packages[2].paragraphs.append(shared)
    packages[5].paragraphs.append(shared)
    split_groups(packages)
    groups = [package.group for package in packages]
    assert groups[2] == groups[5]
    assert len(set(groups)) == 7
    assert all("Boilerplate" not in " ".join(package.paragraphs) for package in packages)
    assert all(len({p.split for p in packages if p.group == group}) == 1 for group in groups)


def test_gloss_and_examples_are_parted() -> None:
    gloss, examples = split_gloss('having heat; "hot water"; "a hot day"')
    assert (gloss, examples) == ("having heat", ["hot water", "a hot day"])


def test_document_parts_keep_every_paragraph_in_order() -> None:
    sections = [Section("a", [str(i) for i in range(95)]), Section("b", ["x"])]
    parts = list(document_parts(sections))
    assert [p for part in parts for s in part for p in s.paragraphs] == [
        *map(str, range(95)),
        "x",
    ]


@pytest.mark.parametrize("draw", [draw for draw, _ in (*LOOKUPS, *NATURAL)])
def test_every_family_draws_questions_with_different_options(draw: Draw) -> None:
    rng, found = Random(3), 0
    for _ in range(300):
        example = draw(TABLES, rng)
        if example is not None and is_sound(example):
            found += 1
            for turn in example.turns:
                assert len(set(turn.options)) == len(turn.options) >= 2
                assert 0 <= turn.answer < len(turn.options)
    assert found > 10


def test_answers_are_spread_over_the_labels() -> None:
    rng = Random(4)
    turns = [make_choice("?", "right", ["a", "b", "c"], rng) for _ in range(400)]
    claims = [make_claim("?", True, rng) for _ in range(400)]
    assert all(80 < count < 120 for count in Counter(turn.answer for turn in turns).values())
    assert all(160 < count < 240 for count in Counter(turn.options for turn in claims).values())


def test_a_claim_about_a_debtag_is_as_often_right_as_wrong() -> None:
    rng = Random(6)
    asked, right = Counter[str](), Counter[str]()
    for _ in range(600):
        for draw in (draw_debtag_claim, draw_debtags):
            example = draw(TABLES, rng)
            for turn in example.turns if example else ():
                if turn.kind == "yes_no":
                    asked[turn.text] += 1
                    right[turn.text] += turn.options[turn.answer] == "Yes"
    assert set(asked) == {
        "Does this software work with text?",
        "Does this software work with audio?",
    }
    assert all(0.43 < right[text] / count < 0.57 for text, count in asked.items())


def test_rotation_keeps_the_right_option() -> None:
    turn = Turn("choice", "?", ("a", "b", "c", "d"), 2)
    for shift in range(4):
        rotated = turn.rotated(shift)
        assert rotated.options[rotated.answer] == "c"


def test_answers_and_options_are_found_among_the_tokens(tokenizer: Tokenizer) -> None:
    rng = Random(5)
    for _ in range(60):
        example = draw_example(TABLES, rng, rng.random())
        encoded = encode_example(tokenizer, example)
        assert len(encoded.answers) == len(example.turns)
        for turn, answer in zip(example.turns, encoded.answers, strict=True):
            assert tokenizer.id_to_token(encoded.ids[answer.at]) == turn.labels()[turn.answer]
            assert encoded.weights[answer.at] == 0
            for option, end in zip(turn.options, answer.option_ends, strict=False):
                text = tokenizer.decode(encoded.ids[: end + 1], skip_special_tokens=False)
                assert text.rstrip("\n").endswith(option)


def test_only_what_the_assistant_says_counts_fully(tokenizer: Tokenizer) -> None:
    turns = [("user", "the fox"), ("assistant", "the dog")]
    encoded = encode_chat(tokenizer, turns)
    full = [i for i, weight in zip(encoded.ids, encoded.weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(full, skip_special_tokens=False) == f"the dog{TURN_END}"


def test_chats_alternate_and_never_end_with_the_user() -> None:
    rng = Random(6)
    for _ in range(100):
        roles = [role for role, _ in draw_chat(TABLES, rng) if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) != []


def lengths(*counts: int) -> list[Encoded]:
    answer = Answer(1, [5, 6], 0, [0], False, "x")
    return [Encoded(list(range(3, 3 + n)), [1.0] * n, [answer]) for n in counts]


def test_documents_start_aligned_and_answers_move_along() -> None:
    packer = Packer(iter(lengths(17, 60, 40)), 128, 64)
    row = packer.row()
    starts = np.flatnonzero(row.positions == 0)
    assert all(start % ALIGN == 0 for start in starts)
    assert sorted(answer.at for answer in row.answers)[0] == 1
    for answer in row.answers:
        assert row.ids[answer.at] == 4
        assert row.weights[answer.at - 1] == 0, "the first token of a document has no predecessor"


def test_no_document_crosses_a_window() -> None:
    packer = Packer(iter(lengths(*[50] * 8)), 128, 64)
    row = packer.row()
    assert row.positions[64] == 0
    assert row.positions.max() < 64


def test_running_text_is_cut_and_continued() -> None:
    packer = Packer(iter([Encoded(list(range(1, 101)), [1.0] * 100)]), 64, 64)
    first, second = packer.row(), packer.row()
    assert first.ids.tolist() == list(range(1, 65))
    assert second.ids[:36].tolist() == list(range(65, 101))
    assert packer.last_row() is None


def test_batches_pad_answers() -> None:
    rows = [Packer(iter(lengths(20)), 64, 64).row()]
    batch = collate(rows, 3)
    assert batch.valid.tolist() == [1, 0, 0]
    assert batch.counts[0] == 2
    assert batch.ends[0, 0] == 0


def test_workers_share_out_the_running_text() -> None:
    count = len(TABLES.documents) + len(TABLES.packages) // 4 + 2
    parts = [running_texts(TABLES, share, 2, Random(0)) for share in range(2)]
    first_pass = [next(parts[number % 2]) for number in range(count)]
    assert len(set(first_pass)) == count


def test_lookups_have_the_asked_number_of_options() -> None:
    assert {len(e.turns[0].options) for e in lookups(TABLES, 26, Random(0))} == {26}
    example = draw_find(TABLES, Random(1), 4)
    turn = example.turns[0]
    assert turn.options[turn.answer] in example.state.split()


def test_user_turn_has_the_published_layout() -> None:
    text = user_turn("It rains.", choice("What?", ["x", "y"]))
    assert text == (
        "State:\nIt rains.\n\nQuestion: What?\nOptions:\nA. x\nB. y\nAnswer with the letter only."
    )
