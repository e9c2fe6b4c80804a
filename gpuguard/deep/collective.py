"""The child's all-reduce over several cards, against sums that are known exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from gpuguard.core.deep_pattern import WORD, Tag, describe
from gpuguard.deep import nccl
from gpuguard.deep.cuda_driver import DriverCuda
from gpuguard.deep.port import CudaError
from gpuguard.deep.transfer import Emit

_ENGINE = 200  # in the tag: no engine of the pairs has this number
_ROUNDS = 3  # the first one sets up NCCL's connections
_SMALL = 4096  # another protocol of NCCL's: flags beside the data instead of whole buffers
_NEXT_RANK = Tag(1, 0, 0, 0).seed - Tag(0, 0, 0, 0).seed


def run_collective(uuids: Sequence[str], length: int, emit: Emit) -> None:
    """One communicator for each card, all-reduce, compare on every card; emits ``collective``."""
    try:
        emit("step", name="start", engine=None)
        library = nccl.load()
        cuda = DriverCuda()
        ordinals = [card.ordinal for card in cuda.cards() if card.uuid in uuids]
        emit("step", name="collective", engine=None)
        emit("collective", **_all_reduce(cuda, library, ordinals, length))
    except nccl.NcclMissingError as error:
        emit("collective", outcome="missing", detail=str(error))
    except (nccl.NcclError, CudaError) as error:
        emit("collective", outcome="error", detail=str(error))
    except (ImportError, RuntimeError, OSError) as error:
        # RuntimeError: what the bindings raise where there is no libcuda.so.1
        emit("collective", outcome="error", detail=f"CUDA cannot be used: {error}")


def _all_reduce(
    cuda: DriverCuda, library: ctypes.CDLL, cards: Sequence[int], length: int
) -> dict[str, str]:
    buffers = [
        (cuda.allocate(card, length), cuda.allocate(card, length), cuda.stream(card))
        for card in cards
    ]
    communicators = nccl.Communicators(library, cards)
    for number, size in enumerate([length] * _ROUNDS + [_SMALL]):
        seed, words = Tag(0, 0, _ENGINE, number).seed, size // WORD
        for rank, (card, (send, receive, _)) in enumerate(zip(cards, buffers, strict=True)):
            cuda.fill(card, send, size, seed + rank * _NEXT_RANK)
            cuda.spread(card, receive, size, Tag(0, 0, _ENGINE, number).poison)
        communicators.all_reduce(buffers, words)
        for card, (_, receive, _) in zip(cards, buffers, strict=True):
            cuda.wait(card)
            found = cuda.answered(card, "compare_sum", receive, words, seed, _NEXT_RANK, len(cards))
            if found.first is not None and found.found is not None:
                kind = describe(found.found, Tag(0, 0, _ENGINE, number), found.first)
                detail = f"card {card}: {found.mismatches} of {words} words are wrong ({kind})"
                return {"outcome": "wrong-data", "detail": detail, "version": communicators.version}
    return {"outcome": "ok", "version": communicators.version}
