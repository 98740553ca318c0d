"""A simulated step as text: what took how long, what is exposed and why, and the lanes over time."""

from __future__ import annotations

from fsdp_compile.passes.simulate import WHY, Span, Timeline
from fsdp_compile.text import human_bytes

WIDTH = 96  # columns of a lane
MOST_ROWS = 16  # exposed buckets shown
_MARKS = {"kernel": "=", "optimizer": "o", "all_gather": ">", "reduce_scatter": "<", "all_to_all": "<"}
LEGEND = "= compute   o optimizer   > all_gather   < reduction   0-9 gathered bytes in tenths of the peak (. none)"


def draw(timeline: Timeline, width: int = WIDTH) -> str:
    """The whole text, ``width`` columns for each lane::

        step 12.40 ms on H100: forward 4.10 ms, backward 8.10 ms, optimizer 200.0 us
          compute       11.10 ms busy, 90% of the step
          …
        compute   |    ====  ========|
        comm fsdp |>>>>  >>>>  <<<<  |
        gathered  |455599995555222...|
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    lines = [*_summary(timeline), "", *_exposed(timeline), *_lanes(timeline, width), LEGEND]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def duration(seconds: float) -> str:
    """``0.0123`` → ``"12.30 ms"``, ``2e-5`` → ``"20.0 us"``."""
    return f"{1e6 * seconds:.1f} us" if 0 < seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


def _summary(t: Timeline) -> list[str]:
    step = t.step or 1.0
    parts = ", ".join(f"{name} {duration(getattr(t, name))}" for name in ("forward", "backward", "optimizer"))
    rows = {
        "compute": f"{duration(t.compute_busy)} busy, {t.compute_busy / step:.0%} of the step",
        "communication": f"{duration(t.comm_busy)} busy, {duration(t.exposed_seconds)} of it exposed "
        f"({t.exposed_seconds / step:.0%} of the step)",
        "peak gathered": f"{human_bytes(t.peak_gathered_bytes)}, at {duration(t.peak_at)}",
    }
    return [f"step {duration(t.step)} on {t.machine}: {parts}", *(f"  {k:<14} {v}" for k, v in rows.items())]


def _exposed(t: Timeline) -> list[str]:
    if not t.exposed:
        return ["nothing is exposed: communication hides behind compute", ""]
    worst = sorted(t.exposed, key=lambda e: -e.seconds)
    lines = ["exposed, the longest first"]
    for e in worst[:MOST_ROWS]:
        lines.append(f"  {duration(e.seconds):>12}  {e.direction:<8}  {e.bucket:<6} {e.kind:<14} {e.why}")
    if len(worst) > MOST_ROWS:
        rest = sum(e.seconds for e in worst[MOST_ROWS:])
        lines.append(f"  {duration(rest):>12}  {len(worst) - MOST_ROWS} more")
    lines += [f"    {why}: {duration(s)}, {WHY[why]}" for why, s in t.exposed_by_reason.items()]
    return [*lines, ""]


def _lanes(t: Timeline, width: int) -> list[str]:
    names = ["compute", *dict.fromkeys(s.lane for s in t.spans if s.lane != "compute")]
    label = max(map(len, [*names, "gathered"]))
    lines = [f"{name:<{label}} |{_bar([s for s in t.spans if s.lane == name], t.step, width)}|" for name in names]
    if t.peak_gathered_bytes:
        lines.append(f"{'gathered':<{label}} |{_levels(t, width)}|")
    return [*lines, f"{'':<{label}}  0{duration(t.step):>{width - 1}}"]


def _bar(spans: list[Span], step: float, width: int) -> str:
    """Each column shows what takes most of its time, or nothing if that is idleness."""
    share: list[dict[str, float]] = [{} for _ in range(width)]
    column = step / width if step else 1.0
    for s in spans:
        mark = _MARKS[s.kind]
        for i in range(min(width - 1, int(s.start / column)), min(width - 1, int(s.end / column)) + 1):
            inside = min(s.end, (i + 1) * column) - max(s.start, i * column)
            share[i][mark] = share[i].get(mark, 0.0) + max(0.0, inside)
    return "".join(max(c, key=lambda m: c[m]) if c and sum(c.values()) >= column / 2 else " " for c in share)


def _levels(t: Timeline, width: int) -> str:
    """Most bytes alive in each column, in tenths of the peak."""
    column, peak = t.step / width if t.step else 1.0, t.peak_gathered_bytes
    out, at, alive = [], 0, 0
    for i in range(width):
        most = alive
        while at < len(t.gathered) and t.gathered[at][0] < (i + 1) * column:
            alive = t.gathered[at][1]
            most = max(most, alive)
            at += 1
        out.append("." if not most else str(min(9, most * 10 // peak)))
    return "".join(out)
