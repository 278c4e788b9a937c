"""Everything that varies in the layout of ``hiyouga/geometry3k``: from a parquet file to prompts, rewards and the report."""

import io

import numpy as np
import pytest
from datasets import Dataset
from PIL import ExifTags, Image

from dataproto.errors import InvalidRow
from helpers.geo3k_files import png, write_geometry3k
from helpers.tiny_prompts import tiny_builder
from recipes.data.loader import PromptLoader, drop_overlong
from recipes.data.problem_rows import load_rows, read_row
from recipes.rewards import RewardRow, geo3k_reward
from recipes.rewards.geometry3k import without_unit
from recipes.watch.rollout_files import load_rollouts, rollout_samples, save_rollouts
from rollout.prompts.images import image_size

DARK, LIGHT = (0, 0, 0), (255, 255, 255)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def diagram(mode):
    """A black square on white, or on transparent ground, 40 x 30: the same diagram in every mode."""
    inside = np.zeros((30, 40), dtype=bool)
    inside[8:22, 10:30] = True
    grey = np.where(inside, 0, 255).astype(np.uint8)
    if mode == "16-bit":
        return Image.fromarray(np.where(inside, 0, 65535).astype(np.uint16))
    if mode in ("RGBA", "LA"):  # black everywhere: only the transparency shows the diagram
        channels = 4 if mode == "RGBA" else 2
        pixels = np.zeros((30, 40, channels), dtype=np.uint8)
        pixels[..., -1] = np.where(inside, 255, 0)
        return Image.fromarray(pixels, mode)
    if mode == "P, transparent":
        image = Image.fromarray(np.where(inside, 1, 0).astype(np.uint8), "P")
        image.putpalette([0, 0, 0, 0, 0, 0])  # both colours black, the ground transparent
        image.info["transparency"] = 0
        return image
    return Image.fromarray(grey).convert(mode)


def encoded(image):
    """PNG, or TIFF for what PNG cannot hold."""
    buffer = io.BytesIO()
    image.save(buffer, "TIFF" if image.mode == "CMYK" else "PNG")
    return buffer.getvalue()


def row_of(images, problem="<image>Find x.", answer="65"):
    return {"images": images, "problem": problem, "answer": answer}


def in_parquet(tmp_path, *rows):
    return load_rows(write_geometry3k(tmp_path / "geometry3k" / "train.parquet", list(rows)), instruction="")


MODES = ("RGB", "RGBA", "L", "P", "P, transparent", "LA", "1", "CMYK", "16-bit")


def test_every_mode_of_a_picture_gives_the_same_prompt(tmp_path):
    """From bytes in parquet and from PIL objects: black on white, and the report shows it so."""
    pictures = [diagram(mode) for mode in MODES]
    rows = in_parquet(tmp_path, *(row_of([{"bytes": encoded(image), "path": None}]) for image in pictures))
    objects = [read_row(row_of([image]), number, instruction="") for number, image in enumerate(pictures)]
    builder = tiny_builder()
    for source in (list(rows), objects):
        batch = builder(source)
        for mode, (image,) in zip(MODES, (media["image"] for media in batch["multi_modal_data"]), strict=True):
            assert (image.mode, image.size) == ("RGB", (40, 30)), mode
            assert (image.getpixel((0, 0)), image.getpixel((20, 15))) == (LIGHT, DARK), mode
        assert len({media["pixel_values"].numpy().tobytes() for media in batch["multi_modal_inputs"]}) == 1
    batch["response_text"] = np.array([r"\boxed{65}"] * len(MODES), dtype=object)
    batch["score"] = np.ones(len(MODES))
    save_rollouts(tmp_path, 0, rollout_samples(batch, limit=20))
    shown = load_rollouts(tmp_path, 0)
    assert len(shown) == len(MODES)
    assert all(sample.images[0].getpixel((0, 0)) == LIGHT for sample in shown)
    assert all(sample.images[0].getpixel((20, 15)) == DARK for sample in shown)


SIZES = [(100, 100), (101, 333), (640, 480), (1999, 1001), (2000, 2000), (100, 2000), (2000, 100), (2000, 10)]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "internvl", "smolvlm"])
def test_every_size_and_shape_has_the_length_that_its_header_says(model_type, tmp_path):
    rows = in_parquet(tmp_path, *(row_of([{"bytes": png(Image.new("L", size, 200)), "path": None}]) for size in SIZES))
    builder = tiny_builder(model_type, max_prompt_length=4096)
    batch = builder(list(rows))
    lengths = batch["attention_mask"].sum(1).tolist()
    assert lengths == [builder.prompt_length(row) for row in rows]
    assert max(lengths) < 400  # the processor's limit of pixels holds for the largest
    for media, (width, height) in zip(batch["multi_modal_data"], SIZES, strict=True):
        assert media["image"][0].size == (width, height)
        assert image_size(media["image"][0]) == (height, width)


def test_a_picture_too_narrow_for_the_processor_is_named_and_can_be_skipped(tmp_path):
    narrow = {"bytes": png(Image.new("L", (2000, 9))), "path": None}  # 222 times as wide as high
    good = {"bytes": png(diagram("L")), "path": None}
    rows = in_parquet(tmp_path, row_of([good]), row_of([narrow]), row_of([good], answer="9"))
    builder = tiny_builder()
    with pytest.raises(InvalidRow, match=r"row 1: .*image of height 9 and width 2000: .*at most 200 times"):
        builder(list(rows))
    kept, dropped = drop_overlong(rows, builder)
    assert (len(kept), len(dropped)) == (3, 0)  # its length is not known, so it is left to the loader
    loader = PromptLoader(kept, builder, batch_size=2, on_bad_row="skip", shuffle=False)
    assert [each["ground_truth"] for each in next(loader)["reward_model"]] == ["65", "9"]
    assert list(loader.skipped) == [1]


@pytest.mark.parametrize(
    ("images", "problem", "placeholders"),
    [
        (1, "<image>Find x.", 1),
        (2, "<image><image>Find x.", 2),
        (3, "<image>In the first, <image>in the second and <image>in the third: find x.", 3),
        (0, "A triangle has angles of 90 and 25 degrees. Find the third.", 0),
        (1, "Find x.\nChoices:\n(A) 30 (B) 45\n(C) 60 (D) 65\n<image>", 1),
    ],
)
def test_any_number_of_pictures_anywhere_in_the_text(images, problem, placeholders, tmp_path):
    pictures = [{"bytes": png(Image.new("L", (16, 16 + 8 * number))), "path": None} for number in range(images)]
    batch = tiny_builder(max_prompt_length=1024)(list(in_parquet(tmp_path, row_of(pictures, problem))))
    assert len(batch["multi_modal_data"][0].get("image", [])) == placeholders
    content = batch["raw_prompt"][0][0]["content"]
    kinds = [part["type"] for part in content] if isinstance(content, list) else ["text"]
    assert kinds.count("image") == placeholders
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    assert text == problem.replace("<image>", "")


def test_a_picture_is_read_from_its_bytes_or_beside_the_file(tmp_path):
    """Parquet structs hold bytes, a path, or both; a camera's JPEG may be turned, which its header says."""
    turned, buffer = Image.new("RGB", (40, 30), "white"), io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a quarter turn
    turned.save(buffer, "JPEG", exif=exif)
    (tmp_path / "geometry3k" / "images").mkdir(parents=True)
    diagram("L").save(tmp_path / "geometry3k" / "images" / "1.png")
    sources = [
        {"bytes": None, "path": "images/1.png"},
        {"bytes": png(diagram("L")), "path": "elsewhere/1.png"},
        {"bytes": buffer.getvalue(), "path": None},
    ]
    columns = {"images": [[source] for source in sources], "problem": ["<image>Find x."] * 3, "answer": ["65"] * 3}
    Dataset.from_dict(columns).to_parquet(str(tmp_path / "geometry3k" / "train.parquet"))
    rows, builder = list(load_rows(tmp_path / "geometry3k" / "train.parquet", instruction="")), tiny_builder()
    batch = builder(rows)
    first, second, third = (media["image"][0] for media in batch["multi_modal_data"])
    assert first.tobytes() == second.tobytes() == diagram("RGB").tobytes()
    assert third.size == (30, 40)
    assert batch["attention_mask"].sum(1).tolist() == [builder.prompt_length(row) for row in rows]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "smolvlm", "internvl"])
def test_the_latex_of_a_problem_reaches_the_prompt_as_it_is(model_type, tmp_path):
    problem = (
        r"In $\odot X$, $m \angle A < 90 ^ { \circ }$, $\overline { AB } \parallel \overline { CD }$ & $x > 5 \%$:"
        " {{ x }} {% if %}"
        "\n\tFind  $\\frac { 1 } { 2 } y$ — in °."
    )
    picture = {"bytes": png(diagram("L")), "path": None}
    builder = tiny_builder(model_type, max_prompt_length=1024)
    batch = builder(list(in_parquet(tmp_path, row_of([picture], f"<image>{problem}"))))
    assert problem in builder.tokenizer.decode(batch["input_ids"][0])


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["65", 65, 65.0, np.int64(65), " 65 ", "65.0", "65 \n"])
def test_an_answer_may_be_a_number(answer):
    row = read_row(row_of([], "Find x.", answer), 0, instruction="")
    truth = row["reward_model"]["ground_truth"]
    assert [found["acc"] for found in geo3k_reward([RewardRow(rf"\boxed{{{n}}}", truth) for n in (65, 66)])] == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("images", "problem", "says"),
    [
        (1, "<image><image>Find x.", "2 image markers in the prompt, but 1 images"),
        (2, "<image>Find x.", "1 image markers in the prompt, but 2 images"),
        (0, "<image>Find x.", "1 image markers in the prompt, but 0 images"),
    ],
)
def test_tags_that_do_not_match_the_pictures_name_their_row(images, problem, says, tmp_path):
    picture = {"bytes": png(diagram("L")), "path": None}
    rows = in_parquet(tmp_path, row_of([picture]), row_of([picture] * images, problem))
    with pytest.raises(InvalidRow, match=f"row 1: .*{says}"):
        tiny_builder()(list(rows))


RIGHT = {
    "choices": [("C", "C"), ("(C)", "C"), (r"\text{C}", "C"), (r"\mathrm{C}", "C"), ("C", "(C)")],
    "degrees": [
        *((degrees, "65") for degrees in ("65", "65.0", r"65^\circ", r"65^{\circ}", "65°", "65 degrees", r"65\degree")),
        ("65", r"65^{\circ}"),
        (r"65^\circ", "65°"),
        ("65 degrees", "65°"),
        (r"x = 65^\circ", "65"),
    ],
    "roots": [
        *((root, r"4 \sqrt { 3 }") for root in (r"4\sqrt{3}", r"4\sqrt3", r"\sqrt{48}", r"\frac{12}{\sqrt{3}}")),
        (r"4\sqrt{3}\text{ cm}", r"4 \sqrt { 3 }"),
        *(
            (root, r"2 \sqrt { 221 }")
            for root in (r"2 \sqrt { 221 }", r"2\sqrt{221}", r"\sqrt{884}", r"2\cdot\sqrt{221}")
        ),
        *(
            (root, r"\frac { 8 \sqrt { 3 } } { 3 }")
            for root in (r"\frac{8\sqrt{3}}{3}", r"\dfrac{8}{\sqrt3}", r"8\sqrt{3}/3")
        ),
        *((root, r"18 + 6 \sqrt { 3 }") for root in (r"18+6\sqrt{3}", r"6\sqrt{3} + 18", r"6(3+\sqrt{3})")),
    ],
    "decimals": [
        *(
            (number, "16.4")
            for number in ("16.4", "16.40", r"16.4^\circ", "$16.4$", "x = 16.4", "82/5", r"\frac{82}{5}")
        ),
        *((number, "1256") for number in ("1256", "1,256", r"1{,}256", "1256.0")),
        (".5", "0.5"),
        ("0.5", ".5"),
        ("-3", "-3"),
    ],
    "text": [
        *((text, "65") for text in (r"\text{65}", r"\mathbf{65}", r"\left(65\right)", "{65}", "65.", r"65\text{°}")),
        (r"\tan ^ { - 1 } 2", r"\tan ^ { - 1 } 2"),
        ("2:3", "2:3"),
    ],
    "units": [
        *(
            (f"12{unit}", "12")
            for unit in (" cm", " mm", " m", r" \text{ cm}", r"\,\text{m}", r" \mathrm{~m}", " units")
        ),
        *(
            (f"12{unit}", "12")
            for unit in (r"\,\text{cm}^2", " ft^2", " square feet", r" \text{ square units}", " in.")
        ),
        ("12", "12 cm"),
        ("12 cm", "12 cm"),
        (r"12\pi \text{ in}^2", r"12 \pi"),
        (r"18\sqrt{3}\text{ square units}", r"18 \sqrt { 3 }"),
        ("16.4 cm", "16.4"),
    ],
    "fractions": [
        *((part, r"\frac { 26 } { 3 }") for part in (r"\frac{26}{3}", r"\dfrac{26}{3}", "26/3")),
        ("0.75", r"\frac { 3 } { 4 }"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac{3}{4}\text{ cm}", "0.75"),
        *((part, "5.5") for part in (r"5\frac{1}{2}", r"\frac{11}{2}", r"\tfrac{11}{2}")),
        ("5.5", r"5 \frac { 1 } { 2 }"),
        ("1/2", r"\frac 1 2"),
    ],
}
# Some are right for a reader, but wrong for mathruler, and so for verl: a root, a minus or an approximation as a sign, a thin
# space, fractions that are not reduced, names other than of one letter.
WRONG = {
    "choices": [("B", "C"), ("CD", "C"), ("", "C")],
    "degrees": [(r"66^\circ", "65"), ("°", "65"), (r"\circ", "65")],
    "roots": [
        *((root, r"4 \sqrt { 3 }") for root in (r"4\sqrt{2}", "43", "6.93", "4√3")),
        *((root, r"2 \sqrt { 221 }") for root in ("29.73", r"\sqrt{442}", r"2\sqrt{22}1", "2221")),
    ],
    "decimals": [
        *((number, "16.4") for number in ("16", "16.39", "164", "16,4", "1.64", r"\approx 16.4")),
        ("12.57", r"4 \pi"),
        ("−3", "-3"),
        ("3", "-3"),
        (r"1\,256", "1256"),
    ],
    "text": [
        *((text, "65") for text in (r"\text{sixty-five}", "65 or 66", "(65, 66)", "AB = 65", r"\angle A = 65^\circ")),
        ("3:2", "2:3"),
    ],
    "units": [("13 cm", "12"), ("12 m", "12 cm"), ("12x", "12"), ("cm", "12"), (r"\text{cm}", "12")],
    "fractions": [
        (r"\frac{3}{26}", r"\frac { 26 } { 3 }"),
        ("8.67", r"\frac { 26 } { 3 }"),
        (r"\frac{52}{6}", r"\frac { 26 } { 3 }"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RIGHT)
def test_answers_are_graded_by_their_value(kind):
    for pairs, accuracy in ((RIGHT[kind], 1.0), (WRONG[kind], 0.0)):
        rows = [RewardRow(rf"<think>so</think> \boxed{{{answer}}}", truth) for answer, truth in pairs]
        for pair, found in zip(pairs, geo3k_reward(rows), strict=True):
            assert (found["acc"], found["format"]) == (accuracy, 1.0), pair


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        (r"The answer is \boxed{65}.", 1.0),
        (r"\boxed{65^\circ}", 1.0),
        (r"first \boxed{30}, then \boxed{65}", 1.0),
        (r"first \boxed{65}, then \boxed{30}", 0.0),
        (r"\boxed{\boxed{65}}", 1.0),
        (r"$$\boxed{65 \text{ cm}}$$", 1.0),
        (r"\boxed{65", 0.0),
        (r"\fbox{65}", 0.0),
        ("65", 0.0),
    ],
)
def test_the_last_box_counts(response, accuracy):
    assert geo3k_reward([RewardRow(response, "65")])[0]["acc"] == accuracy


def test_a_long_answer_takes_no_time():
    for text in (" " * 100_000 + "x", r"\, " * 30_000, r"\text{" * 20_000, "^{" * 50_000 + r"\circ"):
        assert without_unit(text, "6")[1] == "6"
