"""A picture of a predicted request, and the sliders that redraw it: model, dtype, machine, prompt and output length."""

from __future__ import annotations

import base64
import html
import io

import ipywidgets as widgets
from IPython.display import display
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from every_millisecond.notebook import plots, show
from llm_latency import hardware, roofline
from llm_latency.roofline import FORMATS, SHAPES, StagePrediction

HERE = "this machine"
SEEN_SHARE = 0.005  # a thinner piece cannot be seen, and is not in the legend
WIDGET = "application/vnd.jupyter.widget-view+json"
# None of them a stage's: the stages stand in the panel beside.
PART_COLOURS = dict(
    zip(roofline.PARTS, ("#000000", "#999999", "#CC79A7", "#F0E442", "#56B4E9", "#555555"), strict=True)
)
PART_HATCHES = dict(zip(roofline.PARTS, ("", "", "//", "xx", "", ".."), strict=True))


def predict(
    model: str,
    weights: str,
    machine: str,
    prompt_tokens: int,
    new_tokens: int,
    ceilings: hardware.Ceilings | None = None,
) -> dict[str, StagePrediction]:
    """Stages of a request on a GPU's datasheet peaks, or on this machine's ceilings for machine "this machine".

    Raises KeyError for an unknown model or machine, ValueError for an unknown dtype, sizes below 1, or "this machine"
    without its ceilings.
    """
    if machine == HERE:
        if ceilings is None:
            raise ValueError(f"{HERE!r} needs its measured ceilings: pass hardware.ceilings()")
        peak = roofline.measured_peak(ceilings, weights)
    else:
        peak = roofline.gpu_peak(machine, weights)
    return roofline.predict_request(model, peak, prompt_tokens=prompt_tokens, new_tokens=new_tokens, weights=weights)


def _spelt(name: str) -> str:
    """A model's or a format's name as it is written: Llama-2-7B, BF16."""
    for key, word in (("bfloat", "BF"), ("float", "FP"), ("int", "INT"), ("llama", "Llama"), ("smollm", "SmolLM"),
                      ("qwen", "Qwen")):  # fmt: skip
        if name.startswith(key):
            name = word + name.removeprefix(key)
            break
    return name[:-1] + name[-1].upper()


def memory_line(model: str, weights: str, machine: str, tokens: int) -> str:
    """Gigabytes of weights and cache, and whether a named GPU holds them."""
    cache = roofline.cache_bytes(model, tokens, cache=roofline.number_format(weights).compute)
    need = (roofline.parameter_bytes(model, weights) + cache) / 1e9
    if machine == HERE:
        return f"weights and cache: {need:.1f} GB"
    memory = hardware.datasheet_peak(machine).memory_gb
    return f"weights and cache: {need:.1f} GB, {'fits' if need < memory else 'DOES NOT FIT'} into {memory:.0f} GB"


def sentence(stages: dict[str, StagePrediction], new_tokens: int) -> str:
    """The picture in words, for those who cannot see it."""
    prefill, decode = stages["prefill"], stages["decode"]
    words = f"prefill {prefill.ms:,.1f} ms, {prefill.bound}-bound"
    if new_tokens > 1:
        each = decode.ms / (new_tokens - 1)
        words += f"; decode {decode.ms:,.1f} ms, {each:,.2f} ms a token, {decode.bound}-bound"
    return words


def picture(
    model: str = "llama-2-7b",
    weights: str = "bfloat16",
    machine: str = "A100-80GB-SXM",
    prompt_tokens: int = 256,
    new_tokens: int = 50,
    ceilings: hardware.Ceilings | None = None,
) -> Figure:
    """Both stages in ms with the bound of each, and the parts that make them up. Errors as `predict`."""
    stages = predict(model, weights, machine, prompt_tokens, new_tokens, ceilings)
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=(3, 2))
    longest, seen = max(stage.ms for stage in stages.values()), set()
    for row, (name, stage) in enumerate(stages.items()):
        colour, hatch = plots.STAGE_COLOURS[name], plots.STAGE_HATCHES[name]
        left.barh(row, stage.ms, color=colour, hatch=hatch, edgecolor="white", height=0.6)
        label = f"{stage.ms:,.1f} ms, {stage.bound}-bound" if stage.ms else "no decode step"
        left.text(0, row - 0.42, label, va="bottom", fontweight="bold")
        start = 0.0
        for part in stage.parts if stage.ms else ():
            share = part.ms / stage.ms
            colour, hatch = PART_COLOURS[part.name], PART_HATCHES[part.name]
            name_of_part = part.name.replace("ffn", "FFN")
            label = name_of_part if row == len(stages) - 1 or not stages["decode"].ms else None
            if share >= SEEN_SHARE:
                seen.add(name_of_part)
            right.barh(row, share, left=start, color=colour, hatch=hatch, edgecolor="white", height=0.6, label=label)
            if share > 0.12:
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
                if share < 0.25:
                    name_of_part = name_of_part.replace("projections", "projec-\ntions")
                right.text(start + share / 2, row, name_of_part, ha="center", va="center", fontsize=9, bbox=box)
            start += share
    for ax in (left, right):
        ax.set_yticks(range(len(stages)), list(stages))
        ax.set_ylim(1.5, -0.6)
        ax.grid(axis="y", visible=False)
    left.set_xlim(0, longest * 1.05)
    left.set_xlabel(f"predicted time (ms)\n{memory_line(model, weights, machine, prompt_tokens + new_tokens)}")
    right.set_xlim(0, 1)
    right.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}")
    right.set_xlabel("share of the stage (%)")
    left.set_title(f"{_spelt(model)}, {_spelt(weights)}, {machine}: {prompt_tokens:,} in, {new_tokens:,} out")
    handles = [patch for patch in right.containers if patch.get_label() in seen]
    fig.legend(handles, [patch.get_label() for patch in handles], ncols=6, loc="outside lower right", fontsize=9)
    right.set_title("What each stage is made of")
    return fig


def _image(fig: Figure, alt: str) -> str:
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    plt.close(fig)
    png = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}" style="max-width: 100%">'


def controls(ceilings: hardware.Ceilings | None = None) -> widgets.VBox:
    """The sliders with their picture. What cannot be predicted shows its reason in place of the picture."""
    machines = [*hardware.DATASHEET, HERE] if ceilings else list(hardware.DATASHEET)
    choices = {
        "model": widgets.Dropdown(options=list(SHAPES), value="llama-2-7b", description="model"),
        "weights": widgets.Dropdown(options=list(FORMATS), value="bfloat16", description="weights"),
        "machine": widgets.Dropdown(options=machines, value="A100-80GB-SXM", description="machine"),
        "prompt_tokens": widgets.IntSlider(256, 1, 8192, description="prompt", continuous_update=False),
        "new_tokens": widgets.IntSlider(50, 1, 2048, description="answer", continuous_update=False),
    }
    place = widgets.HTML()

    def redraw(_: object = None) -> None:
        options = {name: control.value for name, control in choices.items()} | {"ceilings": ceilings}
        try:
            alt = sentence(predict(**options), options["new_tokens"])
            place.value = _image(picture(**options), alt) + f"<p>{html.escape(alt)}</p>"
        except ValueError as error:  # such as FP16 on a CPU: no ceiling was measured for it
            place.value = f"<p>{html.escape(str(error))}</p>"

    for control in choices.values():
        control.observe(redraw, names="value")
    redraw()
    first, second = list(choices.values())[:3], list(choices.values())[3:]
    return widgets.VBox([widgets.HBox(first), widgets.HBox(second), place])


def explore(ceilings: hardware.Ceilings | None = None) -> None:
    """Show the picture, which needs no kernel, and under it the sliders, which do.

    ceilings: this machine's, to be one of the choices.
    """
    alt = "Two bars for a 7B model on one A100: decode takes far longer than prefill. The FFN is most of both."
    show.figure(picture(), alt=alt)
    view = {"version_major": 2, "version_minor": 0, "model_id": controls(ceilings).model_id}
    display({WIDGET: view, "text/plain": "[sliders] run this cell to move them"}, raw=True)
