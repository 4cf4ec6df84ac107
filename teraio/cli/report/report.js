// Fills the charts of `charts.js` from the data of the page. Nothing is loaded, nothing is computed but positions.

const lanes = new Map(); // charts by name
const tables = {};

// -- what is in the lanes

// What can be done with a block that something is about.
function ofBlock(block) {
  return [["life of the block", () => pinBlock(block)], ["in the table of blocks", () => tables.blocks.reveal(blocks[block])]];
}

function tellBlock(block) {
  const { name, kind, size_bytes: size, uses } = blocks[block];
  const facts = [["block", String(block)], ["kind", kind.replace("_", " ")], ["size", bytes(size)], ["used by", `${uses.length} stages`], ["with the plan", fate(blocks[block])]];
  return { title: name, facts, acts: ofBlock(block).slice(1) };
}

function pinBlock(block) {
  Object.assign(choice, { chart: null, index: -1, pinned: true, block });
  drawAll();
  tell(tellBlock(block));
}

function fate({ remade, moves }) {
  return remade ? "recomputed" : moves ? `leaves ${moves === 1 ? "once" : `${moves} times`}` : "stays";
}

function stageItems() {
  const items = [];
  for (const stage of timeline.stages) {
    const acts = [["in the table of stages", () => tables.stages.reveal(stage)]];
    const wait = stage.start - stage.reached;
    if (wait > 1e-9)
      items.push({
        from: stage.reached,
        to: stage.start,
        look: "stall",
        tell: () => ({ title: `${stage.name} waits`, facts: [["for", seconds(wait)], ["until", stage.waits_for]], acts }),
      });
    const facts = [
      ["phase", stage.phase],
      ["layer", stage.layer],
      ["takes", seconds(stage.end - stage.start)],
      ["begins", seconds(stage.start)],
      ["blocks that it uses", bytes(stage.used_bytes)],
      ["workspace", bytes(stage.workspace_bytes)],
    ];
    const name = stage.name.slice(stage.name.lastIndexOf("/") + 1);
    const names = [name, name.startsWith(`${stage.layer}.`) ? name.slice(stage.layer.length + 1) : name];
    items.push({ from: stage.start, to: stage.end, look: stage.phase, names, stage, tell: () => ({ title: stage.name, facts, acts }) });
  }
  return items;
}

// Stages of one layer that follow each other.
function layerItems() {
  const items = [];
  for (const stage of timeline.stages) {
    const last = items[items.length - 1];
    if (last && last.layer === stage.layer) {
      last.to = stage.end;
      last.count += 1;
      continue;
    }
    const item = { from: stage.reached, to: stage.end, look: "layer", layer: stage.layer, names: [stage.layer, stage.layer.split(".").pop()], count: 1 };
    item.tell = () => ({ title: item.layer, facts: [["stages", String(item.count)], ["takes", seconds(item.to - item.from)], ["begins", seconds(item.from)]] });
    items.push(item);
  }
  return items;
}

function rate(copy) {
  return blocks[copy.block].size_bytes / (copy.end - copy.start || Infinity);
}

function tellCopy(copy) {
  const { name, kind, size_bytes: size } = blocks[copy.block];
  const facts = [
    ["block", String(copy.block)],
    ["size", bytes(size)],
    ["kind", kind.replace("_", " ")],
    ["on", arrow(copy.link)],
    ["takes", seconds(copy.end - copy.start)],
    ["rate", `${bytes(rate(copy))}/s`],
    ["begins", copy.start < 0 ? "in the iteration before" : seconds(copy.start)],
    ["waited in the queue", copy.start - copy.queued > 1e-9 ? seconds(copy.start - copy.queued) : ""],
    ["why", timeline.moves[copy.move].why],
  ];
  return { title: name, facts, acts: [...ofBlock(copy.block), ["in the table of copies", () => tables.copies.reveal(copy)]] };
}

function copyItems(link, most) {
  const items = [];
  for (const copy of timeline.copies.filter((each) => each.link === link)) {
    const shared = { look: blocks[copy.block].kind, block: copy.block, copy, tall: rate(copy) / most, tell: () => tellCopy(copy) };
    items.push({ ...shared, from: Math.max(copy.start, 0), to: copy.end });
    if (copy.start < 0) items.push({ ...shared, from: timeline.seconds + copy.start, to: timeline.seconds });
  }
  return items.sort((one, other) => one.from - other.from);
}

function arrow(link) {
  return link.replace("->", " → ");
}

function busy(items) {
  const time = items.filter((item) => item.look !== "stall").reduce((sum, item) => sum + item.to - item.from, 0);
  return `busy ${((100 * time) / timeline.seconds).toFixed(0)} %`;
}

function drawMemory() {
  const parent = document.getElementById("memory-charts");
  const { host_bytes: host, storage_bytes: storage } = report.budgets;
  new Memory(parent, "Device, with the plan", "blocks leave and come back", timeline.memory, timeline.budget_bytes);
  new Memory(parent, "Device, if nothing moved", "as if it were large enough", timeline.unplanned, timeline.budget_bytes);
  const limits = { host: ["Host memory", host], storage: ["Drives", storage] };
  for (const [tier, rows] of Object.entries(timeline.below)) new Memory(parent, limits[tier][0], "blocks that have a place there", rows, limits[tier][1]);
  new Axis(parent);
}

function drawLanes() {
  const parent = document.getElementById("lanes");
  const stages = stageItems();
  const reruns = timeline.stages.filter((stage) => stage.phase === "recompute").length;
  lanes.set("compute", new Chart(parent, "compute", `${reruns ? `${reruns} re-runs, ` : ""}${busy(stages)}`, stages, 38));
  lanes.set("layers", new Chart(parent, "layers", "", layerItems(), 24));
  for (const { link, bytes_per_second: most } of report.facts.links) {
    const items = copyItems(link, most);
    const count = timeline.copies.filter((copy) => copy.link === link).length;
    const marks = [[0.96, `${bytes(most)}/s`], [0.5, ""]]; // copies are as high as their rates
    lanes.set(link, new Chart(parent, arrow(link), count ? `${count} copies, ${busy(items)}` : "no copies", items, 44, marks));
  }
  if (timeline.updates.length) {
    const items = timeline.updates.map((each) => ({
      from: Math.max(each.start, 0),
      to: each.end,
      look: "optimizer",
      tell: () => ({ title: each.name, facts: [["subgroup", String(each.subgroup)], ["takes", seconds(each.end - each.start)]] }),
    }));
    lanes.set("host updates", new Chart(parent, "updates on the host", `${items.length} updates, ${busy(items)}`, items, 30));
  }
  new Axis(parent);
  const acts = { "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), earlier: () => pan(-0.5), later: () => pan(0.5), all: () => show(0, whole) };
  for (const [name, act] of Object.entries(acts)) document.getElementById(name).addEventListener("click", act);
  new Life(document.getElementById("life"));
}

// -- tables, from whose rows one gets to the lanes

function fillTables() {
  const wait = (stage) => stage.start - stage.reached;
  const compute = lanes.get("compute");
  tables.stages = new Rows("stages", [
    ["stage", (stage) => stage.name],
    ["phase", (stage) => stage.phase],
    ["waits", wait, seconds],
    ["until", (stage) => stage.waits_for],
    ["begins", (stage) => stage.start, seconds],
    ["takes", (stage) => stage.end - stage.start, seconds],
    ["uses", (stage) => stage.used_bytes, bytes],
    ["workspace", (stage) => stage.workspace_bytes, bytes],
  ], [...timeline.stages].sort((one, other) => wait(other) - wait(one)), (stage) => compute.reveal(compute.items.findIndex((item) => item.stage === stage)));
  const idle = (block) => block.size_bytes * block.longest_idle_seconds;
  tables.blocks = new Rows("blocks", [
    ["block", (block) => block.name],
    ["kind", (block) => block.kind.replace("_", " ")],
    ["size", (block) => block.size_bytes, bytes],
    ["longest idle", (block) => block.longest_idle_seconds, seconds],
    ["idle in all", (block) => block.idle_seconds, seconds],
    ["stages", (block) => block.uses.length, String],
    ["with the plan", fate],
  ], [...blocks].sort((one, other) => idle(other) - idle(one)), (block) => {
    pinBlock(blocks.indexOf(block));
    document.getElementById("lanes").scrollIntoView({ block: "start" });
  });
  tables.copies = new Rows("copies", [
    ["block", (copy) => blocks[copy.block].name],
    ["on", (copy) => arrow(copy.link)],
    ["size", (copy) => blocks[copy.block].size_bytes, bytes],
    ["begins", (copy) => copy.start, (time) => (time < 0 ? "before" : seconds(time))],
    ["takes", (copy) => copy.end - copy.start, seconds],
    ["in the queue", (copy) => copy.start - copy.queued, seconds],
    ["rate", rate, (value) => `${bytes(value)}/s`],
    ["why", (copy) => timeline.moves[copy.move].why],
  ], [...timeline.copies].sort((one, other) => one.start - other.start), (copy) => {
    const lane = lanes.get(copy.link);
    lane.reveal(lane.items.findIndex((item) => item.copy === copy));
  });
}

// The rows of the small tables lead to their lanes.
function linkRows() {
  for (const row of document.querySelectorAll("#links tbody tr, #critical tbody tr")) {
    const lane = lanes.get(row.cells[0].textContent.replace(" → ", "->"));
    if (lane) row.addEventListener("click", () => lane.box.scrollIntoView({ block: "center" }) || lane.box.focus());
  }
}

// -- iteration time against budget

class Sweep {
  constructor(parent) {
    this.parent = parent;
    this.svg = svg("svg", { class: "axis", height: 260, role: "img", "aria-label": "Iteration time against device budget; the table below has the figures" }, parent);
    charts.push(this);
  }

  draw() {
    const { points, ideal_seconds: ideal, floor_bytes: floor } = report.sweep;
    const [width, height, left, bottom] = [this.parent.clientWidth, 260, 8, 234];
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const sizes = points.map((point) => point.device_bytes);
    const low = 0.8 * Math.max(Math.min(floor, ...sizes), 1); // below the floor, so that one sees that there is no plan
    const high = Math.max(...sizes);
    const slowest = 1.15 * Math.max(ideal, ...points.filter((p) => p.predicted).map((p) => p.predicted.iteration_seconds));
    const x = (size) => left + (Math.log(Math.max(size, low) / low) / Math.log(high / low)) * (width - 2 * left);
    const y = (time) => bottom - (time / slowest) * (bottom - 10);
    for (const time of ticks(0, slowest, 4)) {
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(time), y2: y(time) }, this.svg);
      if (time > 0) svg("text", { x: 4, y: y(time) - 4 }, this.svg).textContent = seconds(time);
    }
    const shade = (from, to, text) => {
      svg("rect", { class: "gap", x: from, y: 0, width: Math.max(to - from, 0), height: bottom }, this.svg);
      svg("text", { x: (from + to) / 2, y: bottom / 2, "text-anchor": "middle" }, this.svg).textContent = text;
    };
    shade(0, x(floor), "no plan");
    points.forEach((point, index) => {
      if (point.predicted || point.device_bytes < floor) return;
      const middle = (other) => (x(point.device_bytes) + x(other)) / 2;
      shade(index ? Math.max(middle(sizes[index - 1]), x(floor)) : x(floor), index + 1 < points.length ? middle(sizes[index + 1]) : width, "no plan");
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
      const anchor = index === points.length - 1 ? "end" : "middle";
      svg("text", { x: x(sizes[index]), y: 252, "text-anchor": anchor }, this.svg).textContent = bytes(sizes[index]);
    }
  }
}

if (timeline) {
  drawMemory();
  drawLanes();
  fillTables();
  linkRows();
}
if (report.sweep) new Sweep(document.getElementById("sweep-chart"));
let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === width) return;
  width = entry.contentRect.width;
  show(view.from, view.to);
}).observe(document.querySelector("main"));
document.documentElement.dataset.drawn = "true";
