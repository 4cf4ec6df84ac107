// Fills the charts of `charts.js` from the data of the page. Nothing is loaded, nothing is computed but positions.

// -- what is in the lanes

function stageItems(chosen) {
  const items = [];
  for (const stage of timeline.stages.filter(chosen)) {
    if (stage.start - stage.reached > 1e-9)
      items.push({
        from: stage.reached,
        to: stage.start,
        look: "stall",
        tell: () => [`${stage.name} waits`, ["for", seconds(stage.start - stage.reached)], ["until", stage.waits_for]],
      });
    items.push({
      from: stage.start,
      to: stage.end,
      look: stage.phase,
      tell: () => [stage.name, ["phase", stage.phase], ["takes", seconds(stage.end - stage.start)], ["begins", seconds(stage.start)]],
    });
  }
  return items;
}

function copyItems(link) {
  const look = link.startsWith("device->") ? "out" : "in";
  const items = [];
  for (const copy of timeline.copies.filter((each) => each.link === link)) {
    const told = () => [
      copy.name,
      ["block", String(copy.block)],
      ["size", bytes(copy.size_bytes)],
      ["kind", copy.kind.replace("_", " ")],
      [look === "out" ? "to" : "from", link.replace("device", "").replace("->", "")],
      ["takes", seconds(copy.end - copy.start)],
      ["begins", copy.start < 0 ? "in the iteration before" : seconds(copy.start)],
      ["waited in the queue", copy.start - copy.queued > 1e-9 ? seconds(copy.start - copy.queued) : ""],
      ["why", copy.why],
    ];
    items.push({ from: Math.max(copy.start, 0), to: copy.end, look, tell: told });
    if (copy.start < 0) items.push({ from: timeline.seconds + copy.start, to: timeline.seconds, look, tell: told });
  }
  return items.sort((one, other) => one.from - other.from);
}

function busy(items) {
  const time = items.filter((item) => item.look !== "stall").reduce((sum, item) => sum + item.to - item.from, 0);
  return `busy ${((100 * time) / timeline.seconds).toFixed(0)} %`;
}

function drawLanes() {
  const memory = document.getElementById("memory-charts");
  new Memory(memory, "Nothing moves", "as if the device were large enough", timeline.unplanned, timeline.budget_bytes);
  new Memory(memory, "With the plan", "blocks leave and come back", timeline.memory, timeline.budget_bytes);
  new Axis(memory);
  const lanes = document.getElementById("lanes");
  const rerun = (stage) => stage.phase === "recompute";
  const compute = stageItems((stage) => !rerun(stage));
  new Chart(lanes, "compute", busy(compute), compute, 34);
  if (timeline.stages.some(rerun)) {
    const again = stageItems(rerun);
    new Chart(lanes, "recompute", `${timeline.stages.filter(rerun).length} re-runs, ${busy(again)}`, again, 34);
  }
  for (const link of timeline.links) {
    const items = copyItems(link);
    new Chart(lanes, link.replace("->", " → "), items.length ? `${timeline.copies.filter((c) => c.link === link).length} copies, ${busy(items)}` : "no copies", items, 30);
  }
  if (timeline.updates.length) {
    const items = timeline.updates.map((each) => ({
      from: Math.max(each.start, 0),
      to: each.end,
      look: "update",
      tell: () => [each.name, ["subgroup", String(each.subgroup)], ["takes", seconds(each.end - each.start)]],
    }));
    new Chart(lanes, "updates on the host", `${items.length} updates, ${busy(items)}`, items, 30);
  }
  new Axis(lanes);
  const acts = { "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), earlier: () => pan(-0.5), later: () => pan(0.5), all: () => show(0, whole) };
  for (const [name, act] of Object.entries(acts)) document.getElementById(name).addEventListener("click", act);
}

// -- iteration time against budget

class Sweep {
  constructor(parent) {
    this.parent = parent;
    this.svg = svg("svg", { class: "axis", height: 260, role: "img", "aria-label": "Iteration time against device budget; the table below has the figures" }, parent);
    charts.push(this);
  }

  draw() {
    const { points, ideal_seconds: ideal } = report.sweep;
    const [width, height, left, bottom] = [this.parent.clientWidth, 260, 8, 234];
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const sizes = points.map((point) => point.device_bytes);
    const low = Math.min(...sizes);
    const high = Math.max(...sizes);
    const slowest = 1.15 * Math.max(ideal, ...points.filter((p) => p.predicted).map((p) => p.predicted.iteration_seconds));
    const x = (size) => left + ((size - low) / (high - low || 1)) * (width - 2 * left);
    const y = (time) => bottom - (time / slowest) * (bottom - 10);
    for (const time of ticks(0, slowest, 4)) {
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(time), y2: y(time) }, this.svg);
      if (time > 0) svg("text", { x: 4, y: y(time) - 4 }, this.svg).textContent = seconds(time);
    }
    points.forEach((point, index) => {
      if (point.predicted) return;
      const from = index ? (x(point.device_bytes) + x(sizes[index - 1])) / 2 : 0;
      const to = index + 1 < points.length ? (x(point.device_bytes) + x(sizes[index + 1])) / 2 : width;
      svg("rect", { class: "gap", x: from, y: 0, width: to - from, height: bottom }, this.svg);
      svg("text", { x: (from + to) / 2, y: bottom / 2, "text-anchor": "middle" }, this.svg).textContent = "no plan";
    });
    svg("line", { class: "ideal", x1: 0, x2: width, y1: y(ideal), y2: y(ideal) }, this.svg);
    const path = points.map((point, index) => {
      const first = !index || !points[index - 1].predicted;
      return point.predicted ? `${first ? "M" : "L"}${x(point.device_bytes)} ${y(point.predicted.iteration_seconds)}` : "";
    });
    svg("path", { class: "line", d: path.join("") || "M0 0" }, this.svg);
    for (const point of points.filter((each) => each.predicted))
      svg("circle", { class: "dot", cx: x(point.device_bytes), cy: y(point.predicted.iteration_seconds), r: 4.5 }, this.svg);
    const here = report.budgets.device_bytes;
    if (report.predicted && here >= low && here <= high)
      svg("circle", { class: "here", cx: x(here), cy: y(report.predicted.iteration_seconds), r: 9 }, this.svg);
    let end = -100;
    for (const index of points.keys()) {
      if (x(sizes[index]) - end < 90 || (index + 1 < points.length && x(high) - x(sizes[index]) < 120)) continue;
      end = x(sizes[index]);
      const anchor = index === 0 ? "start" : index === points.length - 1 ? "end" : "middle";
      svg("text", { x: x(sizes[index]), y: 252, "text-anchor": anchor }, this.svg).textContent = bytes(sizes[index]);
    }
  }
}

if (timeline) drawLanes();
if (report.sweep) new Sweep(document.getElementById("sweep-chart"));
let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === width) return;
  width = entry.contentRect.width;
  show(view.from, view.to);
}).observe(document.querySelector("main"));
document.documentElement.dataset.drawn = "true";
