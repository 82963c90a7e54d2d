"""What the data page draws besides pictures: how figures are distributed, and how many images each class has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from train.charts import LOG_FROM, Axis, as_percent, grid, linear_axis, log_axis, number
from train.doctor import Spread
from train.split import SPLITS, Split


def histogram(title: str, spread: Spread) -> Markup:
    """A `<figure>` with a bar for each bin; positions are percentages, so that it stretches and its text does not."""
    if spread.least == spread.most:
        return Markup(
            '<figure class="chart"><figcaption><b>{}</b></figcaption><p>{} in all images.</p></figure>'
        ).format(title, number(spread.most))
    across = _axis_between(spread.edges[0], spread.edges[-1])
    scale = linear_axis(0, max(spread.counts))
    up = replace(scale, ticks=[tick for tick in scale.ticks if tick % 1 == 0])
    bars = Markup().join(
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{} to {}: {}</title></rect>').format(
            as_percent(across.place(low)),
            as_percent(1 - up.place(count)),
            as_percent(across.place(high) - across.place(low)),
            as_percent(up.place(count)),
            *map(number, (low, high, count)),
        )
        for low, high, count in zip(spread.edges, spread.edges[1:], spread.counts, strict=False)
    )
    summary = f"{title}: {number(spread.least)} to {number(spread.most)}, median {number(spread.median)}"
    return Markup(
        '<figure class="chart bars"><figcaption><b>{}</b>{}<output>median {}</output></figcaption>\n'
        '<svg role="img" aria-label="{}">{}{}</svg></figure>'
    ).format(
        title,
        Markup(" <small>log scale</small>") if across.log else "",
        number(spread.median),
        summary,
        grid(across, up),
        bars,
    )


def class_bars(counts: Mapping[Split, Mapping[str, int]], names: Sequence[str]) -> Markup:
    """A row for each of `names`: a bar of its images in each split, and how many they are."""
    totals = {name: sum(counts[split][name] for split in SPLITS) for name in names}
    longest = max(totals.values(), default=0) or 1
    row = Markup(
        '<div class="row"><span class="name">{}</span><span class="bar">{}</span><data>{}</data></div>'
    )
    part = Markup('<i class="{}" style="width:{}" title="{}: {}"></i>')
    return Markup("\n").join(
        row.format(
            name,
            Markup().join(
                part.format(
                    split, as_percent(counts[split][name] / longest), split, number(counts[split][name])
                )
                for split in SPLITS
            ),
            number(totals[name]),
        )
        for name in names
    )


def _axis_between(low: float, high: float) -> Axis:
    """From `low` to `high` exactly, with the round values between them marked."""
    log = high / low > LOG_FROM
    ticks = (log_axis if log else linear_axis)(low, high).ticks
    return Axis(low=low, high=high, ticks=[tick for tick in ticks if low <= tick <= high], log=log)
