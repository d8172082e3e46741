"""How long a request that arrives now will wait: by what recent steps got through.

    W x throughput = work ahead of it + its own + what will overtake it within W

Work is counted in prompt tokens and in requests started; the longer of the two waits is taken.
Requests of a shorter lead (due time less arrival) that arrive after it overtake it for as long as
the difference of the leads; they are assumed to go on arriving as they did.
"""

from __future__ import annotations

import math

ANSWERS = 100
"""Answers after which half of what was seen is forgotten."""

GAIN, SELDOM = 0.1, 0.95


class Recent:
    """Amounts that fade: after `half_life_s`, half of each is forgotten."""

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self.span_s = self.tokens = self.starts = 0.0

    def note(self, duration_s: float, tokens: int, starts: int) -> None:
        """Lets `duration_s` pass, at the end of which something happens."""
        kept, self.span_s = self._faded(duration_s)
        self.tokens = self.tokens * kept + tokens
        self.starts = self.starts * kept + starts

    def rates(self, idle_s: float = 0.0) -> tuple[float, float]:
        """Tokens and starts a second, `idle_s` after the last note; 0 if nothing is known."""
        kept, span_s = self._faded(idle_s)
        return (self.tokens * kept / span_s, self.starts * kept / span_s) if span_s else (0.0, 0.0)

    def _faded(self, duration_s: float) -> tuple[float, float]:
        """What is kept of amounts, and the span: it fades like them, so ratios are averages."""
        kept = 0.5 ** (duration_s / self.half_life_s)
        return kept, self.span_s * kept + (1 - kept) * self.half_life_s / math.log(2)


class Lately:
    """Two sums that fade together; their ratio is what counts. Both are `start` at first."""

    def __init__(self, start: float) -> None:
        self._found = self._expected = start
        self._kept = 0.5 ** (1 / ANSWERS)

    def note(self, found: float, expected: float) -> None:
        """Takes in another one."""
        self._found = self._found * self._kept + found
        self._expected = self._expected * self._kept + expected

    @property
    def ratio(self) -> float:
        """What was found over what was expected."""
        return self._found / self._expected


class Errors:
    """By how much longer a wait may be than foreseen.

    An expectile (asymmetric least squares, Newey and Powell 1987): errors above it weigh nineteen
    times as much as those below, so it rises within a few and falls within a hundred.
    """

    def __init__(self) -> None:
        self.most_s = 0.0

    def note(self, foreseen_s: float, waited_s: float) -> None:
        """Takes in what became of a prediction."""
        apart_s = waited_s - foreseen_s - self.most_s
        self.most_s += GAIN * (SELDOM if apart_s > 0 else 1 - SELDOM) * apart_s


class Forecast:
    """Throughput of full steps, and arrivals by lead.

    Arrivals are remembered for longer: who is admitted now decides who is refused a lead later, and
    a memory shorter than that would swing between admitting all of one class and none.
    """

    def __init__(self, half_life_s: float = 5.0, arrivals_half_life_s: float = 30.0) -> None:
        self.arrivals_half_life_s = arrivals_half_life_s
        self.step_s = 0.0  # the last step's
        self.errors = Errors()
        self._done = Recent(half_life_s)
        self._arrived: dict[float, tuple[Recent, float]] = {}  # and when it was last noted

    def completed(self, duration_s: float, tokens: int, starts: int, is_saturated: bool) -> None:
        """Takes in a step; only one without room for more shows how much can be done."""
        self.step_s = duration_s
        if is_saturated:
            self._done.note(duration_s, tokens, starts)

    def arrived(self, lead_s: float, tokens: int, now_s: float) -> None:
        """Takes in a request that was admitted."""
        recent, last_s = self._arrived.get(lead_s, (Recent(self.arrivals_half_life_s), now_s))
        recent.note(max(0.0, now_s - last_s), tokens, 1)
        self._arrived[lead_s] = (recent, max(now_s, last_s))

    def wait_s(
        self, tokens: int, starts: int, lead_s: float, num_in_flight: int, now_s: float
    ) -> float:
        """Seconds until so much work ahead, its own included, is done.

        Before any throughput is known, only steps in flight count.
        """
        overtaking = [
            (lead_s - lead, recent.rates(now_s - last_s))
            for lead, (recent, last_s) in self._arrived.items()
            if lead < lead_s
        ]
        waits = (
            _solve(work, rate, [(ends_s, rates[which]) for ends_s, rates in overtaking])
            for which, (work, rate) in enumerate(
                zip((tokens, starts), self._done.rates(), strict=True)
            )
            if rate > 0
        )
        return num_in_flight * self.step_s + max(waits, default=0.0)


def _solve(work: float, rate: float, overtaking: list[tuple[float, float]]) -> float:
    """The least W with W x rate = work + overtaking within W.

    Each overtaker takes its part of the rate until its end, so what is left of the work is a line
    in pieces.
    """
    at_s, left, taken = 0.0, work, sum(part for _, part in overtaking)
    for ends_s, part in sorted(overtaking):
        speed = rate - taken
        if speed > 0 and left <= speed * (ends_s - at_s):
            break
        left -= speed * (ends_s - at_s)
        at_s, taken = ends_s, taken - part
    return at_s + left / (rate - taken)
