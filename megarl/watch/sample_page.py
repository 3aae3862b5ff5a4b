"""The samples panel of the report page: filters, sorts and compares responses in the browser.

A model wrote the texts, so they never become HTML. They are embedded as JSON in which no tag can begin, and
are shown as text nodes. The page's content security policy allows this one script and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.observe.sample_files import (
    DIRECTORY,
    TRAIN,
    UNSAFE,
    VALIDATION,
    Sample,
    list_samples,
    read_samples,
    shorten,
)

logger = logging.getLogger(__name__)

_MOST_STEPS = 12
_MOST_BYTES = 3 * 2**20
# Limits that keep the page small: steps and bytes per kind of samples, and characters per text.
_MOST_CHARACTERS = 6000

_LEFT_OUT = ("prompt_ids", "answer_ids")
_TEXTS = ("prompt", "answer", "reference")

STYLE = """
.samples { margin-top: 16px; }
.samples .bar { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; font-size: 13px;
  margin: 8px 0 12px; }
.samples select, .samples input, .samples button { font: inherit; padding: 2px 6px; max-width: 100%; }
.samples .note, .samples .place { color: var(--muted); font-size: 13px; margin: 0 0 8px; }
.samples .sample { border-top: 1px solid var(--line); padding: 10px 0; }
.samples .text { white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: plaintext; margin: 4px 0; max-height: 420px; overflow-y: auto; }
.samples .prompt { color: var(--muted); border-left: 3px solid var(--line); padding-left: 10px; }
.samples summary { color: var(--muted); cursor: pointer; font-size: 13px; }
.samples .answer { background: var(--page); border-radius: 6px; padding: 8px 10px; }
.samples .pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 14px; }
@media (max-width: 480px) { .samples .pair { grid-template-columns: minmax(0, 1fr); } }
.samples .figures span { display: inline-block;
  background: var(--inset); border-radius: 4px; padding: 0 7px; margin: 0 6px 4px 0; font-size: 13px; }
.samples .figures .bad { background: var(--bad-page); color: var(--bad); }
"""

_SCRIPT = r"""
(() => {
"use strict";
const data = JSON.parse(document.getElementById("samples-data").textContent);
const root = document.getElementById("samples");
const controls = "\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff";
const unsafe = new RegExp("[" + controls + "\ud800-\udfff]", "gu");
const visible = text => text.replace(unsafe, one => "\\u" + one.codePointAt(0).toString(16).padStart(4, "0"));
const make = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = visible(String(text));
  return made;
};
const known = value => value !== null && value !== undefined;
const number = value => {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : NaN;
};
const short = value => {
  if (!known(value)) return "none";
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(4)));
  return String(value);
};

// the rule of megarl samples --grep
const contains = (said, text) => said.toUpperCase().includes(text.toUpperCase());
const holds = (row, text) => [row.prompt, row.answer].some(said => contains(said, text));
const matches = (row, wanted) =>
  (!wanted.text || holds(row, wanted.text)) &&
  (!wanted.set || row.set === wanted.set) &&
  (!wanted.only || row[wanted.only] === true);
const by = (key, sign) => (one, other) => {
  const [a, b] = [number(key(one)), number(key(other))];
  if (Number.isNaN(a) || Number.isNaN(b)) return Number(Number.isNaN(a)) - Number(Number.isNaN(b));
  return a === b ? 0 : sign * (a < b ? -1 : 1);
};
const reward = row => row.masked === true ? NaN : row.reward;
const orders = {worst: by(reward, 1), best: by(reward, -1), longest: by(row => row.length, -1)};
const choose = (rows, wanted) => {
  const byReward = wanted.order === "worst" || wanted.order === "best";
  const kept = rows.filter(row => matches(row, wanted) && !(byReward && row.masked === true));
  return wanted.order ? kept.sort(orders[wanted.order]) : kept;
};
const shared = row =>
  JSON.stringify([row.set ?? null, row.record ?? null, row.prompt, row.generation ?? null]);
const byIdentity = rows => {
  const seen = new Map(), found = new Map();
  for (const row of rows) {
    const name = shared(row), before = seen.get(name) || 0;
    seen.set(name, before + 1);
    found.set(name + " " + before, row);
  }
  return found;
};
const paired = (rows, others) => {
  const theirs = byIdentity(others), found = new Map();
  for (const [name, row] of byIdentity(rows)) if (theirs.has(name)) found.set(row, theirs.get(name));
  return found;
};

const figures = row => {
  const line = make("div", "figures");
  const shown = {};
  for (const name of ["reward", "accuracy", "advantage", "mismatch"]) {
    if (name === "reward" || known(row[name])) shown[name] = row[name];
  }
  for (const [name, value] of Object.entries(row.rewards || {})) shown["part " + name] = value;
  for (const [name, value] of Object.entries(shown)) line.append(make("span", "", name + " " + short(value)));
  line.append(make("span", "", row.length + " tokens"));
  if (Array.isArray(row.turns)) {
    const responses = row.turns.filter(turn => turn.role !== "environment").length;
    line.append(make("span", row.ended === "done" ? "" : "bad", responses + " turns, " + row.ended));
  }
  const versions = [...new Set([row.weight_version, row.newest_weight_version].filter(known))];
  if (versions.length) line.append(make("span", "", "weights " + versions.join(" to ")));
  for (const name of ["truncated", "masked"]) if (row[name] === true) line.append(make("span", "bad", name));
  if (typeof row.reference === "string") line.append(make("span", "", "reference " + row.reference));
  return line;
};
const place = row => [
  row.set ? "set " + row.set : "",
  "prompt " + row.record + " of " + (row.source ?? "the data"),
  row.env ? "environment " + row.env : "",
  "response " + row.generation,
].filter(Boolean).join(", ");
const answer = (row, title) => {
  const part = make("div");
  if (title) part.append(make("strong", "", title));
  part.append(figures(row));
  if (!Array.isArray(row.turns)) {
    part.append(make("div", "text answer", row.answer));
    return part;
  }
  for (const turn of row.turns) {
    if (turn.role !== "environment") {
      part.append(make("div", "text answer", turn.text));
      if (turn.reward) {
        const line = make("div", "figures");
        line.append(make("span", "", "reward " + short(turn.reward)));
        part.append(line);
      }
      continue;
    }
    const folded = make("details");
    const first = turn.text.trim().slice(0, 80);
    const from = known(turn.segment) ? "environment, segment " + turn.segment + ": " : "environment: ";
    folded.append(make("summary", "", from + first + (turn.text.trim().length > 80 ? "..." : "")));
    folded.append(make("div", "text prompt", turn.text));
    part.append(folded);
  }
  return part;
};
const sample = (row, other, steps) => {
  const card = make("div", "sample");
  card.append(make("p", "place", place(row)), make("div", "text prompt", row.prompt));
  if (!other) {
    card.append(answer(row));
    return card;
  }
  const pair = make("div", "pair");
  const sides = [[steps[0], row], [steps[1], other]].sort((a, b) => a[0] - b[0]);
  for (const [step, side] of sides) pair.append(answer(side, "step " + step));
  card.append(pair);
  return card;
};

const bar = make("div", "bar"), note = make("p", "note"), list = make("div");
const more = make("button", "", "show more");
const option = (value, text) => { const made = make("option", "", text); made.value = value; return made; };
const field = (title, input) => {
  const label = make("label", "", title + " ");
  label.append(input);
  bar.append(label);
  return input;
};
const select = (title, options) => {
  const made = make("select");
  made.append(...options);
  return field(title, made);
};
const kinds = Object.keys(data);
const kind = select("samples of", kinds.map(name => option(name, name)));
const step = select("step", []), against = select("compare with step", []);
const set = select("set", []);
const named = name => option(name, name);
const order = select("order", [option("", "as sampled"), ...Object.keys(orders).map(named)]);
const only = select("only", [option("", "all"), named("truncated"), named("masked")]);
const text = field("with the text", make("input"));
text.type = "search";
text.title = "In prompt or response, ignoring case, as megarl samples --grep; "
  + "the page omits the middle of long texts.";
let limit = 20;

const refill = () => {
  const {steps} = data[kind.value];
  const names = Object.keys(steps).map(Number).sort((a, b) => a - b);
  step.replaceChildren(...names.map(name => option(name, name)));
  step.value = String(names[names.length - 1]);
  against.replaceChildren(option("", "none"), ...names.map(name => option(name, name)));
  const all = Object.values(steps).flat().map(row => row.set);
  const sets = [...new Set(all.filter(name => typeof name === "string"))];
  set.replaceChildren(option("", "all"), ...sets.map(name => option(name, name)));
  set.parentElement.hidden = sets.length === 0;
};
const draw = () => {
  const {steps, written} = data[kind.value];
  const wanted = {text: text.value, set: set.value, order: order.value, only: only.value};
  let rows = choose(steps[step.value].slice(), wanted);
  const ordered = rows.length;
  let others = null;
  if (against.value) {
    others = paired(steps[step.value], steps[against.value]);
    rows = rows.filter(row => others.has(row));
  }
  const pair = [Number(step.value), Number(against.value)];
  list.replaceChildren(...rows.slice(0, limit).map(row => sample(row, others && others.get(row), pair)));
  more.hidden = rows.length <= limit;
  const count = Object.keys(steps).length;
  const here = steps[step.value].length, there = data[kind.value].rows[step.value];
  const notes = [`${rows.length} of ${here} samples.`];
  const unordered = choose(steps[step.value].slice(), {...wanted, order: ""}).length - ordered;
  if (unordered) notes.push(`${unordered} more are masked, without a reward to be ordered by.`);
  if (others && !rows.length) notes.push("The two steps have no prompt in common.");
  if (here < there) notes.push(`Of this step the page has the first ${here} of ${there} samples.`);
  if (count < written) notes.push(`The page has ${count} of ${written} steps; megarl samples shows all.`);
  note.textContent = notes.join(" ");
};
kind.addEventListener("change", () => { refill(); limit = 20; draw(); });
for (const input of [step, against, set, order, only, text]) {
  input.addEventListener("input", () => { limit = 20; draw(); });
}
more.addEventListener("click", () => { limit += 20; draw(); });
root.append(bar, note, list, more);
refill();
draw();
})();
"""


def content_policy(with_samples: bool) -> str:
    """Return the content security policy of a page. It allows inline styles and, with samples, only the
    panel's script, identified by its hash."""
    script = (
        f" script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}';"
        if with_samples
        else ""
    )
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:;{script}"


def samples_panel(run_dir: Path) -> str:
    """Return the HTML of the samples panel; empty for a run without samples. A long run's panel contains only
    some steps."""
    try:
        data = {}
        for kind in (TRAIN, VALIDATION):
            samples = _of_kind(run_dir / DIRECTORY, kind)
            if samples is not None:
                data[kind] = samples
    except OSError as error:
        logger.warning("samples are not in the page: %s", error)
        return ""
    if not data:
        return ""
    # JSON in a script element of another type is data: the browser does not execute it.
    return (
        '<section class="card samples" id="samples"><h2>Samples</h2></section>\n'
        f'<script type="application/json" id="samples-data">{_json(data)}</script>\n'
        f"<script>{_SCRIPT}</script>\n"
    )


def _of_kind(directory: Path, kind: str) -> dict[str, object] | None:
    """Return the panel's data for one kind of samples: the samples of evenly spaced steps, and the total
    numbers of steps and samples. None if there are none."""
    files = list_samples(directory, kind)
    if not files:
        return None
    read = {}
    for position in spread(len(files), _MOST_STEPS):
        step, path = files[position]
        rows = read_samples(path)
        if rows:
            read[step] = rows
    if not read:
        return None
    kept = {step: _within(rows, _MOST_BYTES // len(read)) for step, rows in read.items()}
    return {"written": len(files), "rows": {step: len(rows) for step, rows in read.items()}, "steps": kept}


def spread(count: int, most: int) -> list[int]:
    """Return up to ``most`` evenly spaced positions of [0, count), including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _within(rows: Sequence[Sample], most_bytes: int) -> list[dict[str, object]]:
    """Return the first samples that fit into ``most_bytes``, at least one, without the fields that the panel
    does not show."""
    kept: list[dict[str, object]] = []
    for row in rows:
        shown = {name: value for name, value in row.items() if name not in _LEFT_OUT}
        for name in _TEXTS:
            if isinstance(text := row.get(name), str):
                shown[name] = shorten(text, _MOST_CHARACTERS)
        if isinstance(row.get("turns"), list):
            shown["turns"] = [
                {**turn, "text": shorten(turn["text"], _MOST_CHARACTERS)}
                for turn in row["turns"]
                if isinstance(turn, dict) and isinstance(turn.get("text"), str)
            ]
        try:
            most_bytes -= len(json.dumps(shown, ensure_ascii=False, allow_nan=False))
        except ValueError:
            # A user has edited the file: the number is infinite.
            continue
        # Keep the first sample even if it alone exceeds the limit: an empty panel would look like missing
        # data.
        if most_bytes < 0 and kept:
            break
        kept.append(shown)
    return kept


def _json(data: Any) -> str:
    """Encode data as JSON that cannot close the surrounding script element."""
    text = UNSAFE.sub(
        lambda match: f"\\u{ord(match[0]):04x}", json.dumps(data, ensure_ascii=False, allow_nan=False)
    )
    # A browser does not parse strings inside a script element, so ``</script`` would end it anywhere.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
