// Tables with all rows: sorted by a click on a column, searched, a page at a time. A row leads to its place in the lanes.
const PAGE = 20;

class Rows {
  // columns: [name, value of a row, how to show it]; without the last, the value is text. open: called with the row that was
  // clicked.
  constructor(name, columns, rows, open) {
    this.section = document.getElementById(name);
    Object.assign(this, { columns, rows, open, found: rows, page: 0, column: -1, down: false });
    const parent = this.section.querySelector(".rows");
    this.search = html("input", { type: "search", placeholder: `search ${name}`, "aria-label": `Search ${name}` }, parent);
    this.search.addEventListener("input", () => this.find());
    const table = html("table", {}, html("div", { class: "scroll", tabindex: "0" }, parent));
    const head = html("tr", {}, html("thead", {}, table));
    this.heads = columns.map(([label, , shown], index) => {
      const cell = html("th", { scope: "col", class: shown ? "number" : "" }, head);
      html("button", { type: "button" }, cell, label).addEventListener("click", () => this.sort(index));
      return cell;
    });
    this.body = html("tbody", {}, table);
    const pages = html("p", { class: "pages" }, parent);
    html("button", { type: "button" }, pages, "◀ before").addEventListener("click", () => this.turn(this.page - 1));
    html("button", { type: "button" }, pages, "next ▶").addEventListener("click", () => this.turn(this.page + 1));
    this.told = html("span", { class: "faint", role: "status" }, pages);
    this.draw();
  }

  texts(row) {
    return this.columns.map(([, value, shown]) => (shown ? shown(value(row)) : String(value(row))));
  }

  find() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => {
      const text = this.texts(row).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    this.found = words.length ? this.rows.filter(fits) : [...this.rows];
    this.arrange();
    this.turn(0);
  }

  // Numbers begin with the largest, names with the first; once more turns that round.
  sort(column) {
    this.down = column === this.column ? !this.down : Boolean(this.columns[column][2]);
    this.column = column;
    this.heads.forEach((head, index) => head.setAttribute("aria-sort", index !== column ? "none" : this.down ? "descending" : "ascending"));
    this.found = [...this.found];
    this.arrange();
    this.turn(0);
  }

  arrange() {
    if (this.column < 0) return;
    const value = this.columns[this.column][1];
    const sign = this.down ? -1 : 1;
    this.found.sort((one, other) => sign * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0));
  }

  turn(page) {
    this.page = Math.min(Math.max(page, 0), Math.max(Math.ceil(this.found.length / PAGE) - 1, 0));
    this.draw();
  }

  draw(marked) {
    const first = this.page * PAGE;
    const shown = this.found.slice(first, first + PAGE);
    this.body.replaceChildren(...shown.map((row) => this.line(row, row === marked)));
    this.told.textContent = shown.length ? `${first + 1} to ${first + shown.length} of ${this.found.length.toLocaleString("en")}` : "none";
  }

  line(row, marked) {
    const line = html("tr", { tabindex: "0", class: marked ? "found" : "" });
    this.texts(row).forEach((text, index) => html("td", { class: this.columns[index][2] ? "number" : this.columns[index][0] }, line, text));
    line.addEventListener("click", () => this.open(row));
    line.addEventListener("keydown", (event) => event.key === "Enter" && this.open(row));
    return line;
  }

  // Turns to a row that was chosen in the lanes.
  reveal(row) {
    if (!this.found.includes(row)) {
      this.search.value = "";
      this.find();
    }
    this.page = Math.floor(this.found.indexOf(row) / PAGE);
    this.draw(row);
    this.body.querySelector(".found").scrollIntoView({ block: "center" });
  }
}
