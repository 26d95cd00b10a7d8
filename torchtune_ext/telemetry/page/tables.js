// Tables whose rows are sorted by a click on a heading.

// columns: {label, title, number: align to the right, value: row -> what sorts it, cell: row -> what is shown}
function sortable(columns, rows, caption) {
  const body = el("tbody"), kind = (column) => (column.number ? "number" : column.kind ?? "");
  const cells = (row) => columns.map((column) => {
    const inside = [column.cell(row) ?? "–"].flat();
    return el("td", { class: kind(column) }, ...(column.kind === "code" ? [el("div", {}, ...inside)] : inside));
  });
  const lines = rows.map((row) => ({ row, node: el("tr", { "data-setting": row.setting }, ...cells(row)) }));
  let by = null, down = false;
  const heads = columns.map((column) => {
    const pick = () => {
      down = by === column ? !down : Boolean(column.number);
      by = column;
      const sign = down ? -1 : 1, asNumber = (value) => (value == null || value === "" || isNaN(value) ? value : +value);
      const key = ({ row }) => asNumber(column.value(row));
      // What has no value stays at the end.
      lines.sort((a, b) => (key(a) == null) - (key(b) == null) || sign * ((key(a) > key(b)) - (key(a) < key(b))));
      body.replaceChildren(...lines.map(({ node }) => node));
      for (const head of heads) head.setAttribute("aria-sort", "none");
      heads[columns.indexOf(column)].setAttribute("aria-sort", down ? "descending" : "ascending");
    };
    const label = [column.label].flat(), sorts = column.value && rows.length > 1;
    return el("th", { scope: "col", class: kind(column), title: column.title }, ...(sorts ? [el("button", { onclick: pick }, ...label)] : label));
  });
  body.append(...lines.map(({ node }) => node));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body);
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption }, table);
}

const number = (label, title, value, cell) => ({ label, title, number: true, value, cell });

// Numbers of one column have as many digits behind the point. `beside`: a number that stands beside it, whose size counts, too.
function digits(value, beside = 0) {
  if (value == null) return "–";
  const size = Math.max(Math.abs(value), Math.abs(beside ?? 0));
  if (size !== 0 && (size >= 100 || size < 1e-3)) return plain(value).replace("-", "−");
  if (value !== 0 && Math.abs(value) < 5e-4) return value > 0 ? "<0.001" : ">−0.001"; // beside zero, but not zero
  return value.toFixed(3).replace("-", "−");
}

const between = (low, high) => (low == null || high == null ? "–" : `${digits(low, high)} to ${digits(high, low)}`);

// An interval on the axis that all rows of a table share.
function whisker({ value, low, high }, [from, to], color) {
  const root = svg("svg", { class: "whisker", viewBox: "0 0 120 14" }), at = (x) => 6 + (108 * (x - from)) / (to - from || 1);
  root.append(svg("line", { class: "track", x1: 0, x2: 120, y1: 7, y2: 7 }));
  const bar = (x1, x2, y1, y2) => root.append(svg("line", { class: "ends", x1: at(x1), x2: at(x2), y1, y2, style: `stroke:${color}` }));
  if (low != null && high != null) {
    bar(low, high, 7, 7);
    for (const end of [low, high]) bar(end, end, 3, 11);
  }
  root.append(svg("circle", { cx: at(value), cy: 7, r: 3.6, style: `fill:${color}` }));
  return root;
}
