import io
import json
import threading
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from dataproto.errors import CheckpointError, InvalidConfig, InvalidRow
from helpers.geo3k_files import drawing, png
from helpers.tiny_prompts import tiny_builder, tiny_image_processor, tiny_prompt_config, tiny_tokenizer
from recipes.data.conversations import conversation_rows, conversation_stream
from recipes.data.loader import EvaluationLoader, PromptLoader, check_rows, drop_overlong, occurrences
from recipes.data.mixture import Mixture
from recipes.data.problem_rows import load_rows
from rollout.prompts import SupervisedBuilder
from rollout.prompts.image_processing import ImageCache

BAD = {"prompt": "<image>Find x.", "images": [b"broken"]}


def rows(count, bad=()):
    return [
        BAD if place in bad else {"prompt": f"<image>Find {place}.", "images": [drawing(place)]}
        for place in range(count)
    ]


def occurrences_of(loader, batches):
    """The uids without digests."""
    return [[uid.rpartition("-")[0] for uid in batch] for batch in uids(loader, batches)]


def uids(loader, batches):
    return [batch["uid"].tolist() for batch in islice(loader, batches)]


@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.integers(0, 100))
@settings(max_examples=60)
def test_draws_continue_from_any_position(count, seed, start):
    whole = list(islice(occurrences(count, seed), start + 2 * count))
    assert list(islice(occurrences(count, seed, start=start), 2 * count)) == whole[start:]


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_every_epoch_draws_every_row_once(count, seed):
    drawn = list(islice(occurrences(count, seed), 3 * count))
    for epoch in range(3):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert {number for number, _ in part} == {epoch}
        assert sorted(place for _, place in part) == list(range(count))


def test_seed_and_epoch_change_the_order():
    first = [place for _, place in islice(occurrences(20, seed=0), 40)]
    assert first[:20] != first[20:]
    assert first[:20] != [place for _, place in islice(occurrences(20, seed=1), 20)]
    assert first == [place for _, place in islice(occurrences(20, seed=0), 40)]


def test_rows_with_a_name_as_index_keep_it():
    named = [{**row, "index": f"train-{place}"} for place, row in enumerate(rows(3, bad=[1]))]
    loader = PromptLoader(named, tiny_builder(), batch_size=2, seed=1, on_bad_row="skip")
    assert set(next(loader)["index"]) == {"train-0", "train-2"}
    next(loader)
    assert list(loader.skipped) == [1]


def test_batches_are_full_and_uids_unique_across_epochs():
    loader = PromptLoader(rows(5), tiny_builder(), batch_size=3, seed=1)
    seen = [uid for batch in uids(loader, 5) for uid in batch]
    assert len(seen) == len(set(seen)) == 15
    assert sorted(uid.rpartition("-")[0] for uid in seen) == sorted(
        f"{epoch}-{place}" for epoch in range(3) for place in range(5)
    )
    assert loader.drawn // 5 == 3


@pytest.mark.parametrize("kind", [PromptLoader, EvaluationLoader])
def test_loaders_of_different_rows_share_no_uid(kind):
    one, other, again = (next(iter(kind(data, tiny_builder(), 4))) for data in (rows(8)[:4], rows(8)[4:], rows(8)[:4]))
    assert not set(one["uid"]) & set(other["uid"])
    assert one["uid"].tolist() == again["uid"].tolist()


def test_the_rows_of_a_batch_match_their_uids():
    batch = next(PromptLoader(rows(6), tiny_builder(), batch_size=4, shuffle=False))
    assert batch["index"].tolist() == [0, 1, 2, 3]
    assert batch["raw_prompt"][2][0]["content"][1]["text"] == "Find 2."
    assert batch["multi_modal_data"][2]["image"][0].tobytes() == drawing(2).tobytes()


@pytest.mark.parametrize("batches_before", [0, 1, 2, 5])
def test_resuming_continues_exactly(batches_before):
    whole = PromptLoader(rows(7, bad={2}), tiny_builder(), batch_size=3, seed=4, on_bad_row="skip")
    before = uids(whole, batches_before)
    state = json.loads(json.dumps(whole.state_dict()))
    after = uids(whole, 6)
    resumed = PromptLoader(rows(7, bad={2}), tiny_builder(), batch_size=3, seed=4, on_bad_row="skip")
    resumed.load_state_dict(state)
    assert resumed.skipped == {int(index): reason for index, reason in state["skipped"]}
    assert uids(resumed, 6) == after
    assert before + after == uids(
        PromptLoader(rows(7, bad={2}), tiny_builder(), 3, 4, on_bad_row="skip"), len(before) + 6
    )


def test_a_loader_can_return_to_an_earlier_position():
    loader = PromptLoader(rows(5), tiny_builder(), batch_size=2)
    state = loader.state_dict()
    first = uids(loader, 3)
    loader.load_state_dict(state)
    assert uids(loader, 3) == first


def test_loading_draws_nothing_from_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(PromptLoader(rows(3), tiny_builder(), batch_size=2))
    assert torch.equal(torch.rand(1), expected)


def test_a_bad_row_raises_an_error_that_names_it():
    loader = PromptLoader(rows(4, bad={3}), tiny_builder(), batch_size=4, shuffle=False)
    with pytest.raises(InvalidRow, match=r"row 3: image .* cannot be read"):
        next(loader)


def test_a_skipped_row_is_counted_and_replaced():
    loader = PromptLoader(rows(5, bad={1, 3}), tiny_builder(), batch_size=3, shuffle=False, on_bad_row="skip")
    assert occurrences_of(loader, 2) == [["0-0", "0-2", "0-4"], ["1-0", "1-2", "1-4"]]
    assert sorted(loader.skipped) == [1, 3]
    assert "cannot be read" in loader.skipped[1]


def test_only_bad_rows_raise_an_error_instead_of_an_endless_loop():
    loader = PromptLoader(rows(3, bad={0, 1, 2}), tiny_builder(), batch_size=1, on_bad_row="skip")
    with pytest.raises(InvalidRow, match="none of the 3 rows can be used"):
        next(loader)


def test_an_overlong_row_is_a_bad_row():
    data = [*rows(2), {"prompt": "word " * 500}]
    loader = PromptLoader(data, tiny_builder(), batch_size=2, shuffle=False, on_bad_row="skip")
    assert occurrences_of(loader, 2) == [["0-0", "0-1"], ["1-0", "1-1"]]
    assert "more than max_prompt_length" in loader.skipped[2]


@pytest.mark.slow
def test_workers_load_the_same_batches_and_resume():
    """Also from a state of a loader without workers."""
    data = rows(9, bad={4})
    alone = PromptLoader(data, tiny_builder(), batch_size=4, seed=2, on_bad_row="skip")
    first = next(alone)
    state = alone.state_dict()
    after = list(islice(alone, 3))
    helped = PromptLoader(data, tiny_builder(), batch_size=4, seed=2, on_bad_row="skip", num_workers=2)
    batch = next(helped)
    assert batch["uid"].tolist() == first["uid"].tolist()
    assert torch.equal(batch["input_ids"], first["input_ids"])
    for one, other in zip(batch["multi_modal_inputs"], first["multi_modal_inputs"], strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    assert helped.state_dict() == state
    helped.load_state_dict(state)
    assert uids(helped, 3) == [batch["uid"].tolist() for batch in after]
    assert helped.state_dict() == alone.state_dict()


class Drawn:
    """Rows that are made when they are looked up; a list has the threads that did it. Images come twice, and never again."""

    recurring = False

    def __init__(self):
        self.readers = []

    def __len__(self):
        return 9

    def __getitem__(self, place):
        self.readers.append(threading.current_thread())
        return BAD if place == 4 else {"prompt": f"<image>Find {place}.", "images": [drawing(place // 2)]}


def in_threads(monkeypatch, count, kind, **options):
    """Two batches by ``count`` threads; names of threads that prepared rows, number of processed images, threads that read."""
    names, processed, rows, builder = set(), [], Drawn(), tiny_builder()
    prepare, process = type(builder).prepare, ImageCache._found_or_made

    def noted(self, row):
        names.add(threading.current_thread().name.partition("_")[0])
        return prepare(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: count)
        patch.setattr(type(builder), "prepare", noted)
        patch.setattr(ImageCache, "_found_or_made", lambda *args: processed.append(1) or process(*args))
        loader = kind(rows, builder, batch_size=4, on_bad_row="skip", **options)
        batches = list(islice(loader, 2))
    return batches, names, len(processed), set(rows.readers), loader


@pytest.mark.parametrize(("kind", "options"), [(PromptLoader, {"seed": 2}), (EvaluationLoader, {})])
def test_threads_prepare_the_same_batches(kind, options, monkeypatch):
    one, other = (in_threads(monkeypatch, count, kind, **options) for count in (1, 3))
    for alone, helped in zip(one[0], other[0], strict=True):
        assert alone.batch.keys() == helped.batch.keys()
        assert all(torch.equal(value, helped[name]) for name, value in alone.batch.items())
        assert alone["uid"].tolist() == helped["uid"].tolist()
        for row, same in zip(alone["multi_modal_inputs"], helped["multi_modal_inputs"], strict=True):
            assert torch.equal(row["pixel_values"], same["pixel_values"])
    assert one[1] == {threading.current_thread().name}
    assert "preparing" in other[1]
    assert one[2] == other[2] < 8  # images that come twice in a batch are processed once
    assert other[3] == {threading.current_thread()}  # sources of rows need not work in several threads
    assert one[4].skipped == other[4].skipped
    assert list(one[4].skipped) == [4]


@pytest.mark.slow
def test_workers_share_an_image_between_rows():
    data = [{"prompt": f"<image>{place}", "images": [drawing(0)]} for place in range(4)]
    inputs = next(PromptLoader(data, tiny_builder(), batch_size=4, num_workers=2))["multi_modal_inputs"]
    assert len({id(row["pixel_values"]) for row in inputs}) == 1


@pytest.mark.parametrize(("name", "value"), [("seed", 9), ("rows", 3), ("shuffle", False)])
def test_a_state_of_another_run_raises_an_error(name, value):
    loader = PromptLoader(rows(4), tiny_builder(), batch_size=2, seed=1)
    with pytest.raises(CheckpointError, match=f"saved with {name}={value}"):
        loader.load_state_dict(loader.state_dict() | {name: value})


def test_a_state_of_other_rows_of_equal_number_raises_an_error(tmp_path):
    def loader(path, asked="Find {}.", answer="{}"):
        path.parent.mkdir(exist_ok=True, parents=True)
        (path.parent / "a.png").write_bytes(png(drawing(1)))
        given = [{"problem": asked.format(at), "answer": answer.format(at), "images": ["a.png"]} for at in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        rows = drop_overlong(load_rows(path), tiny_builder())[0]
        return PromptLoader(rows, tiny_builder(), batch_size=2)

    first = loader(tmp_path / "a" / "rows.jsonl")
    next(first)
    state = json.loads(json.dumps(first.state_dict()))
    moved = loader(tmp_path / "b" / "rows.jsonl")
    moved.load_state_dict(state)
    assert next(moved)["uid"].tolist() == next(first)["uid"].tolist()
    moved.load_state_dict({name: value for name, value in state.items() if name != "texts"})  # of an earlier version
    for other in ({"asked": "Find y of {}."}, {"answer": "1{}"}):
        with pytest.raises(CheckpointError, match=r"saved with texts=.*: resume with seed and data of the run"):
            loader(tmp_path / "c" / "rows.jsonl", **other).load_state_dict(state)


def test_what_tells_rows_apart_is_what_they_say_and_not_where_it_is_in_memory():
    def zoom():
        def zoom(box: list[int]) -> str:
            return "closer"

        return zoom

    def called(name, **more):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name}}]}
        return [{"prompt": [{"role": "user", "content": "Look."}, call], **more}]

    def position(rows):
        return PromptLoader(rows, tiny_builder(), batch_size=1).state_dict()

    functions = [zoom(), zoom()]  # that of another process is at another address
    first, second = (position(called("zoom", tools=[function])) for function in functions)
    assert first == second
    assert position(called("zoom")) != position(called("look"))
    for one, other in ((np.int64(4), np.int64(5)), (np.array([4.0]), np.array([5.0]))):
        truths = [position([{"prompt": "2 + 2?", "reward_model": {"ground_truth": each}}]) for each in (one, other)]
        assert truths[0] != truths[1]


def test_rows_that_cannot_be_read_do_not_keep_a_run_from_its_data(tmp_path):
    rows = conversation_rows(lines(tmp_path / "a.jsonl", ["a", 3, "c"]))
    loaders = [PromptLoader(rows, supervised_builder(), 1, on_bad_row="skip") for _ in range(2)]
    loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "on_bad_row": "ignore"}, "on_bad_row='ignore'"),
        ({"batch_size": 1, "num_workers": -1}, "num_workers=-1"),
    ],
)
def test_invalid_options_raise_an_error(options, says):
    with pytest.raises(InvalidConfig, match=says):
        PromptLoader(rows(2), tiny_builder(), **options)
    with pytest.raises(InvalidConfig, match="no rows"):
        PromptLoader([], tiny_builder(), batch_size=1)


def test_evaluation_reads_all_rows_in_order_repeatedly():
    loader = EvaluationLoader(rows(5), tiny_builder(), batch_size=2)
    for _ in range(2):
        assert occurrences_of(loader, 3) == [["val-0", "val-1"], ["val-2", "val-3"], ["val-4"]]


def test_evaluation_stops_or_skips():
    with pytest.raises(InvalidRow, match="row 2"):
        list(EvaluationLoader(rows(3, bad={2}), tiny_builder(), batch_size=2))
    skipping = EvaluationLoader(rows(4, bad={1}), tiny_builder(), batch_size=2, on_bad_row="skip")
    for _ in range(2):
        assert occurrences_of(skipping, 2) == [["val-0", "val-2"], ["val-3"]]
    assert list(skipping.skipped) == [1]


def test_overlong_rows_are_dropped_without_decoding(monkeypatch):
    data = [*rows(2), {"prompt": "word " * 500}, BAD, {"prompt": "<image>x", "images": [drawing(1, (64, 64))]}]
    builder = tiny_builder(max_prompt_length=60)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    kept, dropped = drop_overlong(data, builder)
    assert dropped == [2, 4]
    assert kept.indices == [0, 1, 3]  # the loader handles rows of unknown length
    assert kept[1] is data[1]
    with pytest.raises(InvalidConfig, match="all 1 prompts are longer than max_prompt_length=60"):
        drop_overlong(data[2:3], builder)


def test_a_large_epoch_takes_eight_bytes_a_row():
    """A list of its places takes 40: 32 MiB more for the 2 ** 20 rows of synthetic problems."""
    tracemalloc.start()
    try:
        assert len(list(islice(occurrences(2**20, seed=0), 5))) == 5
        assert tracemalloc.get_traced_memory()[1] < 2**20 * 12
    finally:
        tracemalloc.stop()


def test_a_row_that_cannot_be_read_stops_a_run_before_it_begins():
    """Without this it was found when it was drawn, after the models were loaded, or after hours."""
    with pytest.raises(InvalidRow, match=r"row 2: image \(6 bytes\) cannot be read.*--on-bad-row skip"):
        drop_overlong(rows(4, bad={2}), tiny_builder(), on_bad_row="stop")
    assert len(drop_overlong(rows(4), tiny_builder(), on_bad_row="stop")[0]) == 4


def test_a_run_says_at_its_start_how_many_rows_it_will_skip(capsys):
    """Only a metric counted them, as they came."""
    kept, dropped = drop_overlong(rows(4, bad={2, 3}), tiny_builder(), on_bad_row="skip")
    assert (len(kept), dropped) == (4, [])
    assert "2 of 4 rows cannot be used and are skipped; the first is row 2: image (6 bytes)" in capsys.readouterr().out


def test_a_picture_whose_file_is_cut_is_a_bad_row_before_and_in_the_run():
    """Its header is good, so that it was found when it was drawn."""
    buffer = io.BytesIO()
    Image.effect_noise((40, 40), 50).save(buffer, "PNG")
    cut = rows(4)
    cut[2]["images"] = [buffer.getvalue()[:900]]
    with pytest.raises(InvalidRow, match=r"row 2: image \(900 bytes\) is broken: .*--on-bad-row skip"):
        drop_overlong(cut, tiny_builder(), on_bad_row="stop")
    kept, _ = drop_overlong(cut, tiny_builder(), on_bad_row="skip")
    loader = PromptLoader(kept, tiny_builder(), batch_size=3, shuffle=False, on_bad_row="skip")
    assert [next(loader)["index"].tolist(), [*loader.skipped]] == [[0, 1, 3], [2]]


def test_only_the_rows_that_a_run_reads_are_checked():
    for bad in range(4):
        loader = PromptLoader(rows(4, bad={bad}), tiny_builder(), batch_size=1, seed=3)
        drawn = [place for _, place in islice(occurrences(4, 3), 2)]
        if bad in drawn:
            with pytest.raises(InvalidRow, match=f"row {bad}: image .* cannot be read"):
                check_rows(loader, draws=2)
        else:
            check_rows(loader, draws=2)
        with pytest.raises(InvalidRow, match=f"row {bad}: "):
            check_rows(loader)


def supervised_builder():
    return SupervisedBuilder(tiny_tokenizer(), tiny_image_processor(), tiny_prompt_config(), 256)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["stream", "mixture"])
def test_skipping_ends_where_no_row_of_a_source_can_be_used(kind, num_workers, tmp_path):
    asked, said = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}
    gone = lines(tmp_path / "a.jsonl", [{"messages": [asked, said], "images": [f"gone/{n}.png"]} for n in range(9)])
    good = lines(tmp_path / "b.jsonl", [{"messages": [{**asked, "content": "?"}, said]} for n in range(9)])
    mixture = Mixture([conversation_rows(good), conversation_rows(gone)], [1, 1])
    source = {"stream": conversation_stream(str(gone)), "mixture": mixture}[kind]
    builder = supervised_builder()
    loader = PromptLoader(source, builder, 4, on_bad_row="skip", num_workers=num_workers)
    named = {"stream": "none of the rows can be used", "mixture": "none of the rows of data set 2 can be used"}[kind]
    with pytest.raises(InvalidRow, match=rf"gone/\d.png.*; {named}"):
        for _ in range(20):
            next(loader)
    assert len(loader.skipped) == 9


def test_a_stream_may_have_a_bad_epoch_of_its_own_part(tmp_path):
    """One good row of 9: a resumed loader meets only bad ones until its next epoch, and continues."""
    texts = [{"prompt": "q" if n == 4 else "<image>q", "answer": "a"} for n in range(9)]
    stream = conversation_stream(str(lines(tmp_path / "a.jsonl", texts)), buffer=1)  # in order
    builder = supervised_builder()
    loader = PromptLoader(stream, builder, 1, on_bad_row="skip")
    next(loader)
    resumed = PromptLoader(stream, builder, 1, on_bad_row="skip")
    resumed.load_state_dict(loader.state_dict())
    assert uids(resumed, 3) == uids(loader, 3)


@pytest.mark.parametrize(
    ("sizes", "weights", "changed"),
    [((10, 11), (1, 1), "rows"), ((11, 10), (1, 1), "rows"), ((10, 10), (1, 2), "weights"), ((10,), (1,), "rows")],
)
def test_a_mixture_whose_sources_or_weights_have_changed_is_not_resumed(sizes, weights, changed):
    def loader(sizes, weights):
        return PromptLoader(Mixture([rows(count) for count in sizes], weights), tiny_builder(), 2)

    position = json.loads(json.dumps(loader((10, 10), (1, 1)).state_dict()))
    loader((10, 10), (1, 1)).load_state_dict(position)
    with pytest.raises(CheckpointError, match=f"saved with {changed}="):
        loader(sizes, weights).load_state_dict(position)
