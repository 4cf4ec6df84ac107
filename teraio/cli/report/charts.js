// The data of the page, and charts over time: one window of time for all, things that can be chosen by pointer and keys.
// `report.js` fills them.
"use strict";

const report = JSON.parse(document.getElementById("report-data").textContent);
const timeline = report.facts && report.facts.timeline;
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

function bytes(size) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (size >= scale) return `${threeDigits(size / scale)} ${unit}`;
  return `${size.toFixed(0)} B`;
}

function seconds(time) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (time >= scale) return `${threeDigits(time / scale)} ${unit}`;
  return time <= 0 ? "0 s" : `${(time / 1e-9).toFixed(0)} ns`;
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

// -- one chart: things over time, one after the other, of which one can be chosen

class Chart {
  // items: in order of time, each with from, to, tell() -> [title, [label, value]...]
  constructor(parent, name, note, items, height) {
    this.items = items;
    this.height = height;
    this.chosen = -1;
    this.box = html("div", { class: "lane", tabindex: "0", role: "group", "aria-label": `${name}. ${note}. Arrow keys choose.` }, parent);
    const head = html("div", { class: "lane-name" }, this.box);
    html("strong", {}, head, name);
    html("span", { class: "faint" }, head, note);
    this.svg = svg("svg", { height, "aria-hidden": "true" }, this.box);
    this.listen();
    charts.push(this);
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
    let end = -10;
    for (const item of this.visible()) {
      const left = Math.max(this.x(item.from), -2);
      const least = left - end > 0.6 ? 0.6 : 0.05; // what stands alone is always seen; what is dense keeps its share of the colour
      const width = Math.max(Math.min(this.x(item.to), this.width + 2) - left, least);
      end = left + width;
      const path = paths.get(item.look) || [];
      path.push(`M${left.toFixed(2)} 2h${width.toFixed(2)}v${this.height - 4}h${(-width).toFixed(2)}z`);
      paths.set(item.look, path);
    }
    for (const [look, path] of paths) svg("path", { class: look, d: path.join("") }, this.svg);
  }

  mark() {
    const item = this.items[this.chosen];
    if (!item || item.to < view.from || item.from > view.to) return;
    const left = this.x(item.from);
    const width = Math.max(this.x(item.to) - left, 2);
    svg("rect", { class: "chosen", x: left, y: 1, width, height: this.height - 2 }, this.svg);
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

  choose(index) {
    if (index < 0 || index >= this.items.length) return;
    for (const chart of charts) if (chart !== this && chart.chosen >= 0) {
      chart.chosen = -1;
      chart.draw();
    }
    this.chosen = index;
    const item = this.items[index];
    if (item.to < view.from || item.from > view.to) {
      const half = (view.to - view.from) / 2;
      show(item.from - half, item.from + half);
    } else {
      this.draw();
    }
    tell(item.tell());
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
        if (index !== this.chosen) this.choose(index);
      }
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (held && !held.moved) this.choose(this.at(place(event)));
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
      ArrowRight: () => this.choose(this.chosen < 0 ? first : this.chosen + 1),
      ArrowLeft: () => this.choose(this.chosen < 0 ? first : this.chosen - 1),
      Home: () => this.choose(0),
      End: () => this.choose(this.items.length - 1),
      "+": () => zoom(0.5, around),
      "-": () => zoom(2, around),
      Escape: () => {
        document.getElementById("details").classList.remove("shown");
        show(0, whole);
      },
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }
}

class Memory extends Chart {
  constructor(parent, name, note, rows, budget) {
    const items = rows.points.map((point, index) => ({
      from: point[0],
      to: index + 1 < rows.points.length ? rows.points[index + 1][0] : rows.seconds,
      sizes: point.slice(1),
      total: point.slice(1).reduce((sum, size) => sum + size, 0),
      tell: () => [
        `${name}, from ${seconds(point[0])}`,
        ["in all", bytes(items[index].total)],
        ["budget", bytes(budget)],
        ...rows.kinds.map((kind, number) => [kind.replace("_", " "), bytes(point[number + 1])]),
      ],
    }));
    super(parent, name, note, items, 190);
    this.most = Math.max(...items.map((item) => item.total), 0);
    Object.assign(this, { rows, budget, top: 1.08 * Math.max(this.most, budget) });
  }

  y(size) {
    return this.height - (size / this.top) * (this.height - 14);
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
    const line = this.y(this.budget);
    svg("line", { class: "budget", x1: 0, x2: this.width, y1: line, y2: line }, this.svg);
    svg("text", { x: 6, y: line - 5 }, this.svg).textContent = `budget ${bytes(this.budget)}`;
    svg("text", { x: this.width - 6, y: 14, "text-anchor": "end" }, this.svg).textContent = `peak ${bytes(this.most)}`;
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
    for (const time of ticks(view.from, view.to, width / 85)) {
      const place = ((time - view.from) / (view.to - view.from)) * width;
      svg("line", { class: "grid", x1: place, x2: place, y1: 0, y2: 5 }, this.svg);
      const anchor = place < 20 ? "start" : place > width - 30 ? "end" : "middle";
      svg("text", { x: place, y: 18, "text-anchor": anchor }, this.svg).textContent = seconds(time);
    }
  }
}

function ticks(from, to, count) {
  const rough = (to - from) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let number = Math.ceil(from / step); number * step <= to; number += 1) found.push(number * step);
  return found;
}

function tell([title, ...facts]) {
  const panel = document.getElementById("details");
  panel.replaceChildren();
  panel.classList.add("shown");
  html("b", {}, panel, title);
  for (const [label, value] of facts) if (value !== "") html("span", {}, panel, `${label}: ${value}`);
}
