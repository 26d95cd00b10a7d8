// The archive: for each problem and machine a table of its programs. A program is written as a text node only.

async function archive(overview, root) {
  if (!root || !document.getElementById("archive")) return;
  const stored = new Set(overview.rollouts.map(({ step }) => step)), count = (value) => value.toLocaleString("en");
  const found = ({ found: step }) => (stored.has(step) ? [el("button", { title: "rollouts of this step", onclick: () => cursor.onPick?.(step) }, count(step))] : count(step));
  const columns = [
    { label: "techniques", kind: "words", value: (row) => row.techniques, cell: (row) => row.techniques },
    number("× naive", "times as fast as the naive program beside it", (row) => row.ratio, (row) => plain(row.ratio)),
    number("95% interval", "the fastest is the one whose lower end is highest", (row) => row.low, ({ low, high }) => `${plain(low)} to ${plain(high)}`),
    number("GFLOPS", "", (row) => row.gflops, (row) => plain(row.gflops)),
    number("found at step", "", (row) => row.found, found),
    { label: "program", kind: "source", cell: ({ source }) => [el("details", {}, el("summary", {}, "show"), el("pre", { class: "text", tabindex: 0 }, source))] },
  ];
  for (const { kernel, size, machine, programs } of await unpack("archive")) {
    const title = `${kernel} ${size}`, cells = programs.length === 1 ? "1 cell" : `${programs.length} cells`;
    root.append(el("figure", { class: "panel wide" }, el("h3", {}, title, el("span", { class: "at" }, cells)), el("p", { class: "note" }, `Timed on ${machine}.`),
      sortable(columns, programs, `programs of ${title}`)));
  }
}
