"""How much the checkpoints and samplers of each key may take on disk."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from dataproto_server.config import LimitsConfig
from dataproto_server.ledger.catalogue import Catalogue
from dataproto_server.ledger.directories import directory_size, new_directory
from dataproto_server.ledger.records import Run
from dataproto_server.refusals import InvalidRequest

MILLIARD = 1_000_000_000


class CheckpointRoom:
    """Counts what is on disk for a key, and what is being written for it."""

    def __init__(self, catalogue: Catalogue, limits: LimitsConfig) -> None:
        self.catalogue, self.limits = catalogue, limits
        self._sizes: dict[str | None, int] = {}  # of the directories of samplers
        self._writing: dict[str, tuple[str, int]] = {}  # owner and bytes of what no record names yet, by run

    @asynccontextmanager
    async def limited(self, run: Run, directory: Path, *, synced: bool = True) -> AsyncIterator[Path]:
        """`new_directory` within the room of the key. Raises as `check_room`: another run may take the rest meanwhile."""
        self.check_room(run.owner)
        async with new_directory(directory, synced=synced) as temporary:
            yield temporary
            self.check_room(run.owner)
            self._writing[run.id] = run.owner, directory_size(temporary)

    @contextmanager
    def reserved(self, run: Run, size: int) -> Iterator[None]:
        """Counts bytes that are written in the block, and recorded at its end. Raises as `check_room`."""
        self.check_room(run.owner)
        self._writing[run.id] = run.owner, size
        try:
            yield
        finally:
            self.forget(run)

    def check_room(self, owner: str) -> None:
        """Raises `InvalidRequest` if the checkpoints and samplers of a key take all that they may."""
        most = self.limits.max_checkpoint_gb
        used = sum(each.size for each in self.catalogue.checkpoints_of(owner)) + self._size_of_samplers(owner)
        used += sum(size for writer, size in self._writing.values() if writer == owner)
        if used >= most * MILLIARD:
            raise InvalidRequest(
                f"the checkpoints and samplers of this key take {used / MILLIARD:.1f} GB: at most {most} "
                "(--max-checkpoint-gb)"
            )

    def _size_of_samplers(self, owner: str) -> int:
        own = {each.directory for each in self.catalogue.samplers.values() if each.owner == owner and each.own}
        for directory in own - self._sizes.keys():
            with suppress(FileNotFoundError):  # an absent one takes no room, and may come back
                self._sizes[directory] = directory_size(self.catalogue.place(str(directory)))
        return sum(self._sizes.get(directory, 0) for directory in own)

    def forget(self, run: Run) -> None:
        """Counts what a run has written no more, unless a record names it."""
        self._writing.pop(run.id, None)
