"""Turns to tokens so that a row only grows: what a template adds after an answer, and nothing that it would change before it.

The ids of a turn begin with the ids of the turn before and what was sampled, and are never rendered again. An observation becomes
the text that the chat template adds after a sentinel, in the place of the answer, when the observation follows it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image
from torch import Tensor

from dataproto.columns import RowMedia
from dataproto.errors import InvalidConfig, InvalidPrompt, raised_as
from dataproto.vlm import media_grids
from rollout.continuation import common_length, joined_media
from rollout.environments.environment import Content, Observation
from rollout.prompts import ProcessedImage, Prompt, PromptBuilder
from rollout.prompts.image_processing import ProcessedMedium
from rollout.prompts.images import load_image
from rollout.prompts.messages import Conversation
from rollout.prompts.prompt_builder import ANSWER as SENTINEL
from rollout.prompts.prompt_builder import THOUGHT as SECOND

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RenderedTurn:
    """What stands between two answers: the end of the first if it was not sampled, an observation, and the start of the second.

    Letters: T tokens.
    """

    ids: Ids  # (T,) int64, placeholders expanded
    token_types: npt.NDArray[np.int8]  # (T,)
    position_ids: Tensor  # (4, T) or (T,), from 0
    raw_ids: list[int]  # one placeholder for each medium
    shown: tuple[ProcessedMedium, ...] = ()
    media: Mapping[str, Tensor] = field(default_factory=dict)  # the model's inputs of what is shown


class TurnRenderer:
    """Renders first prompts and observations with the chat template of a `PromptBuilder`.

    ``departures`` names where rows differ from what the template makes of the whole conversation, because rows only grow.
    """

    def __init__(self, builder: PromptBuilder) -> None:
        """Tries the template out.

        Raises:
            InvalidConfig: no observation can be rendered with this template; says why.
        """
        self.builder = builder
        self.end_ids = frozenset(builder.end_ids)
        # By texts and sizes of images: all but the media are alike.
        self._turns: dict[tuple[Any, ...], RenderedTurn] = {}
        self._images: dict[tuple[Any, ...], ProcessedImage] = {}
        self._media: dict[tuple[bytes, ...], Mapping[str, Tensor]] = {}
        self._joins: dict[str, bool] = {}  # by role: whether its texts are joined to a string
        with raised_as(InvalidConfig, "this chat template cannot show observations", InvalidPrompt):
            self.departures = tuple(self._departures())

    # Prompts

    def prompt(self, row: Mapping[str, Any], observation: Observation) -> Prompt:
        """The prompt of a row whose messages are followed by an observation, in the user's last message if there is one.

        Raises:
            InvalidPrompt: the messages, the observation, or both together cannot be a prompt.
        """
        messages = [dict(message) for message in row["raw_prompt"]]
        if observation.system:
            messages.insert(0, {"role": "system", "content": _parts(observation.system, pixels=True)})
        if observation.content:
            self._check_shown(observation.role)
            shown = _parts(observation.content, pixels=True)
            if messages and messages[-1]["role"] == observation.role:
                content = messages[-1]["content"]
                told = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
                messages[-1] = {**messages[-1], "content": [*(part for part in told if part.get("text") != ""), *shown]}
            else:
                messages.append({"role": observation.role, "content": shown})
        others = {name: value for name, value in row.items() if name != "raw_prompt"}
        return self.builder.prepare({"prompt": messages, **others})

    # Turns

    def turn(self, observation: Observation, last: int | None = None) -> RenderedTurn:
        """What follows an answer.

        Args:
            last: the answer's last token. Unless it is the template's own end, that comes first, since it may begin the next
                message too. By default the answer has the template's own end.

        Raises:
            InvalidPrompt: the observation cannot be shown, e.g. text with a media token or an image that the model does not take.
        """
        parts = [part if isinstance(part, str) else self._image(part) for part in observation.content]
        shown = tuple(part for part in parts if not isinstance(part, str))
        key = (last, observation.role, *(part if isinstance(part, str) else part.image.size for part in parts))
        if key not in self._turns:
            message = {"role": observation.role, "content": _parts(observation.content)}
            images = [each.image for each in shown]
            self._turns[key] = self.messages(Conversation([message], images), last, follows=True)
        return replace(self._turns[key], shown=shown, media=self.media(shown) if shown else {})

    def messages(
        self, conversation: Conversation, last: int | None = None, follows: bool = False, begins: str = ""
    ) -> RenderedTurn:
        """A whole conversation, or messages that follow an answer, as tokens, with the start of the next answer.

        Args:
            conversation: its images and sounds are decoded.
            last: with ``follows``, the answer's last token, see `turn`.
            begins: text with which the next answer begins.

        Raises:
            InvalidPrompt: see `turn`.
        """
        builder = self.builder
        builder.check_content(conversation)
        if follows and "image" in conversation.kinds() and builder.family.numbers_images:
            raise InvalidPrompt(
                f"models of type {builder.family.model_type} number the images of a prompt: show images in the first observation "
                "only"
            )
        messages = [self._as_taken(message) for message in conversation.messages]
        if follows:
            text = self._after(ANSWERED, *messages, tools=conversation.tools)
        else:
            text = builder.render(messages, add_generation_prompt=True, tools=conversation.tools)
        media = tuple(
            self._image(source) if kind == "image" else builder.process_sound(source)
            for kind, source in zip(conversation.kinds(), conversation.media, strict=True)
        )
        ids = builder.encode_text(text + begins)
        if follows and ids and ids[0] in self.end_ids and last in (None, ids[0]):
            ids = ids[1:]
        for kind, placeholder in builder.placeholders.items():
            count = sum(medium.kind == kind for medium in media)
            if placeholder is not None and ids.count(placeholder) != count:
                raise InvalidPrompt(f"the chat template wrote other than one placeholder for each of {count} {kind}s")
        expanded, types = builder.expand(ids, media)
        positions = self.positions(types, [medium.inputs for medium in media])
        return RenderedTurn(expanded, types, positions, ids, media, self.media(media) if media else {})

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its texts joined to a string, where the template takes only a string."""
        content = message["content"]
        if message["role"] not in ("user", "tool") or isinstance(content, str):
            return message
        self._check_shown(message["role"])
        if not self._joins[message["role"]] or any(part["type"] != "text" for part in content):
            return message
        return {**message, "content": "".join(part["text"] for part in content)}

    def positions(self, token_types: npt.NDArray[np.int8], media: Sequence[RowMedia]) -> Tensor:
        """Positions ``(4, T)`` or ``(T,)`` of tokens with these types and media, from 0."""
        types, mask = torch.from_numpy(token_types)[None], torch.ones(1, len(token_types), dtype=torch.int64)
        family, config = self.builder.family, self.builder.config
        return family.position_ids(types, mask, **media_grids(media), config=config)[0]

    def content_key(self, observation: Observation) -> tuple[Any, ...]:
        """A value that is equal for equal content; it identifies images until `forget`."""
        parts = (*observation.system, *observation.content)
        found = (part if isinstance(part, str) else id(self._image(part)) for part in parts)
        return (len(observation.system), *found)

    def digest(self, observation: Observation, shown: Sequence[ProcessedMedium] = ()) -> str:
        """A digest of the content, equal for equal texts and pixels in any process. ``shown`` are its images, if processed."""
        found, images = blake2b(digest_size=16), iter(shown)
        for part in observation.content:
            data = part.encode() if isinstance(part, str) else (next(images, None) or self._image(part)).key
            found.update(f"{type(part) is str} {len(data)} ".encode() + data)
        return found.hexdigest()

    def _image(self, image: Image.Image) -> ProcessedImage:
        if (key := _image_key(image)) not in self._images:
            shown = load_image(image)
            self._images[key] = self._images.setdefault(_image_key(shown), self.builder.process_image(shown))
        return self._images[key]

    def kept(self, observation: Observation) -> Observation:
        """The observation as it is now, to be shown again: an environment may draw on its picture, or add to its list."""
        content = [part if isinstance(part, str) else self._image(part).image for part in observation.content]
        return replace(observation, content=content)

    def media(self, media: Sequence[ProcessedMedium]) -> Mapping[str, Tensor]:
        """The model's inputs of a turn's media in their order; the same object for the same media, until `forget`."""
        key = tuple(medium.key for medium in media)
        if key not in self._media:
            self._media[key] = joined_media([medium.inputs for medium in media])
        return self._media[key]

    def forget(self) -> None:
        """Frees the turns and media that are kept to render equal ones once."""
        for kept in (self._turns, self._images, self._media):
            kept.clear()

    def _check_shown(self, role: str) -> None:
        """Finds out how the template takes messages of this role. Raises `InvalidPrompt` if it leaves out their text.

        Many templates take the text of a tool only as a string, and write a list of parts as Python does.
        """
        if role in self._joins:
            return
        joins = False
        if role == "tool":
            with suppress(InvalidPrompt):
                joins = SECOND in self._after(ANSWERED, {"role": role, "content": SECOND})
        if not joins and SECOND not in self._after(ANSWERED, _said(role, SECOND)):
            raise InvalidPrompt(
                f"the chat template leaves out messages of the role {role!r} after an answer: show it in another role"
            )
        self._joins[role] = joins

    def _after(self, messages: Sequence[dict[str, Any]], *following: dict[str, Any], tools: Sequence[Any] = ()) -> str:
        """What the template writes after the sentinel, which the last of the messages is."""
        text = self.builder.render([*messages, *following], add_generation_prompt=True, tools=tools)
        if text.count(SENTINEL) != 1:
            raise InvalidPrompt(
                f"the chat template wrote the answer {text.count(SENTINEL)} times before an observation"
            )
        return text.partition(SENTINEL)[2]

    # Templates

    def _departures(self) -> list[str]:
        found: list[str] = []
        asked = self.builder.render([_said("user", "?")], add_generation_prompt=True)
        shown = _said("user", "!")
        text = self.builder.render([*ANSWERED, shown], add_generation_prompt=True)
        before, _, after = text.partition(SENTINEL)
        if SENTINEL not in text:
            raise InvalidPrompt("it leaves out answers that an observation follows")
        if not before.startswith(asked):
            same = common_length(before, asked)
            found.append(
                f"it begins an answer with {asked[same:]!r}, but writes {before[same:]!r} there once "
                "an observation follows: rows keep the first"
            )
        elif before[len(asked) :].strip():
            found.append(
                f"it writes {before[len(asked) :]!r} before an answer once an observation follows: rows do not have it"
            )
        earlier = [_said("user", "?"), _said("assistant", SECOND), *ANSWERED]
        if self._after(earlier, shown) != after:
            raise InvalidPrompt("what it writes after an answer depends on the turns before")
        ids = self.builder.encode_text(after)
        if not ids or ids[0] not in self.end_ids:
            found.append(f"it writes {after!r} after an answer, which does not begin with an end token of the model")
        else:
            gap = after[len(str(self.builder.tokenizer.decode(ids[:1]))) :]
            gap = gap[: len(gap) - len(gap.lstrip())]
            if gap:
                found.append(
                    f"it writes {gap!r} after the end token, which is not sampled: it stands before the observation"
                )
        thought = f"<think>\n{SECOND}\n</think>\n\n{SENTINEL}"
        thinking = self.builder.render(
            [_said("user", "?"), _said("assistant", thought), shown], add_generation_prompt=True
        )
        if SECOND not in thinking:
            found.append("it strips thinking from answers that an observation follows: rows keep it")
        return found


def _image_key(image: Image.Image) -> tuple[Any, ...]:
    """A value that is equal for images which `load_image` makes equal pixels of."""
    if image.mode in ("P", "PA"):  # palette indices do not define the colours
        image = image.convert("RGBA")
    pixels = blake2b(image.tobytes(), digest_size=16).digest()  # first: what is told of the pixels may follow them
    turned = image.getexif().get(ExifTags.Base.Orientation)
    file = image.format if image.mode in ("I", "L", "RGB") else None  # without one, nothing of these is transparent
    return image.mode, image.size, file, turned, repr(image.info.get("transparency")), pixels


def _parts(content: Content, pixels: bool = False) -> list[dict[str, Any]]:
    """Typed parts of a message; with ``pixels`` the images are in their parts."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image"} | ({"image": part} if pixels else {})
        for part in content
    ]


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": _parts([text])}


ANSWERED = (_said("user", "?"), _said("assistant", SENTINEL))
"""Messages that an observation follows."""
