"""Before each graph: do all ranks run the same one? A branch taken by some ranks only would otherwise exchange wrong weights in
silence, because collectives are matched by their order and nothing else.

Three integers of each rank, gathered on the CPU: the hash of what the graph is about to communicate, and two offers (`early`).
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import re

import torch
import torch.distributed as dist

from .agree import RankMismatch, agree
from .communicator import control_group

_EAGER = re.compile(r"^ *rank \d+: eager$", re.MULTILINE)
_HINT = (
    "\nOne rank runs code eagerly that the other runs compiled: perhaps Dynamo has reached config.recompile_limit there and not here (it "
    "has warned then; graphs for other sizes and for no_grad count): torch.compile(..., recompile_limit=64)"
)


@functools.lru_cache(maxsize=4096)
def fingerprint(lines: tuple[str, ...]) -> int:
    """``lines`` as a 63-bit integer."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 1


def same_on_all_ranks(
    group: dist.ProcessGroup, title: str, lines: tuple[str, ...], timeout_s: float, offers: tuple[int, int] = (0, 0)
) -> tuple[bool, ...]:
    """Compare ``lines`` (what this rank is about to communicate over ``group``) with the other ranks'. ``title`` is for messages.

    ``offers`` may differ between ranks (see `early`): returns for each whether all ranks made the same, other than 0.

    Raises `RankMismatch` on every rank if they differ, or if a rank does not come within ``timeout_s`` seconds or the group's own
    timeout; RuntimeError, naming the first collective, if a peer has died."""
    control = control_group(group)
    if control is None:
        return False, False
    mine = torch.tensor([fingerprint(lines), *offers])
    everyone = mine.new_empty(group.size(), len(mine))
    try:
        work = dist.all_gather(list(everyone), mine, group=control, async_op=True)
        work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as e:
        raise _lost(group, title, lines, timeout_s, e) from e
    alike = (everyone == everyone[0]).all(0).tolist()
    if not alike[0]:
        try:
            agree(control, "graph", [title.split(" ")[0], *lines], timeout_s)  # raises, with the first difference
        except RankMismatch as e:
            raise RankMismatch(f"{e}{_HINT if _EAGER.search(str(e)) else ''}") from e.__cause__
    return tuple(same and offer != 0 for same, offer in zip(alike[1:], offers))


def _lost(group: dist.ProcessGroup, title: str, lines: tuple[str, ...], timeout_s: float, e: RuntimeError) -> RuntimeError:
    said = str(e).lower()
    if "timed out" in said or "timeout" in said:
        return RankMismatch(
            f"{title}: not every rank of group {group.group_name!r} came to this point within {timeout_s:g} s (option timeout_s) or "
            "the process group's own timeout: a rank hangs, runs other code, or is still compiling. "
            f"This is rank {group.rank()}, before {lines[0]}"
        )
    return RuntimeError(f"{title}: a peer has died or closed its connection, before {lines[0]}: {e}")
