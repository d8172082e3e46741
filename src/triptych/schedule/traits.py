"""What each schedule asks for: chunks, placement, micro-batches, split backwards. One table.

Generators, the rules of plans, the cost model and the search all ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import Problem, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a schedule asks for.

    It needs `microbatches_per_rank` x p + `more_microbatches` micro-batches on p pipeline ranks.
    """

    least_chunks: int = 1  # stages that a rank runs
    most_chunks: int | None = 1  # None: any number
    is_v_shaped: bool = False  # rank r runs stages r and 2p-1-r; otherwise r, p+r, 2p+r, ...
    microbatches_per_rank: int = 0
    more_microbatches: int = 1
    runs_in_order: bool = False  # all micro-batches pass a stage before its rank runs the next one
    splits_backward: bool = False  # some backwards are an I and a W
    validates_late: bool = False  # the optimizer does not wait for the norm: see `validation.py`
    fallback: str = ""  # the schedule to take where this one cannot be

    def least_microbatches(self, num_ranks: int) -> int:
        """The fewest micro-batches on so many pipeline ranks."""
        return self.microbatches_per_rank * num_ranks + self.more_microbatches

    def allows(self, num_ranks: int, num_microbatches: int, chunks: int) -> bool:
        """True if the schedule has a program of this size."""
        enough = num_microbatches >= max(1, self.least_microbatches(num_ranks))
        return num_ranks >= 1 and enough and self.allows_chunks(chunks)

    def allows_chunks(self, chunks: int) -> bool:
        """True if a rank may run so many stages."""
        return self.least_chunks <= chunks and (
            self.most_chunks is None or chunks <= self.most_chunks
        )

    def chunks_in_words(self) -> str:
        """`chunks=2`, `chunks=2 or more`."""
        return f"chunks={self.least_chunks}" + ("" if self.most_chunks else " or more")

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """The pipeline rank of each stage: loop 0 1 2 0 1 2, or V 0 1 2 2 1 0."""
        loop = tuple(range(num_ranks))
        return loop + loop[::-1] if self.is_v_shaped else loop * chunks


TRAITS: dict[str, Traits] = {
    "gpipe": Traits(runs_in_order=True),
    "1f1b": Traits(),
    "interleaved": Traits(least_chunks=2, most_chunks=None, fallback="1f1b"),
    "breadth-first": Traits(least_chunks=2, most_chunks=None, runs_in_order=True, fallback="gpipe"),
    "zb-h1": Traits(splits_backward=True),
    "zb-h2": Traits(
        splits_backward=True,
        validates_late=True,
        microbatches_per_rank=2,
        more_microbatches=-1,
        fallback="zb-h1",
    ),
    "zb-v": Traits(
        splits_backward=True,
        validates_late=True,
        least_chunks=2,
        most_chunks=2,
        is_v_shaped=True,
        fallback="zb-h1",
    ),
    "dualpipe-v": Traits(
        splits_backward=True,
        least_chunks=2,
        most_chunks=2,
        is_v_shaped=True,
        microbatches_per_rank=2,
        more_microbatches=0,
        fallback="zb-v",
    ),
    "zb-auto": Traits(splits_backward=True),
}

SCHEDULES: tuple[str, ...] = tuple(TRAITS)


def broken_rules(
    name: str, num_ranks: int, num_microbatches: int, chunks: int
) -> Iterator[Problem]:
    """Every rule that a size breaks, with what works; nothing if there is such a program."""
    if name not in TRAITS:
        close = nearest(name, SCHEDULES) or SCHEDULES
        known = "schedules are " + ", ".join(SCHEDULES)
        yield Problem(f"schedule '{name}' is unknown", known, " or ".join(close))
    for what, count in (
        ("pipeline ranks", num_ranks),
        ("micro-batches", num_microbatches),
        ("chunks", chunks),
    ):
        if count < 1:
            yield Problem(f"{what}: {count}", "at least 1", "1 or more")
    if name in TRAITS and min(num_ranks, num_microbatches, chunks) >= 1:
        if problem := chunks_problem(name, chunks):
            yield problem
        if problem := microbatches_problem(name, num_ranks, num_microbatches):
            yield problem


def chunks_problem(name: str, chunks: int) -> Problem | None:
    """What is wrong with so many stages on a rank, if anything."""
    traits = TRAITS[name]
    if traits.allows_chunks(chunks):
        return None
    others = [other for other, their in TRAITS.items() if their.allows_chunks(chunks)]
    many = traits.most_chunks is None
    runs = f"at least {traits.least_chunks}" if many else str(traits.least_chunks)
    stages = "stage" if traits.least_chunks == 1 else "stages"
    return Problem(
        f"chunks={chunks} with schedule={name}",
        f"each pipeline rank runs {runs} {stages} (chunks) under {name}",
        f"{traits.chunks_in_words()}, or schedule in {', '.join(others)}",
    )


def microbatches_problem(name: str, num_ranks: int, num_microbatches: int) -> Problem | None:
    """What is wrong with so few micro-batches, if anything."""
    traits = TRAITS[name]
    least = traits.least_microbatches(num_ranks)
    if num_microbatches >= least:
        return None
    more = traits.more_microbatches
    sum_ = f"{traits.microbatches_per_rank}p" + (f"{more:+d}".replace("-", " - ") if more else "")
    ranks = (num_microbatches - more) // traits.microbatches_per_rank
    works = [f"{least} micro-batches or more"]
    works += [f"at most {ranks} pipeline ranks"] if ranks >= 1 else []
    return Problem(
        f"{num_microbatches} micro-batches on {num_ranks} pipeline ranks with schedule={name}",
        f"{name} needs {sum_} micro-batches on p pipeline ranks, {least} here",
        " or ".join([*works, f"schedule={traits.fallback}"]),
    )
