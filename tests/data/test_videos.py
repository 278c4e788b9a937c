import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataproto.errors import InvalidMedia
from helpers.tiny_prompts import tiny_builder, tiny_image_processor, tiny_tokenizer
from rollout.prompts.videos import pair_frames, process_video, read_video

OPTIONS = {"size": {"shortest_edge": 64, "longest_edge": 4096}}


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 24, 3), dtype=np.uint8)


def processed(source):
    return process_video(source, tiny_image_processor(), OPTIONS)


def test_a_still_is_an_image_for_every_two_frames():
    still = frames(1)[0]
    image = tiny_image_processor()(images=[Image.fromarray(still)], return_tensors="pt")
    video = processed([Image.fromarray(still)] * 4)
    assert video.inputs["video_grid_thw"].tolist() == [[2, 4, 6]]
    assert torch.equal(video.inputs["pixel_values_videos"], image["pixel_values"].repeat(2, 1))


def test_both_frames_of_a_patch_are_in_it_and_the_last_frame_fills_up():
    given = frames(3)
    image = [
        tiny_image_processor()(images=[Image.fromarray(frame)], return_tensors="pt")["pixel_values"] for frame in given
    ]
    by_frame = [patches.view(24, 3, 2, 16)[:, :, 0] for patches in image]  # channels, 4 x 4 pixels
    video = processed(given).inputs["pixel_values_videos"].view(2, 24, 3, 2, 16)
    for time, step, frame in [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)]:
        assert torch.equal(video[time, :, :, step], by_frame[frame])


def test_the_image_processor_has_the_frames_of_one_patch_at_a_time():
    """Its patches of all frames would take twice the room of the result, and their copies as much again."""
    given, seen, processor = frames(5), [], tiny_image_processor()

    class Counting:
        patch_size, merge_size, temporal_patch_size = 4, 2, 2

        def __call__(self, images, **options):
            seen.append(len(images))
            return processor(images=images, **options)

    video = process_video(given, Counting(), OPTIONS).inputs
    assert seen == [2, 2, 1]
    at_once = processor(images=[Image.fromarray(each) for each in given], return_tensors="pt", **OPTIONS)
    assert torch.equal(video["pixel_values_videos"], pair_frames(at_once["pixel_values"], 5, 2, 4))
    assert video["video_grid_thw"].tolist() == [[3, 4, 6]]


@pytest.mark.parametrize("shape", ["array", "channels first", "tensor", "list", "tuple", "mapping"])
def test_frames_come_in_many_ways(shape):
    given = frames(2)
    source = {
        "array": given,
        "channels first": given.transpose(0, 3, 1, 2),
        "tensor": torch.from_numpy(given),
        "list": [Image.fromarray(frame) for frame in given],
        "tuple": (given, None),
        "mapping": {"type": "video", "video": [Image.fromarray(frame) for frame in given], "path": None},
    }[shape]
    read, metadata = read_video(source)
    assert np.array_equal(read, given)
    assert metadata == {"fps": 2.0, "frames_indices": [0, 1], "total_num_frames": 2, "do_sample_frames": False}


def test_time_comes_from_the_metadata():
    video = processed((frames(4), {"fps": 24.0, "frames_indices": [0, 12, 24, 36], "total_num_frames": 48}))
    assert video.seconds == [0.25, 1.25]  # the middle of each pair
    assert video.inputs["second_per_grid_ts"].tolist() == [1.0]  # 4 frames in 2 seconds, two a patch
    without = processed(frames(4))
    assert without.inputs["second_per_grid_ts"].tolist() == [1.0]
    assert without.seconds == [0.25, 1.25]


def test_a_video_in_a_prompt():
    batch = tiny_builder("qwen3_vl")([{"prompt": "<video>What moves?", "videos": [frames(4)]}])
    text = tiny_tokenizer().decode(batch["input_ids"][0])
    picture = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    assert f"user\n<0.2 seconds>{picture}<1.2 seconds>{picture}What moves?" in text
    assert (batch["mm_token_type_ids"] == 2).sum() == 12
    data, metadata = batch["multi_modal_data"][0]["video"][0]
    assert np.array_equal(data, frames(4))
    assert metadata["fps"] == 2.0
    assert set(batch["multi_modal_inputs"][0]) == {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}


def test_equal_videos_share_their_tensors():
    rows = [{"prompt": "<video>a", "videos": [frames(2)]}, {"prompt": "<video>b", "videos": [frames(2)]}]
    inputs = tiny_builder()(rows)["multi_modal_inputs"]
    assert inputs[0]["pixel_values_videos"] is inputs[1]["pixel_values_videos"]


@pytest.mark.parametrize(("patch_size", "merge_size", "asked"), [(14, 2, 14), (16, 2, 16), (8, 4, 16)])
def test_the_decoder_is_told_the_size_of_patches(patch_size, merge_size, asked, tmp_path, monkeypatch):
    (tmp_path / "v.mp4").write_bytes(b"video")
    told = []

    class Decoder:
        @staticmethod
        def fetch_video(element, image_patch_size, return_video_metadata):
            told.append(image_patch_size)
            side = 2 * image_patch_size
            metadata = {"fps": 2.0, "frames_indices": [0, 1], "total_num_frames": 2}
            return torch.zeros(2, 3, 5 * side, 7 * side), metadata

    monkeypatch.setitem(sys.modules, "qwen_vl_utils", Decoder)
    processor = Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=merge_size, temporal_patch_size=2)
    limits = {
        "size": {"shortest_edge": 1, "longest_edge": 10**6}
    }  # before transformers 5.18 a class's own may be another's
    video = process_video("v.mp4", processor, limits, tmp_path)
    assert told == [asked]
    height, width = video.frames.shape[1:3]
    assert video.inputs["video_grid_thw"].tolist() == [[1, height // patch_size, width // patch_size]]


def test_a_file_without_its_decoder_says_what_to_install(tmp_path, monkeypatch):
    file = tmp_path / "v.mp4"
    file.write_bytes(b"video")
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    with pytest.raises(InvalidMedia, match="pip install torchvision"):
        read_video("v.mp4", root=tmp_path)
    with pytest.raises(InvalidMedia, match="no such file"):
        read_video("w.mp4", root=tmp_path)


@pytest.mark.parametrize(
    ("video", "says"),
    [
        ("gone.mp4", "video 'gone.mp4': there is no such file in .*--media-root"),
        ({"video": ["there.png", "gone.png"]}, "video 'gone.png': there is no such file"),
        ("https://example.org/a.mp4", "videos are not downloaded"),
        ({"bytes": b"ftyp", "path": None}, r"the video is bytes \(4\), which are not decoded: save it to a file"),
        ({"bytes": b"ftyp", "path": "gone.mp4"}, "save it to a file"),
        (b"ftyp", "save it to a file"),
        (
            {"frames": ["there.png"]},
            r"the video is missing \(None\): an object holds its frames or its path in 'video'",
        ),
        (None, "the video is missing"),
        ([], "the video has no frames"),
        ("there.mp4", "video 'there.mp4': decoding a video file needs qwen-vl-utils"),
    ],
)
def test_a_video_that_cannot_be_read_is_told_before_a_run_begins(video, says, tmp_path, monkeypatch):
    """It was told when its row was loaded, after hours."""
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    (tmp_path / "there.mp4").write_bytes(b"video")
    Image.new("RGB", (8, 8)).save(tmp_path / "there.png")
    row = {"prompt": "<video>What?", "videos": [video], "media_root": tmp_path}
    with pytest.raises(InvalidMedia, match=says):
        tiny_builder().prompt_length(row)
    row["videos"] = [["there.png", {"bytes": b"", "path": None}], [Image.new("RGB", (8, 8))]]
    assert tiny_builder().prompt_length({**row, "prompt": "<video><video>What?"}) > 0


def test_a_decoded_file_becomes_frames(tmp_path, monkeypatch):
    """qwen_vl_utils' interface, stood in for: float frames (T, 3, H, W) and metadata."""
    file = tmp_path / "v.mp4"
    file.write_bytes(b"video")
    asked = {}

    class Decoder:
        @staticmethod
        def fetch_video(element, image_patch_size, return_video_metadata):
            asked.update(element, image_patch_size=image_patch_size)
            video = torch.from_numpy(frames(2)).permute(0, 3, 1, 2).float() + 0.2
            return video, {"fps": 30.0, "frames_indices": [0, 15], "total_num_frames": 30}

    monkeypatch.setitem(sys.modules, "qwen_vl_utils", Decoder)
    read, metadata = read_video({"video": "v.mp4", "fps": 2.0, "max_frames": None}, tmp_path, patch_size=16)
    assert np.array_equal(read, frames(2))
    assert metadata["fps"] == 30.0
    assert asked == {"video": str(file), "fps": 2.0, "image_patch_size": 16}


PATCH_SIZES = {14: (364, 644), 16: (352, 640)}  # Qwen2-VL's and Qwen3-VL's: 360 x 640 pixels to multiples of 28 and 32


@pytest.mark.vllm  # where qwen_vl_utils and the torchvision that it needs are installed
@pytest.mark.parametrize("patch_size", PATCH_SIZES)
def test_frames_of_a_file_are_resized_once(patch_size, tmp_path, monkeypatch):
    import cv2
    from qwen_vl_utils import vision_process

    def read_with_opencv(element):  # torchvision has no reader any more
        capture = cv2.VideoCapture(element["video"])
        frames = [capture.read()[1][..., ::-1].copy() for _ in range(4)]
        metadata = {"fps": 2.0, "frames_indices": list(range(4)), "total_num_frames": 4}
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), metadata, 2.0

    monkeypatch.setitem(
        vision_process.VIDEO_READER_BACKENDS, vision_process.get_video_reader_backend(), read_with_opencv
    )
    file = str(tmp_path / "v.mp4")
    writer = cv2.VideoWriter(file, cv2.VideoWriter_fourcc(*"mp4v"), 2.0, (640, 360))
    for frame in np.random.default_rng(0).integers(0, 256, (4, 360, 640, 3), dtype=np.uint8):
        writer.write(frame)
    writer.release()
    processor = Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, temporal_patch_size=2)
    video = process_video(file, processor, {})
    assert video.frames.shape == (4, *PATCH_SIZES[patch_size], 3)
    grid = video.inputs["video_grid_thw"][0].tolist()
    assert grid == [2, *(side // patch_size for side in PATCH_SIZES[patch_size])]
    given = process_video(video.frames, processor, {"do_resize": False})  # as they are, without another resize
    assert torch.equal(video.inputs["pixel_values_videos"], given.inputs["pixel_values_videos"])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "missing"),
        ({"video": None}, "missing"),
        ([], "frames or a path"),
        (3, "frames or a path"),
        (np.zeros((2, 4, 4), dtype=np.uint8), "uint8"),
        (np.zeros((2, 4, 4, 3), dtype=np.float32), "float32"),
        ([Image.new("RGB", (4, 4)), Image.new("RGB", (8, 4))], "differ in size"),
        ((frames(2), {"fps": 0.0}), "0.0 frames a second"),
        ((frames(2), {"fps": float("nan")}), "nan frames a second"),
        ({"video": frames(2), "fps": "2 a second"}, "fps must be a number"),
        ((frames(2), {"frames_indices": 2}), "frames_indices numbers"),
        ((frames(2), {"frames_indices": [0]}), "2 frames of a video have metadata for 1"),
    ],
)
def test_bad_videos_are_refused(source, says):
    with pytest.raises(InvalidMedia, match=says):
        read_video(source)
