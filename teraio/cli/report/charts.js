// The data of the page, and charts over time: one window of time for all, things that can be chosen by pointer and keys.
// `tables.js` and `report.js` fill the page with them.
"use strict";

const report = JSON.parse(document.getElementById("report-data").textContent);
const timeline = report.facts.timeline;
const blocks = report.facts.blocks;
const NAMESPACE = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function html(name, attributes, parent, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// -- figures, as the command line writes them

function threeDigits(value) {
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

// In the first unit that the value has one of; null if it is smaller.
function inUnit(value, units) {
  const found = units.find(([, scale]) => value >= scale);
  return found ? `${threeDigits(value / found[1])} ${found[0]}` : null;
}

function bytes(size) {
  return inUnit(size, SIZES) || `${size.toFixed(0)} B`;
}

function seconds(time) {
  return inUnit(time, TIMES) || (time <= 0 ? "0 s" : `${(time / 1e-9).toFixed(0)} ns`);
}

// Round values for an axis, at most `count` steps.
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let number = Math.ceil(from / step); number * step <= to; number += 1) found.push(number * step);
  return found;
}

// Sizes for an axis, round in whatever unit they are written: three to six multiples of a power of two.
function sizeTicks(to) {
  const step = Math.max(2 ** Math.ceil(Math.log2(to / 6)), 1);
  return Array.from({ length: Math.floor(to / step) }, (_, index) => (index + 1) * step);
}

// The longest name that there is room for (the shortest is the last), or the begin of that.
function fitting(names, width) {
  const room = Math.floor((width - 6) / 6.6);
  return names.find((name) => name.length <= room) || (room >= 6 ? `${names[names.length - 1].slice(0, room - 1)}…` : "");
}

// -- the window of time that all charts show

const whole = timeline ? Math.max(timeline.seconds, timeline.unplanned.seconds) : 1;
const view = { from: 0, to: whole };
const charts = [];

function show(from, to) {
  const span = Math.min(Math.max(to - from, whole / 5000), whole);
  view.from = Math.min(Math.max(from, 0), whole - span);
  view.to = view.from + span;
  for (const chart of charts) chart.draw();
  const shown = document.getElementById("window");
  if (shown) shown.textContent = `${seconds(view.from)} to ${seconds(view.to)} of ${seconds(whole)}`;
}

function zoom(factor, around = (view.from + view.to) / 2) {
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function pan(share) {
  const shift = share * (view.to - view.from);
  show(view.from + shift, view.to + shift);
}

// -- what is chosen: what is pointed at, until something is pinned; of a pinned block, all copies are marked

const choice = { chart: null, index: -1, pinned: false, block: null };

// told: title, facts: [label, value]..., block or undefined, and what can be done: [label, act]...
function tell({ title, facts, acts = [] }) {
  const panel = document.getElementById("told");
  panel.replaceChildren();
  panel.parentElement.classList.add("shown");
  html("b", {}, panel, title);
  for (const [label, value] of facts) if (value !== "") html("span", {}, panel, `${label}: ${value}`);
  if (!choice.pinned) return;
  const shown = html("div", {}, panel);
  for (const [label, act] of [...acts, ["close", unpin]]) html("button", { type: "button" }, shown, label).addEventListener("click", act);
}

function unpin() {
  Object.assign(choice, { chart: null, index: -1, pinned: false, block: null });
  document.getElementById("details").classList.remove("shown");
  drawAll();
}

function drawAll() {
  for (const chart of charts) chart.draw();
}

// -- one chart: things over time, one after the other, of which one can be chosen

class Chart {
  // items: in order of time, each with from, to, look, tell() as above; perhaps names (the shortest last), block, and tall, which
  // is its share of the height. marks: of a y axis, see `axis`.
  constructor(parent, name, note, items, height, marks = []) {
    Object.assign(this, { items, height, marks });
    this.box = html("div", { class: "lane", tabindex: "0", role: "group", "aria-label": `${name}. ${note}. Arrow keys choose.` }, parent);
    const head = html("div", { class: "lane-name" }, this.box);
    html("strong", {}, head, name);
    html("span", { class: "faint" }, head, note);
    this.svg = svg("svg", { height, "aria-hidden": "true" }, this.box);
    this.listen();
    charts.push(this);
  }

  get chosen() {
    return choice.chart === this ? choice.index : -1;
  }

  x(time) {
    return ((time - view.from) / (view.to - view.from)) * this.width;
  }

  visible() {
    return this.items.filter((item) => item.to >= view.from && item.from <= view.to);
  }

  draw() {
    this.width = this.box.clientWidth;
    if (!this.width) return;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren();
    this.paint();
    this.mark();
  }

  paint() {
    const paths = new Map();
    const edges = [];
    const named = [];
    let end = -10;
    for (const item of this.visible()) {
      const left = Math.max(this.x(item.from), -2);
      const least = left - end > 0.6 ? 0.6 : 0.05; // what stands alone is always seen; what is dense keeps its share of the colour
      const width = Math.max(Math.min(this.x(item.to), this.width + 2) - left, least);
      end = left + width;
      const tall = Math.max((item.tall ?? 1) * (this.height - 4), 1);
      const path = paths.get(item.look) || [];
      path.push(`M${left.toFixed(2)} ${(this.height - 2 - tall).toFixed(1)}h${width.toFixed(2)}v${tall.toFixed(1)}h${(-width).toFixed(2)}z`);
      paths.set(item.look, path);
      if (width > 3) edges.push(`M${end.toFixed(2)} 2v${this.height - 4}`);
      if (item.names && width > 12) named.push([item.names, Math.max(left, 0), width]);
    }
    for (const [look, path] of paths) svg("path", { class: look, d: path.join("") }, this.svg);
    if (edges.length) svg("path", { class: "edge", d: edges.join("") }, this.svg);
    for (const [names, left, width] of named) {
      const name = fitting(names, width);
      if (name) svg("text", { x: left + 3, y: this.height / 2 + 4 }, this.svg).textContent = name;
    }
    this.axis(this.marks);
  }

  // marks: [share of the height, text] of a y axis.
  axis(marks) {
    for (const [share, text] of marks) {
      const y = this.height - share * this.height;
      svg("line", { class: "grid", x1: 0, x2: this.width, y1: y, y2: y }, this.svg);
      svg("text", { x: 4, y: Math.max(y - 3, 11) }, this.svg).textContent = text;
    }
  }

  mark() {
    this.items.forEach((item, index) => {
      const shared = choice.block !== null && item.block === choice.block;
      if ((index !== this.chosen && !shared) || item.to < view.from || item.from > view.to) return;
      const left = this.x(item.from);
      const width = Math.max(this.x(item.to) - left, 2);
      svg("rect", { class: "chosen", x: left, y: 1, width, height: this.height - 2 }, this.svg);
    });
  }

  at(position) {
    const time = view.from + (position / this.width) * (view.to - view.from);
    const near = (4 / this.width) * (view.to - view.from);
    let best = -1;
    let distance = near;
    this.items.forEach((item, index) => {
      const away = Math.max(item.from - time, time - item.to, 0);
      if (away < distance || (away === 0 && best < 0)) [best, distance] = [index, away];
    });
    return best;
  }

  // pinned: until something else is chosen by a click or a key; what is only pointed at does not replace it.
  choose(index, pinned) {
    if (index < 0 || index >= this.items.length || (choice.pinned && !pinned)) return;
    const item = this.items[index];
    const before = choice.chart;
    Object.assign(choice, { chart: this, index, pinned, block: pinned ? item.block ?? null : null });
    const half = (view.to - view.from) / 2;
    if (item.to < view.from || item.from > view.to) show(item.from - half, item.from + half);
    else if (pinned) drawAll();
    else for (const chart of new Set([before, this])) if (chart) chart.draw();
    tell(item.tell());
  }

  // Shows an item that was chosen elsewhere, in a window in which it can be seen.
  reveal(index) {
    const item = this.items[index];
    if (!item) return;
    const span = Math.max(60 * (item.to - item.from), whole / 2000);
    if (view.to - view.from > 4 * span) show(item.from - span / 2, item.from + span / 2);
    this.choose(index, true);
    this.box.scrollIntoView({ block: "center" });
  }

  listen() {
    let held = null;
    const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, from: view.from, to: view.to, moved: false };
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (held && (held.moved || Math.abs(event.clientX - held.x) > 4)) {
        held.moved = true;
        const shift = ((event.clientX - held.x) / this.width) * (held.to - held.from);
        show(held.from - shift, held.to - shift);
      } else if (event.pointerType === "mouse") {
        const index = this.at(place(event));
        if (index !== this.chosen) this.choose(index, false);
      }
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (held && !held.moved) this.choose(this.at(place(event)), true);
      held = null;
    });
    this.svg.addEventListener("pointercancel", () => (held = null));
    this.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, view.from + (place(event) / this.width) * (view.to - view.from));
    }, { passive: false });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const first = this.items.findIndex((item) => item.to >= view.from);
    const item = this.items[this.chosen];
    const around = item ? Math.min(Math.max((item.from + item.to) / 2, view.from), view.to) : undefined;
    const acts = {
      ArrowRight: () => this.choose(this.chosen < 0 ? first : this.chosen + 1, true),
      ArrowLeft: () => this.choose(this.chosen < 0 ? first : this.chosen - 1, true),
      Home: () => this.choose(0, true),
      End: () => this.choose(this.items.length - 1, true),
      "+": () => zoom(0.5, around),
      "-": () => zoom(2, around),
      Escape: () => {
        unpin();
        show(0, whole);
      },
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }
}

// The blocks that make up what a tier holds at a time, the largest first.
function holders(rows, time) {
  const held = rows.held.filter(([, from, to]) => from <= time && (to === null || time < to)).map(([block]) => block);
  return held.sort((one, other) => blocks[other].size_bytes - blocks[one].size_bytes);
}

// What a tier holds over time, by kind; budget: null where there is no limit.
class Memory extends Chart {
  constructor(parent, name, note, rows, budget) {
    const items = rows.points.map((point, index) => ({
      from: point[0],
      to: index + 1 < rows.points.length ? rows.points[index + 1][0] : rows.seconds,
      sizes: point.slice(1),
      total: point.slice(1).reduce((sum, size) => sum + size, 0),
      tell: () => this.told(items[index]),
    }));
    super(parent, name, note, items, 150);
    this.most = items.reduce((most, item) => Math.max(most, item.total), 0);
    Object.assign(this, { name, rows, budget, top: 1.12 * Math.max(this.most, budget || 0, 1) });
  }

  told(item) {
    const facts = [
      ["in all", bytes(item.total)],
      ["budget", this.budget === null ? "no limit" : bytes(this.budget)],
      ...this.rows.kinds.map((kind, number) => [kind.replace("_", " "), bytes(item.sizes[number])]),
    ];
    const title = `${this.name}, from ${seconds(item.from)}`;
    if (!choice.pinned) return { title, facts };
    const held = holders(this.rows, item.from);
    facts.push(["blocks", `${held.length}, of which the largest are these`]);
    return { title, facts, acts: held.slice(0, 12).map((block) => [`${blocks[block].name} ${bytes(blocks[block].size_bytes)}`, () => pinBlock(block)]) };
  }

  y(size) {
    return this.height * (1 - size / this.top);
  }

  // Of the points that fall on one pixel, the highest.
  columns() {
    const found = [];
    let pixel = null;
    for (const item of this.visible()) {
      const place = Math.round(this.x(Math.max(item.from, view.from)) * 2);
      if (place !== pixel) found.push(item);
      else if (item.total > found[found.length - 1].total) found[found.length - 1] = item;
      pixel = place;
    }
    return found;
  }

  paint() {
    const columns = this.columns();
    const ends = this.x(Math.min(this.rows.seconds, view.to));
    const below = columns.map(() => 0);
    this.rows.kinds.forEach((kind, number) => {
      const top = [];
      const bottom = [];
      columns.forEach((item, index) => {
        const left = Math.max(this.x(item.from), 0).toFixed(1);
        const right = (index + 1 < columns.length ? Math.max(this.x(columns[index + 1].from), 0) : ends).toFixed(1);
        const low = this.y(below[index]).toFixed(1);
        below[index] += item.sizes[number];
        const high = this.y(below[index]).toFixed(1);
        top.push(`${left} ${high}L${right} ${high}`);
        bottom.push(`${right} ${low}L${left} ${low}`);
      });
      if (top.length) svg("path", { class: kind, d: `M${top.join("L")}L${bottom.reverse().join("L")}z` }, this.svg);
    });
    this.axis(sizeTicks(this.top).map((size) => [size / this.top, bytes(size)]));
    svg("text", { x: this.width - 6, y: 14, "text-anchor": "end" }, this.svg).textContent = `peak ${bytes(this.most)}`;
    if (this.budget === null) return;
    const line = this.y(this.budget);
    svg("line", { class: "budget", x1: 0, x2: this.width, y1: line, y2: line }, this.svg);
    svg("text", { x: this.width / 2, y: line - 5, "text-anchor": "middle" }, this.svg).textContent = `budget ${bytes(this.budget)}`;
  }

  mark() {
    const item = this.items[this.chosen];
    if (!item || item.from > view.to || item.to < view.from) return;
    const place = Math.max(this.x(item.from), 1);
    svg("line", { class: "chosen", x1: place, x2: place, y1: 0, y2: this.height }, this.svg);
  }
}

class Axis {
  constructor(parent) {
    this.svg = svg("svg", { class: "axis", height: 22, "aria-hidden": "true" }, parent);
    charts.push(this);
  }

  draw() {
    const width = this.svg.parentElement.clientWidth;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} 22`);
    this.svg.replaceChildren();
    const times = ticks(view.from, view.to, width / 85);
    const [unit, scale] = TIMES.find(([, each]) => view.to >= each) || ["ns", 1e-9];
    const digits = Math.max(Math.ceil(-Math.log10((times[1] - times[0]) / scale) - 1e-9), 0) || 0; // so that no two look alike
    for (const time of times) {
      const place = ((time - view.from) / (view.to - view.from)) * width;
      svg("line", { class: "grid", x1: place, x2: place, y1: 0, y2: 5 }, this.svg);
      const anchor = place < 20 ? "start" : place > width - 30 ? "end" : "middle";
      svg("text", { x: place, y: 18, "text-anchor": anchor }, this.svg).textContent = `${(time / scale).toFixed(digits)} ${unit}`;
    }
  }
}

// The life of one block: in which tiers it is when, and the stages that use it.
class Life {
  constructor(parent) {
    this.svg = svg("svg", { height: 66, role: "img" }, parent);
    this.tiers = { device: timeline.memory, ...timeline.below };
    charts.push(this);
  }

  draw() {
    const width = this.svg.parentElement.clientWidth;
    this.svg.replaceChildren();
    this.svg.style.display = choice.block === null ? "none" : "";
    if (choice.block === null || !width) return;
    const block = blocks[choice.block];
    this.svg.setAttribute("viewBox", `0 0 ${width} 66`);
    this.svg.setAttribute("aria-label", `Where ${block.name} is over the iteration`);
    const x = (time) => Math.min(Math.max(((time - view.from) / (view.to - view.from)) * width, -2), width + 2);
    Object.entries(this.tiers).forEach(([tier, rows], row) => {
      const y = 2 + 18 * row;
      for (const [, from, to] of rows.held.filter(([held]) => held === choice.block))
        svg("rect", { class: block.kind, x: x(from), y, width: Math.max(x(to ?? rows.seconds) - x(from), 0.6), height: 14 }, this.svg);
      svg("text", { x: 4, y: y + 11 }, this.svg).textContent = tier;
    });
    const uses = block.uses.map((number) => timeline.stages[number]).filter((stage) => stage.end >= view.from && stage.start <= view.to);
    for (const stage of uses) svg("path", { class: "use", d: `M${x(stage.start)} 0v57H${x(stage.end)}v-57` , fill: "none" }, this.svg);
    svg("text", { x: 4, y: 64 }, this.svg).textContent = "lines: stages that use it";
  }
}
