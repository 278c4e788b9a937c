import copy
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from torch.utils.data import DataLoader
from transformers import ProcessorMixin

from dataproto import DataProto
from dataproto.errors import InvalidConfig, InvalidMedia, InvalidPrompt, InvalidRow
from helpers.tiny_models import MROPE_TYPES, tiny_model
from helpers.tiny_prompts import TEMPLATE, tiny_builder, tiny_image_processor, tiny_prompt_config, tiny_tokenizer
from recipes.data.loader import PromptLoader
from rollout.pretrained import load_image_processor
from rollout.prompts import PromptBuilder


def picture(width=24, height=16, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Counting:
    """The image processor, counting the images that go through it."""

    def __init__(self):
        self.inner = tiny_image_processor()
        self.images = 0

    def __call__(self, images, **options):
        self.images += len(images)
        return self.inner(images=images, **options)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def counting_builder(max_prompt_length=512, **options):
    return PromptBuilder(tiny_tokenizer(), Counting(), tiny_prompt_config(), max_prompt_length, **options)


MIXED = [
    {"prompt": "<image>Find x.", "images": [picture()]},
    {"prompt": "No picture at all, only words."},
    {"prompt": "<image> and <image>", "images": [picture(40, 40, 1), picture(16, 8, 2)]},
]


@pytest.mark.parametrize("model_type", MROPE_TYPES)
def test_columns_equal_hugging_faces_way(model_type):
    """Placeholders repeated in the text before tokenizing, as HF's processors do; positions by `get_rope_index`."""
    builder, tokenizer, processor = tiny_builder(model_type), tiny_tokenizer(), tiny_image_processor()
    batch = builder(MIXED)
    config = tiny_prompt_config(model_type)
    for row, source in enumerate(MIXED):
        images = source.get("images", [])
        pieces = source["prompt"].split("<image>")
        made = processor(images=images, return_tensors="pt") if images else {}
        text = pieces[0]
        for number, piece in enumerate(pieces[1:]):
            count = int(made["image_grid_thw"][number].prod()) // 4
            text += "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" + piece
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text)["input_ids"]
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        assert kept.tolist() == sorted(kept.tolist())  # left-padded
        types = [1 if i == config.image_token_id else 0 for i in ids]
        assert batch["mm_token_type_ids"][row, kept].tolist() == types
        assert batch["raw_prompt_ids"][row].count(config.image_token_id) == len(images)
        inputs = batch["multi_modal_inputs"][row]
        assert set(inputs) == set(made)
        for name in made:
            assert torch.equal(inputs[name], made[name])
    types = batch["mm_token_type_ids"]
    grids = torch.cat([row["image_grid_thw"] for row in batch["multi_modal_inputs"] if row])
    expected, _ = tiny_model(model_type).model.get_rope_index(
        input_ids=batch["input_ids"],
        mm_token_type_ids=types.int(),
        image_grid_thw=grids,
        attention_mask=batch["attention_mask"],
    )
    kept = batch["attention_mask"].bool()
    assert torch.equal(batch["position_ids"].transpose(0, 1)[1:][:, kept], expected[:, kept])
    assert batch["position_ids"].shape == (3, 4, batch["input_ids"].shape[1])


def test_dtypes_and_columns():
    batch = tiny_builder()(MIXED)
    assert {name: column.dtype for name, column in batch.batch.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "position_ids": torch.int64,
        "mm_token_type_ids": torch.int8,
    }
    assert batch["multi_modal_data"][1] == {}
    assert batch["multi_modal_inputs"][1] == {}
    assert batch["multi_modal_inputs"][0]["pixel_values"].dtype == torch.float32
    assert len(batch["multi_modal_data"][2]["image"]) == 2
    assert batch["raw_prompt"][0][0]["content"][0]["image"] is batch["multi_modal_data"][0]["image"][0]
    assert all(column.dtype == object for column in batch.non_tensor_batch.values())


def test_a_row_without_uid_gets_one_for_each_time_it_is_shown():
    rows = [{"prompt": "a"}, {"prompt": "a", "index": 3}, {"prompt": "a"}, {"prompt": "b", "uid": "mine"}]
    builder = tiny_builder()
    first, second = builder(rows)["uid"].tolist(), builder(rows)["uid"].tolist()
    assert first[3] == second[3] == "mine"
    assert len({*first, *second}) == 7
    assert [tiny_builder()(rows)["uid"].tolist() for _ in range(2)] == [first] * 2  # as in another run
    resumed = tiny_builder()
    resumed.occurrences = 3
    assert resumed(rows)["uid"].tolist() == second


def test_two_data_sets_share_no_default_uid():
    sets = [
        [{"prompt": "<image>Which?", "images": [picture(seed=seed)], "data_source": source, "index": 0}]
        for seed, source in ((0, "x"), (1, "x"), (0, "y"))
    ]
    both = tiny_builder()
    joined = DataProto.concat([both(rows) for rows in sets])
    assert len(set(joined["uid"])) == 3
    assert len({tiny_builder()(rows)["uid"][0] for rows in sets}) == 3  # each by a builder of its own


@pytest.mark.slow
def test_workers_of_a_data_loader_share_no_default_uid():
    rows = [{"prompt": "a"}] * 4

    def epoch(builder):
        torch.manual_seed(0 if builder is None else 1)
        made = DataLoader(rows, batch_size=1, collate_fn=builder or tiny_builder(), num_workers=2)
        return [uid for batch in made for uid in batch["uid"]]

    one, other = epoch(None), epoch(tiny_builder())
    assert len({*one, *other}) == 8
    assert epoch(None) == one


def test_the_rows_other_values_become_columns():
    rows = [
        {
            "prompt": "a",
            "uid": "0-7",
            "index": 7,
            "data_source": "x",
            "reward_model": {"ground_truth": "1"},
            "level": 3,
        },
        {"prompt": "b", "uid": "0-9", "index": 9, "data_source": "y", "reward_model": {"ground_truth": "2"}},
    ]
    batch = tiny_builder()(rows)
    assert batch["uid"].tolist() == ["0-7", "0-9"]
    assert batch["index"].tolist() == [7, 9]
    assert batch["reward_model"].tolist() == [{"ground_truth": "1"}, {"ground_truth": "2"}]
    assert batch["level"].tolist() == [3, None]
    assert batch["extra_info"].tolist() == [{}, {}]


def test_each_distinct_image_is_processed_once_and_shared():
    builder, image = counting_builder(), picture()
    rows = [
        {"prompt": "<image>one", "images": [image]},
        {"prompt": "<image>same object", "images": [image]},
        {"prompt": "<image>same content", "images": [encoded(image)]},
        {"prompt": "<image>other", "images": [picture(seed=5)]},
        {"prompt": "<image><image>both", "images": [image, picture(seed=5)]},
    ]
    batch = builder(rows)
    assert builder.image_processor.images == 2
    inputs, data = batch["multi_modal_inputs"], batch["multi_modal_data"]
    for row in (1, 2):
        assert inputs[row]["pixel_values"] is inputs[0]["pixel_values"]
        assert inputs[row]["image_grid_thw"] is inputs[0]["image_grid_thw"]
        assert data[row]["image"][0] is data[0]["image"][0]
    assert data[4]["image"][1] is data[3]["image"][0]
    assert inputs[3]["pixel_values"] is not inputs[0]["pixel_values"]
    assert torch.equal(inputs[4]["pixel_values"], torch.cat([inputs[0]["pixel_values"], inputs[3]["pixel_values"]]))


# Images that were processed before


def shown(builder, image):
    """The image's inputs in a batch of its own."""
    return builder([{"prompt": "<image>x", "images": [image]}])["multi_modal_inputs"][0]["pixel_values"]


def test_a_second_epoch_processes_no_image_again():
    builder = counting_builder()
    rows = [{"prompt": "<image>x", "images": [encoded(picture(seed=seed))]} for seed in range(6)]
    loader = PromptLoader(rows, builder, batch_size=3)
    first = [next(loader) for _ in range(2)]
    assert builder.image_processor.images == 6
    second = [next(loader) for _ in range(2)]
    assert builder.image_processor.images == 6
    pixels = [
        {
            index: row["pixel_values"]
            for batch in epoch
            for index, row in zip(batch["index"], batch["multi_modal_inputs"])
        }
        for epoch in (first, second)
    ]
    assert all(torch.equal(pixels[0][index], pixels[1][index]) for index in range(6))


def test_the_cache_never_serves_a_wrong_image():
    builder, image = counting_builder(), picture()
    expected = shown(builder, image).clone()
    for _ in range(2):
        shown(builder, image).numpy()[:] = 7  # what a batch's owner writes is his
    assert torch.equal(shown(builder, image), expected)
    batch = builder([{"prompt": "<image>x", "images": [image]}])
    batch["multi_modal_data"][0]["image"][0].putpixel((0, 0), (1, 2, 3))
    again = builder([{"prompt": "<image>x", "images": [image]}])
    assert again["multi_modal_data"][0]["image"][0] == image
    assert builder.image_processor.images == 1
    image.putpixel((0, 0), (1, 2, 3))
    assert torch.equal(shown(builder, image), shown(counting_builder(), image))
    assert builder.image_processor.images == 2
    builder.image_processor.inner.image_mean = [0.1, 0.2, 0.3]
    other = shown(builder, image)
    assert builder.image_processor.images == 3
    builder.image_processor.inner.image_mean = [0.3, 0.2, 0.1]
    assert not torch.equal(shown(builder, image), other)


def test_the_cache_holds_so_many_bytes_of_what_was_shown_last():
    images = [picture(seed=seed) for seed in range(3)]
    inputs = counting_builder()([{"prompt": "<image>x", "images": images[:1]}])["multi_modal_inputs"][0]
    size = sum(tensor.nbytes for tensor in inputs.values())
    builder = counting_builder(image_cache_bytes=2 * size)
    for place, processed in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        shown(builder, images[place])
        assert builder.image_processor.images == processed
    for builder in (counting_builder(image_cache_bytes=0), counting_builder(image_cache_bytes=size - 1)):
        for times in (1, 2):
            shown(builder, images[0])
            assert builder.image_processor.images == times
    with pytest.raises(InvalidConfig, match="image_cache_bytes=-1"):
        counting_builder(image_cache_bytes=-1)


@pytest.mark.parametrize("image_cache_bytes", [0, 1 << 20])
def test_threads_give_the_rows_of_one_thread(monkeypatch, image_cache_bytes):
    pictures = [picture(40 + 8 * number, 40, number) for number in range(3)]
    rows = [{"prompt": f"<image>Question {number}?", "images": [pictures[number % 3]]} for number in range(24)]

    def prepared(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        builder = counting_builder(image_cache_bytes=image_cache_bytes)
        return builder(rows), builder.image_processor.images

    alone, processed = prepared(1)
    together, processed_together = prepared(8)
    assert processed == processed_together == 3
    assert together["uid"].tolist() == alone["uid"].tolist()
    for name in ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids"):
        assert torch.equal(together[name], alone[name])
    for one, other in zip(together["multi_modal_inputs"], alone["multi_modal_inputs"], strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    assert together["multi_modal_inputs"][0]["pixel_values"] is together["multi_modal_inputs"][3]["pixel_values"]


def test_threads_may_read_one_image_that_the_caller_has_opened(monkeypatch, tmp_path):
    """Pillow decodes it, and reads its orientation, in the object that all rows share."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    sideways = Image.Exif()
    sideways[0x0112] = 6
    picture(400, 300).save(tmp_path / "a.jpg", exif=sideways)
    for _ in range(5):
        with Image.open(tmp_path / "a.jpg") as image:
            together = counting_builder()([{"prompt": "<image>", "images": [image]} for _ in range(16)])
        assert {medium["image"][0].size for medium in together["multi_modal_data"]} == {(300, 400)}
        assert len({id(inputs["pixel_values"]) for inputs in together["multi_modal_inputs"]}) == 1


def test_threads_name_the_first_bad_row(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    broken = Image.new("RGB", (1, 400))  # its sides differ too much for the image processor
    rows = [
        {"prompt": "<image>", "images": [broken if place in (5, 9) else picture(seed=place)]} for place in range(12)
    ]
    with pytest.raises(InvalidRow, match=r"row 5: "):
        counting_builder()(rows)


@pytest.mark.parametrize("image_cache_bytes", [0, 10])
def test_without_room_in_the_cache_an_image_of_many_rows_is_processed_once_a_batch(image_cache_bytes):
    builder = counting_builder(image_cache_bytes=image_cache_bytes)
    rows = [{"prompt": "<image>x", "images": [picture(seed=place % 2)]} for place in range(6)]
    for processed in (2, 4):
        batch = builder(rows)
        assert builder.image_processor.images == processed
        assert len({id(inputs["pixel_values"]) for inputs in batch["multi_modal_inputs"]}) == 2


def test_images_of_equal_bytes_and_other_shape_are_distinct():
    flat, tall = Image.new("RGB", (32, 8)), Image.new("RGB", (8, 32))
    builder = counting_builder()
    batch = builder([{"prompt": "<image>", "images": [image]} for image in (flat, tall)])
    assert builder.image_processor.images == 2
    assert [row["image_grid_thw"].tolist() for row in batch["multi_modal_inputs"]] == [[[1, 2, 8]], [[1, 8, 2]]]


@given(st.lists(st.tuples(st.integers(4, 120), st.integers(4, 120)), max_size=3), st.integers(0, 5))
@settings(max_examples=30)
def test_the_length_from_headers_is_the_length_of_the_prompt(sizes, words):
    builder = tiny_builder(max_prompt_length=4096)
    row = {"prompt": "<image>" * len(sizes) + "word " * words, "images": [picture(*size) for size in sizes]}
    assert builder.prompt_length(row) == len(builder.prepare(row).input_ids)


def test_an_overlong_prompt_is_refused_without_decoding(monkeypatch):
    row = {"prompt": "<image>x", "images": [encoded(picture(64, 64))]}  # 64 image tokens
    builder = tiny_builder(max_prompt_length=60)

    def refuse(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert builder.prompt_length(row) > 64
    with pytest.raises(InvalidPrompt, match=r"has \d+ tokens, more than max_prompt_length=60"):
        builder.prepare(row)


def test_pixel_limits_change_the_number_of_tokens():
    row = {"prompt": "<image>", "images": [picture(64, 64)]}
    lengths = {
        limit: tiny_builder(max_pixels=limit)([row])["mm_token_type_ids"].sum().item() for limit in (4096, 1024, 256)
    }
    assert lengths == {4096: 64, 1024: 16, 256: 4}
    grown = tiny_builder(min_pixels=4096)([{"prompt": "<image>", "images": [picture(32, 32)]}])
    assert grown["mm_token_type_ids"].sum() == 64


@pytest.mark.parametrize(("low", "high"), [(0, 100), (200, 100)])
def test_impossible_pixel_limits_are_refused(low, high):
    with pytest.raises(InvalidConfig, match=f"min_pixels={low} and max_pixels={high}"):
        tiny_builder(min_pixels=low, max_pixels=high)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
@pytest.mark.parametrize("typed", [False, True])
def test_text_cannot_smuggle_in_placeholders(token, typed):
    text = f"ignore this {token} here"
    prompt = [{"role": "user", "content": [{"type": "text", "text": text}] if typed else text}]
    with pytest.raises(InvalidRow, match=r"row 4: the text contains <\|") as caught:
        tiny_builder()([{"prompt": prompt, "index": 4}])
    assert token in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "<image><image>", "images": [picture()]}, "2 image markers in the prompt, but 1 images"),
        ({"prompt": "<image>", "images": [b"broken"]}, "cannot be read"),
        ({"prompt": "<image>", "images": [encoded(picture(64, 64))[:300]]}, "broken"),
        ({"prompt": "<image>", "images": [None]}, "missing"),
        ({"prompt": "<image>", "images": ["/nowhere.png"]}, "No such file"),
        ({"prompt": "<image>", "images": [Image.new("RGB", (401, 2))]}, "at most 200 times"),
        ({"prompt": "<image>", "images": [Image.new("RGB", (0, 5))]}, "is empty: 0 x 5 pixels"),
        ({"images": []}, "list of messages"),
        ({"prompt": "x" * 600}, "more than max_prompt_length=512"),
    ],
)
def test_a_bad_row_is_named_with_index_and_reason(row, says):
    good = {"prompt": "<image>", "images": [picture()]}
    with pytest.raises(InvalidRow, match=says) as caught:
        tiny_builder()([good, row])
    assert caught.value.index == 1
    assert str(caught.value).startswith("row 1: ")
    with pytest.raises(InvalidRow) as caught:
        tiny_builder()([good, row | {"index": 77}])
    assert caught.value.index == 77


def test_a_row_without_a_list_around_it_is_told_so():
    with pytest.raises(InvalidPrompt, match=r"not one row \['prompt', 'images'\]: write \[row\]"):
        tiny_builder()({"prompt": "<image>", "images": [picture()]})


@pytest.mark.parametrize("index", ["train-7", None, float("nan"), (1, 2)])
def test_the_reason_is_told_where_the_index_is_no_number(index):
    rows = [{"prompt": "fine"}, {"prompt": "<image>", "images": [None], "index": index}]
    with pytest.raises(InvalidRow, match=r"row 1: .*the image is missing") as caught:
        tiny_builder()(rows)
    assert caught.value.index == 1
    assert index is None or repr(index) in str(caught.value)


def test_a_users_own_marker_is_written_in_a_typed_part():
    text = "What does <image> mean?"
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    batch = tiny_builder()([{"prompt": [{"role": "user", "content": parts}], "images": [picture()]}])
    assert text in tiny_tokenizer().decode(batch["input_ids"][0])
    assert batch["raw_prompt_ids"][0].count(tiny_prompt_config().image_token_id) == 1
    with pytest.raises(InvalidRow, match=r'2 image markers .*, but 1 images: .*\{"type": "text"'):
        tiny_builder()([{"prompt": f"<image>{text}", "images": [picture()]}])


def test_relative_paths_start_at_the_rows_media_root(tmp_path):
    picture().save(tmp_path / "a.png")
    batch = tiny_builder()([{"prompt": "<image>", "images": ["a.png"], "media_root": tmp_path}])
    assert batch["multi_modal_data"][0]["image"][0].size == (24, 16)
    assert "media_root" not in batch.non_tensor_batch


def test_a_template_that_writes_no_placeholder_is_named():
    builder = tiny_builder()
    builder.tokenizer = TextOnly(tiny_tokenizer())
    with pytest.raises(InvalidPrompt, match="wrote 0 image placeholders for 1 images"):
        builder.prepare({"prompt": "<image>", "images": [picture()]})


class TextOnly:
    def __init__(self, inner):
        self.inner = inner

    def apply_chat_template(self, messages, **options):
        return "no placeholders"

    def __call__(self, *arguments, **options):
        return self.inner(*arguments, **options)


def test_arguments_of_the_template_are_passed_on(tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ 'with' if enable_thinking else 'without' }} thinking {{ tools[0].function.name }}"
    tokenizer.save_pretrained(tmp_path)
    tiny_image_processor().save_pretrained(tmp_path)
    tiny_prompt_config("qwen2_5_vl").save_pretrained(tmp_path)
    for thinking, text in ((False, "without thinking zoom"), (True, "with thinking zoom")):
        arguments = {"tools": [{"type": "function", "function": {"name": "zoom"}}], "enable_thinking": thinking}
        builder = PromptBuilder.from_pretrained(tmp_path, 64, template_arguments=arguments)
        assert tokenizer.decode(builder([{"prompt": "x"}])["input_ids"][0]) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinkin": False}, "does not use 'enable_thinkin'; it reads enable_thinking, tools"),
        ({"enable_thinking": False, "messages": []}, "does not use 'messages'"),
        ({"style": "short"}, "does not use 'style'"),
    ],
)
def test_an_argument_that_the_template_does_not_use_is_refused(arguments, message):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    parts = tokenizer, tiny_image_processor(), tiny_prompt_config("qwen2_5_vl"), 64
    tokenizer.chat_template = (
        "{% for message in messages %}{% set style = 'plain' %}{% generation %}{{ style }}{% endgeneration %}{% continue %}"
        "{% endfor %}{% if tools %}{{ raise_exception(strftime_now('')) }}{% endif %}"
        "{{ enable_thinking or add_generation_prompt }}"
    )
    with pytest.raises(InvalidConfig, match=message):
        PromptBuilder(*parts, template_arguments=arguments)
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(InvalidConfig, match="no chat template to give them to"):
        PromptBuilder(*parts, template_arguments=arguments)
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(InvalidConfig, match="it reads nothing but the messages"):
        PromptBuilder(*parts, template_arguments=arguments)


TEXT_ALONE = "{% for m in messages %}{{ m.role }}{% endfor %}"


def named(name):
    """A template that shows images, and writes its name."""
    return f"{name} {TEMPLATE}"


@pytest.mark.parametrize(
    ("in_tokenizer", "files", "taken"),
    [
        (TEXT_ALONE, {"chat_template.json": "legacy"}, "legacy"),
        (None, {"chat_template.json": "legacy"}, "legacy"),
        (named("tokenizer"), {"chat_template.json": "legacy"}, "legacy"),
        (TEXT_ALONE, {"chat_template.json": "legacy", "processor_config.json": "config"}, "config"),
        (TEXT_ALONE, {"chat_template.jinja": "jinja"}, "jinja"),
        (None, {"chat_template.jinja": "jinja", "chat_template.json": "legacy"}, "legacy"),
        (named("tokenizer"), {}, "tokenizer"),
    ],
)
def test_the_template_is_the_one_that_processors_take(tmp_path, in_tokenizer, files, taken):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = in_tokenizer
    for part in (tokenizer, tiny_image_processor(), tiny_prompt_config()):
        part.save_pretrained(tmp_path)
    if in_tokenizer and "chat_template.jinja" not in files:  # as older checkpoints have it
        (tmp_path / "chat_template.jinja").unlink()
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": in_tokenizer}))
    for file, name in files.items():
        text = named(name) if file.endswith("jinja") else json.dumps({"chat_template": named(name)})
        (tmp_path / file).write_text(text)
    builder = PromptBuilder.from_pretrained(tmp_path, 64)
    of_processor = ProcessorMixin.get_processor_dict(tmp_path)[0].get("chat_template")
    assert builder.tokenizer.chat_template == (of_processor or in_tokenizer) == named(taken)
    row = builder.prepare({"prompt": "<image>Find x.", "images": [picture(16, 16)]})
    assert builder.tokenizer.decode(row.raw_ids).startswith(taken)
    builder.config.save_pretrained(tmp_path / "export")
    builder.save_pretrained(tmp_path / "export")
    assert PromptBuilder.from_pretrained(tmp_path / "export", 64).tokenizer.chat_template == named(taken)


def test_a_template_file_that_is_no_json_is_named(tmp_path):
    for part in (tiny_tokenizer(), tiny_image_processor(), tiny_prompt_config()):
        part.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text("{{ messages }}")
    with pytest.raises(InvalidConfig, match=r"chat_template\.json cannot be read: "):
        PromptBuilder.from_pretrained(tmp_path, 64)


def test_a_template_that_refuses_is_a_bad_prompt():
    builder = tiny_builder()
    tokenizer = tiny_tokenizer()
    chosen = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(InvalidPrompt, match="roles must alternate"):
            builder.prepare({"prompt": "x"})
    finally:
        tokenizer.chat_template = chosen


def test_a_checkpoint_directory_is_enough(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_image_processor().save_pretrained(tmp_path)
    tiny_prompt_config().save_pretrained(tmp_path)
    builder = PromptBuilder.from_pretrained(tmp_path, max_prompt_length=512, max_pixels=1024)
    row = {"prompt": "<image>Find x.", "images": [picture(64, 64)]}
    expected = tiny_builder(max_pixels=1024)([row])
    batch = builder([row])
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(
        batch["multi_modal_inputs"][0]["pixel_values"], expected["multi_modal_inputs"][0]["pixel_values"]
    )


@pytest.mark.parametrize(
    "name", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor", "nested"]
)
def test_the_image_processor_is_pils_whatever_the_checkpoint_says(tmp_path, name):
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    if name == "nested":  # as `Processor.save_pretrained` writes it
        nested = {"image_processor": settings | {"image_processor_type": "Qwen2VLImageProcessor"}}
        (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_processor_type": name}))
    processor = load_image_processor(tmp_path)
    assert type(processor) is type(tiny_image_processor())
    assert processor.patch_size == 4
    assert processor.size["longest_edge"] == 4096


def test_an_empty_batch_is_refused():
    with pytest.raises(InvalidPrompt, match="at least one row"):
        tiny_builder()([])


def test_the_processors_refusal_is_a_bad_image():
    builder = counting_builder()
    builder.image_processor.inner = None

    class Refusing(Counting):
        def __call__(self, images, **options):
            raise ValueError("too odd")

    builder.image_processor = Refusing()
    with pytest.raises(InvalidMedia, match="too odd"):
        builder.prepare({"prompt": "<image>", "images": [picture()]})


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("zoom", "turn")
]
TOOL_TEMPLATE = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE


def tool_builder(template=TOOL_TEMPLATE, **options):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return PromptBuilder(tokenizer, tiny_image_processor(), tiny_prompt_config(), 512, **options)


@pytest.mark.parametrize("written", [list, json.dumps])
def test_the_template_gets_the_tools_of_each_row(written):
    builder = tool_builder()
    rows = [
        {"prompt": "Look.", "tools": written(TOOLS[:1])},
        {"prompt": "Look.", "tools": written(TOOLS)},
        {"prompt": "Look."},
        {"prompt": "Look.", "tools": written([])},
    ]
    batch = builder(rows)
    texts = [builder.tokenizer.decode(ids) for ids in batch["raw_prompt_ids"]]
    plain = builder.tokenizer.decode(tiny_builder().prepare(rows[2]).raw_ids)
    assert texts == [f"[zoom]{plain}", f"[zoom][turn]{plain}", plain, plain]
    assert [builder.prompt_length(row) for row in rows] == [len(ids) for ids in batch["raw_prompt_ids"]]
    assert batch["tools"][0] == written(TOOLS[:1])  # a reward and an environment read it too


def test_a_row_has_its_own_tools_in_place_of_those_of_all_rows():
    builder = tool_builder(template_arguments={"tools": TOOLS[:1]})
    own, all_rows = builder.prepare({"prompt": "?", "tools": TOOLS[1:]}), builder.prepare({"prompt": "?"})
    assert [builder.tokenizer.decode(row.raw_ids)[:6] for row in (own, all_rows)] == ["[turn]", "[zoom]"]


def test_calls_that_a_template_does_not_write_are_refused():
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom", "arguments": {}}}]}
    with pytest.raises(InvalidPrompt, match="has tool_calls, which the chat template does not write"):
        tool_builder().prepare({"prompt": [{"role": "user", "content": "?"}, calling]})


@pytest.mark.parametrize(
    ("template", "tools", "reason"),
    [
        (TEMPLATE, TOOLS, "does not use 'tools'"),
        (TOOL_TEMPLATE, "zoom", "must be a list of objects"),
        (TOOL_TEMPLATE, ["zoom"], "must be a list of objects"),
        (TOOL_TEMPLATE, [{"function": {"name": "<|image_pad|>"}}], "which only the chat template may write"),
    ],
)
def test_tools_that_cannot_reach_the_model_are_refused(template, tools, reason):
    builder = tool_builder(template)
    with pytest.raises(InvalidPrompt, match=reason):
        builder.prepare({"prompt": "?", "tools": tools})
