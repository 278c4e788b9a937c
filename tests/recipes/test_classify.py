"""Classification as users run it; whether the small model learns its classes is the long test."""

import io
import json
import math
import re
import time
from pathlib import Path

import datasets
import pytest
from PIL import Image

from dataproto.errors import InvalidConfig, InvalidRow
from helpers.checkpoints import write_checkpoint
from recipes import sft
from recipes.classify import ClassifyDataConfig, main, open_labelled
from recipes.data.labelled_pictures import Templates, labelled_data
from recipes.demo.classes import CLASSES, draw_class
from recipes.watch.metrics_file import read_metrics
from rollout.prompts.images import load_image

COLOURS = {"red_ball": "red", "Blue": "blue", "green": "green"}


def write_folder(path, counts, kind="png"):
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (16 + i, 16), COLOURS.get(name, "white")).save(path / name / f"image_{i:04}.{kind}")
    return path


@pytest.fixture(scope="module")
def caltech(tmp_path_factory):
    """Caltech-101's layout: <root>/<class>/image_0001.jpg."""
    root = tmp_path_factory.mktemp("data") / "ObjectCategories"
    write_folder(root, {"red_ball": 9, "Blue": 16, "green": 2, "BACKGROUND_Google": 3}, kind="jpg")
    (root / "green" / "notes.txt").write_text("no image")
    return root


def test_a_folder_of_class_directories_gives_some_of_each_class_to_be_held_out(caltech):
    data = labelled_data(str(caltech), eval_rows=100, seed=0, templates=Templates(), exclude=["BACKGROUND_Google"])
    assert data.classes == ("Blue", "green", "red ball")
    held_out = [row["prompt"][1]["content"] for row in data.held_out[""]]
    assert sorted(held_out) == ["Blue", "Blue", "green", "red ball"]
    assert len(data.train) == 27 - 4
    shown = {str(row["images"][0]) for row in data.held_out[""]}
    assert not shown & {str(row["images"][0]) for row in data.train}
    assert [
        row["index"]
        for row in labelled_data(str(caltech), 100, 0, Templates(), exclude=["BACKGROUND_Google"]).held_out[""]
    ] == [row["index"] for row in data.held_out[""]]
    assert len(labelled_data(str(caltech), 2, 0, Templates()).held_out[""]) == 2


@pytest.mark.parametrize("name", ["red_ball", "red ball"])
def test_a_class_is_left_out_by_the_name_of_its_folder_or_its_label(caltech, name):
    assert "red ball" not in labelled_data(str(caltech), 4, 0, Templates(), exclude=[name]).classes
    with pytest.raises(InvalidConfig, match=r"no class \['read ball'\]; it has \['BACKGROUND Google', 'Blue', 'green'"):
        labelled_data(str(caltech), 4, 0, Templates(), exclude=[name, "read ball"])


def test_folders_may_hold_pictures_of_any_format_that_is_read(tmp_path):
    write_folder(tmp_path, {"stop": 3}, kind="ppm")
    write_folder(tmp_path, {"yield": 3}, kind="jpe")
    assert len(labelled_data(str(tmp_path), 4, 0, Templates()).train) == 4


def test_pictures_in_a_folder_of_a_class_belong_to_it(tmp_path):
    write_folder(tmp_path, {"stop": 3, "yield": 3})
    write_folder(tmp_path / "stop", {"night": 2, ".thumbnails": 4})
    data = labelled_data(str(tmp_path), 10, 0, Templates())
    read = [row["prompt"][1]["content"] for rows in (data.train, data.held_out[""]) for row in rows]
    assert (data.classes, read.count("stop"), read.count("yield")) == (("stop", "yield"), 5, 3)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    write_folder(tmp_path / "train", {"red_ball": 2, "Blue": 3})
    write_folder(tmp_path / "val", {"Blue": 2})
    data = labelled_data(str(tmp_path), 10, 0, Templates())
    assert (len(data.train), len(data.held_out[""]), data.classes) == (5, 2, ("Blue", "red ball"))
    write_folder(tmp_path / "test", {"green": 1})
    with pytest.raises(InvalidConfig, match=r"not in the training data: .'green'"):
        labelled_data(str(tmp_path), 10, 0, Templates())


def test_a_row_that_is_too_long_is_told_before_a_model_is_loaded_by_the_option_of_its_limit(tmp_path, capsys):
    for command in (main, sft.main):
        assert command(["--max-length", "3", "--output-dir", str(tmp_path / command.__module__)]) == 2
        told = capsys.readouterr()
        assert re.search(r"row 0: the row has \d+ tokens, more than max_length=3 \(--on-bad-row skip", told.err)
        assert "max_prompt_length" not in told.err
        assert "loading the actor" not in told.out


@pytest.mark.parametrize(
    ("broken", "says"), [("missing", "cannot be read: No such file"), ("cut", "is broken"), ("held out", "is broken")]
)
def test_a_later_picture_that_cannot_be_read_is_told_before_a_model_is_loaded(broken, says, tmp_path, capsys):
    """Only the first row was checked, by its header."""
    folder = write_folder(tmp_path / "pets", {"red_ball": 8, "Blue": 8})
    chosen = labelled_data(str(folder), 100, 0, Templates())
    row = (chosen.held_out[""] if broken == "held out" else chosen.train)[-1]
    path = Path(row["images"][0])
    noise = Image.effect_noise((60, 60), 50)
    noise.save(path)
    if broken == "missing":
        rows = [{"image": str(each), "label": each.parent.name} for each in sorted(folder.glob("*/*"))]
        path.unlink()
        folder = lines(tmp_path / "rows.jsonl", *rows)
    else:
        path.write_bytes(path.read_bytes()[:1500])
    given = ["--data-path", str(folder), "--steps", "40", "--batch-size", "4", "--max-length", "500"]
    assert main([*given, "--output-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr()
    assert re.fullmatch(rf"error: row \d+: .*image .*{path.name} {says}.*--on-bad-row skip.*\n", told.err)
    assert "loading the actor" not in told.out


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="at least two classes"):
        labelled_data(str(write_folder(tmp_path / "one", {"red_ball": 2})), 10, 0, Templates())
    write_folder(tmp_path / "deep" / "images", {"red_ball": 2, "cube": 2})
    with pytest.raises(InvalidConfig, match="deep must have a folder of pictures for each class, or such folders"):
        labelled_data(str(tmp_path / "deep"), 10, 0, Templates())


def test_classes_of_one_image_each_leave_none_to_hold_out(tmp_path):
    with pytest.raises(InvalidConfig, match="one picture of each class, so none can be held out: add pictures"):
        labelled_data(str(write_folder(tmp_path / "pets", {"cat": 1, "dog": 1})), 10, 0, Templates())
    labelled_table(2).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(InvalidConfig, match="one picture of each class, so none can be held out: add pictures"):
        labelled_data(str(tmp_path / "rows.parquet"), 10, 0, Templates(), ("img", "fine"))


def labelled_table(count, names=None):
    pictures = []
    for i in range(count):
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(buffer, format="PNG")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    labels = [i % 2 for i in range(count)]
    features = {
        "img": datasets.Image(),
        "fine": datasets.ClassLabel(names=names) if names else datasets.Value("string"),
    }
    rows = {"img": pictures, "fine": labels if names else ["odd" if label else "even" for label in labels]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.mark.parametrize("names", [["even", "odd"], None])
def test_a_data_set_with_image_and_label_columns(names, tmp_path):
    labelled_table(16, names).to_parquet(tmp_path / "train.parquet")
    data = labelled_data(str(tmp_path / "train.parquet"), 10, 0, Templates(), ("img", "fine"))
    assert data.classes == ("even", "odd")
    assert (len(data.train), len(data.held_out[""])) == (14, 2)
    row = data.train[3]
    assert row["prompt"][1]["content"] == ("odd" if row["index"] % 2 else "even")
    assert row["images"][0]["bytes"].startswith(b"\x89PNG")
    labelled_table(4, names).to_parquet(tmp_path / "test.parquet")
    split = labelled_data(str(tmp_path), 10, 0, Templates(), ("img", "fine"), exclude=["odd"])
    assert (len(split.train), len(split.held_out[""]), split.classes) == (8, 2, ("even",))
    with pytest.raises(InvalidConfig, match=r"--image-column image: .* has no such column; it has img, fine"):
        labelled_data(str(tmp_path), 10, 0, Templates())


def test_a_missing_image_is_told_by_its_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"image": None, "label": i % 2}) + "\n" for i in range(4)))
    data = labelled_data(str(tmp_path / "rows.jsonl"), 4, 0, Templates())
    assert data.classes == ("0", "1")
    with pytest.raises(InvalidRow, match="'image' is missing"):
        data.train[0]


def lines(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_paths_of_pictures_start_at_the_folder_of_the_file(tmp_path, monkeypatch):
    """They started at the working directory."""
    write_folder(tmp_path / "data", {"red_ball": 2, "Blue": 2})
    pictures = [*(tmp_path / "data").glob("*/*.png")]
    rows = [{"image": [str(each.relative_to(tmp_path / "data"))], "label": each.parent.name} for each in pictures]
    data = labelled_data(lines(tmp_path / "data" / "rows.jsonl", *rows), 4, 0, Templates())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    colours = {load_image(row["images"][0]).getpixel((0, 0)) for row in (*data.train, *data.held_out[""])}
    assert colours == {(255, 0, 0), (0, 0, 255)}
    data = labelled_data(
        lines(tmp_path / "two.jsonl", *[row | {"image": row["image"] * 2} for row in rows]), 4, 0, Templates()
    )
    with pytest.raises(InvalidRow, match="'image' has 2 images, but a label is of one"):
        data.train[0]


def test_columns_that_rows_of_json_lines_lack_are_named(tmp_path):
    with pytest.raises(InvalidConfig, match="--label-column label: rows has no such column; it has image, class"):
        labelled_data(lines(tmp_path / "rows.jsonl", {"image": "a.png", "class": "cat"}), 4, 0, Templates())


@pytest.mark.parametrize("missing", [{"label": None}, {}, {"label": float("nan")}, {"label": ""}, {"label": " "}])
def test_rows_without_a_label_are_no_class(tmp_path, missing):
    """They were a class of the name "None"."""
    rows = [{"image": "a.png", "label": i % 2} for i in range(6)]
    path = lines(tmp_path / "rows.jsonl", *rows[:3], {"image": "a.png"} | missing, *rows[3:])
    with pytest.raises(InvalidRow, match=r"row 3: line 4 of .*: no label in 'label'"):
        labelled_data(path, 4, 0, Templates())
    data = labelled_data(path, 4, 0, Templates(), on_bad_row="skip")
    assert (data.classes, len(data.train) + len(data.held_out[""])) == (("0", "1"), 6)


@pytest.mark.parametrize("several", [["cat", "dog"], ["cat"], {"name": "cat"}])
def test_a_list_is_no_class(several, tmp_path):
    """Its brackets were learned as a part of the class's name."""
    rows = [{"image": "a.png", "label": i % 2} for i in range(6)]
    path = lines(tmp_path / "rows.jsonl", *rows, {"image": "a.png", "label": several})
    with pytest.raises(InvalidRow, match=r"row 6: line 7 of .*: the label in 'label' must be one class"):
        labelled_data(path, 4, 0, Templates())
    assert labelled_data(path, 4, 0, Templates(), on_bad_row="skip").classes == ("0", "1")


def test_a_line_that_is_not_json_is_told_by_file_and_line(tmp_path):
    """It was told as a row without a label."""
    rows = [{"image": "a.png", "label": i % 2} for i in range(6)]
    path = Path(lines(tmp_path / "rows.jsonl", *rows))
    path.write_text(path.read_text() + '\n{"image"\n')
    with pytest.raises(InvalidRow, match=rf"row 6: line 8 of {path} is not JSON: .*--on-bad-row skip"):
        labelled_data(str(path), 4, 0, Templates())
    data = labelled_data(str(path), 4, 0, Templates(), on_bad_row="skip")
    assert (data.classes, len(data.train) + len(data.held_out[""])) == (("0", "1"), 6)


def test_the_number_for_no_label_is_not_the_last_class(tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": ["a", "b", "c"], "label": [0, 1, -1]},
        features=datasets.Features(
            {"image": datasets.Value("string"), "label": datasets.ClassLabel(names=["even", "odd"])}
        ),
    )
    table.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InvalidRow, match=r"row 2: .*: no label"):
        labelled_data(str(tmp_path / "train.parquet"), 4, 0, Templates())


def test_each_file_numbers_its_classes(tmp_path):
    """Labels of a second file had the names of the first."""
    for file, names in (("train-0", ["even", "odd"]), ("train-1", ["odd", "even"])):
        label = datasets.ClassLabel(names=names)
        features = datasets.Features({"image": datasets.Value("string"), "label": label})
        rows = {"image": ["even.png", "odd.png"] * 2, "label": ["even", "odd"] * 2}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{file}.parquet")
    data = labelled_data(str(tmp_path), 4, 0, Templates(), sets={"all": str(tmp_path / "train-1.parquet")})
    assert data.classes == ("even", "odd")
    for row in [*data.train, *data.held_out["all"]]:
        assert row["images"][0].stem == row["prompt"][1]["content"]


def test_a_test_split_with_further_classes_is_refused(tmp_path):
    """The first evaluation failed with a `KeyError`."""
    for split, labels in (("train", "ab"), ("test", "abc")):
        lines(tmp_path / f"{split}.jsonl", *[{"image": "a.png", "label": label} for label in labels])
    with pytest.raises(InvalidConfig, match=r"not in the training data: \['c'\]"):
        labelled_data(str(tmp_path), 4, 0, Templates())


def test_question_and_answer_are_templates():
    row = Templates("Is it {classes}?", "It is {label}.").row("a.png", "x", ["x", "y"], "s", 0)
    assert [turn["content"] for turn in row["prompt"]] == ["<image>Is it x, y?", "It is x."]
    with pytest.raises(InvalidConfig, match=r"must contain \{label\}"):
        Templates(answer="yes")


@pytest.mark.slow
def test_drawn_pictures_are_of_many_classes_and_known_by_their_number():
    assert len(set(CLASSES)) == len(CLASSES) == 48
    drawn = [draw_class(i) for i in range(300)]
    assert {picture.label for picture in drawn} <= set(CLASSES)
    assert len({picture.label for picture in drawn}) > 40
    assert draw_class(7).image.tobytes() == drawn[7].image.tobytes()
    held_out = {draw_class(i, split="test").image.tobytes() for i in range(300)}
    assert not held_out & {picture.image.tobytes() for picture in drawn}
    assert open_labelled(ClassifyDataConfig(eval_rows=5), seed=0).held_out[""][4]["data_source"] == "synthetic/classes"


@pytest.mark.slow
def test_several_held_out_sets_are_measured_each_by_its_name(caltech, tmp_path, capsys):
    model, folder = write_checkpoint("qwen3_vl", tmp_path / "model"), tmp_path / "more" / "test"
    write_folder(folder, {"red_ball": 2, "Blue": 1})
    listed = [{"image": str(each), "label": "Blue"} for each in sorted((folder / "Blue").iterdir())]
    sets = ["--eval-data-path", f"folder={folder.parent}", lines(tmp_path / "listed.jsonl", *listed)]
    settings = "--steps 1 --batch-size 4 --max-response-length 4 --no-eval-first"
    paths = ["--model-path", model, "--data-path", str(caltech), "--output-dir", str(tmp_path / "run")]
    assert main(["--preset", "any", *paths, *settings.split(), *sets]) == 0
    told = capsys.readouterr().out
    assert "data: 34 rows read, 30 to train on, 4 held out" in told
    assert "held-out acc (mean of 2) held-out loss (mean of 2)" in told
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {"val-core/folder/acc/mean@1", "val-core/listed/acc/mean@1"} <= row.keys()
    assert row["val/loss"] == pytest.approx((row["val/loss/folder"] + row["val/loss/listed"]) / 2)
    assert "Held-out loss" in (tmp_path / "run" / "report.html").read_text()
    write_folder(folder, {"unknown": 1})
    with pytest.raises(InvalidConfig, match=r"held-out set folder has classes .* \['unknown'\]"):
        open_labelled(ClassifyDataConfig(data_path=str(caltech), eval_data_path=f"folder={folder}"), seed=0)


@pytest.mark.slow
def test_a_run_on_a_folder_measures_accuracy_before_and_after(caltech, tmp_path):
    model = write_checkpoint("qwen3_vl", tmp_path / "model")
    settings = "--steps 2 --batch-size 4 --eval-rows 4 --max-response-length 4 --optimizer.lr 1e-3 --eval-every 1"
    run = tmp_path / "run"
    assert (
        main(
            [
                "--preset",
                "any",
                "--model-path",
                model,
                "--data-path",
                str(caltech),
                "--output-dir",
                str(run),
                *settings.split(),
            ]
        )
        == 0
    )
    rows = read_metrics(run / "metrics.jsonl")
    name = "val-core/ObjectCategories/acc/mean@1"
    assert [row["step"] for row in rows if name in row] == [0, 1, 2]
    assert all(0 <= row["val/other_answers"] <= 1 and math.isfinite(row["val/loss"]) for row in rows)
    page = (run / "report.html").read_text()
    assert "red ball" in page


@pytest.mark.long
@pytest.mark.timeout(1800)  # of wall clock: minutes alone, a multiple of that on shared cores
def test_the_small_model_learns_its_drawn_classes(tmp_path):
    begun = time.monotonic()
    assert main(["--output-dir", str(tmp_path / "run")]) == 0
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    print(f"{time.monotonic() - begun:.0f} s")
    assert last["val-core/synthetic/classes/acc/mean@1"] >= 0.9
