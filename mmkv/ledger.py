"""What is parked, in memory: conversations, their versions, the leases on them and the blocks they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mmkv.blocks import BlockAllocator
from mmkv.geometry import Extent
from mmkv.prefix import PrefixIndex
from mmkv.quarantine import Quarantine
from mmkv.rows import ConversationRow, VersionRow

__all__ = ["Conversation", "Ledger", "Version"]


@dataclass(slots=True, eq=False)
class Version:
    """A version and who holds it.

    Its blocks are held while the catalog lists it (`linked`) and while somebody has a lease on it.
    """

    row: VersionRow
    leases: int = 0
    linked: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the version."""
        return self.row.tokens

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The blocks that hold it, in order."""
        return self.row.extents

    @property
    def records(self) -> list[Extent]:
        """The records of its checkpoints."""
        return [Extent(point.record, 1) for point in self.row.checkpoints]


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation as the pool knows it; see `ConversationRow` for the fields."""

    name: str
    namespace: str
    pinned: bool
    created: float
    parked: float
    taken: float | None
    used: int
    version: Version
    fallback: Version | None = None

    def linked_versions(self) -> list[Version]:
        """The versions that the catalog lists."""
        return [self.version] if self.fallback is None else [self.version, self.fallback]

    def row(self) -> ConversationRow:
        """The same as plain values."""
        return ConversationRow(
            0,
            self.name,
            self.namespace,
            self.pinned,
            self.created,
            self.parked,
            self.taken,
            self.used,
            self.version.row,
            self.fallback.row if self.fallback else None,
        )


class Ledger:
    """All conversations of a pool. Not safe for threads by itself: the pool's lock guards it.

    Parameters
    ----------
    blocks, records : BlockAllocator
        The numbers of token blocks and of checkpoint records.

    Attributes
    ----------
    quarantine : Quarantine
        Those of them whose bytes are not what was parked.
    """

    def __init__(self, blocks: BlockAllocator, records: BlockAllocator) -> None:
        self.blocks = blocks
        self.records = records
        self.quarantine = Quarantine(blocks, records)
        self.conversations: dict[str, Conversation] = {}
        self.namespaces: dict[str, dict[Conversation, None]] = {}
        self.index: PrefixIndex[Conversation] = PrefixIndex()
        self.leases = 0
        self._use = 0

    def load(self, rows: Iterable[ConversationRow]) -> None:
        """Take in what a catalog lists.

        Raises
        ------
        ValueError
            It lists blocks that are not allocated.
        """
        for row in rows:
            version, fallback = Version(row.version), Version(row.fallback) if row.fallback else None
            self._link(version)
            if fallback is not None:
                self._link(fallback)
            conversation = Conversation(
                row.name, row.namespace, row.pinned, row.created, row.parked, row.taken, row.used, version, fallback
            )
            self._use = max(self._use, row.used)
            self._enter(conversation)

    def next_use(self) -> int:
        """The next number in the order of use."""
        self._use += 1
        return self._use

    def commit(self, name: str, namespace: str, row: VersionRow, used: int, fallback: Version | None) -> Conversation:
        """Make a version whose blocks are held by a reservation the newest one; the reservation becomes the link's.

        `fallback`, a former version of the same conversation, stays linked.
        """
        version = Version(row, linked=True)
        former = self.conversations.get(name)
        if former is None:
            conversation = Conversation(name, namespace, False, row.created, row.created, None, used, version)
            self._enter(conversation)
            return conversation
        shared = _common_blocks(former.version.row, row)
        self.index.remove(former.version.row.hashes[shared:], former)
        self.index.add(row.hashes[shared:], former)
        replaced = [old for old in former.linked_versions() if old is not fallback]
        former.version, former.fallback = version, fallback
        former.parked, former.used = row.created, used
        for old in replaced:
            self._unlink(old)
        return former

    def drop(self, name: str) -> None:
        """Forget a conversation; blocks that nobody else holds become free, those of leased versions with the lease."""
        conversation = self.conversations.pop(name)
        members = self.namespaces[conversation.namespace]
        del members[conversation]
        if not members:
            del self.namespaces[conversation.namespace]
        self.index.remove(conversation.version.row.hashes, conversation)
        for version in conversation.linked_versions():
            self._unlink(version)

    def mark_synced(self, conversation: Conversation) -> None:
        """The newest version is on the medium: the one that was kept until then goes."""
        conversation.version.row = replace(conversation.version.row, synced=True)
        if conversation.fallback is not None:
            fallback, conversation.fallback = conversation.fallback, None
            self._unlink(fallback)

    def lease(self, version: Version) -> None:
        """Keep a version's blocks."""
        version.leases += 1
        self.leases += 1

    def release(self, version: Version) -> None:
        """Undo one `lease`; the last one frees what was unlinked meanwhile."""
        version.leases -= 1
        self.leases -= 1
        if version.leases == 0 and not version.linked:
            self._free(version)

    def least_recently_used(self) -> list[Conversation]:
        """The conversations, the least recently used first."""
        return sorted(self.conversations.values(), key=lambda conversation: conversation.used)

    def _enter(self, conversation: Conversation) -> None:
        self.conversations[conversation.name] = conversation
        self.namespaces.setdefault(conversation.namespace, {})[conversation] = None
        self.index.add(conversation.version.row.hashes, conversation)

    def _link(self, version: Version) -> None:
        self.blocks.hold(version.extents)
        self.records.hold(version.records)
        version.linked = True

    def _unlink(self, version: Version) -> None:
        version.linked = False
        if version.leases == 0:
            self._free(version)

    def _free(self, version: Version) -> None:
        self.blocks.release(version.extents)
        self.records.release(version.records)


def _common_blocks(former: VersionRow, row: VersionRow) -> int:
    length = min(len(former.hashes), len(row.hashes))
    differing = (former.hashes[:length] != row.hashes[:length]).nonzero()[0]
    return int(differing[0]) if len(differing) else length
