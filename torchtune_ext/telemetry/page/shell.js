// Shared by all pages: unpacking of data, sections, tools, and the error message.

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const sectionId = (name) => `section-${name.toLowerCase().replace(/\W+/g, "-")}`;

// Adds a foldable section of charts, and returns its grid.
function chartSection(name, open, hint = "") {
  const grid = el("div", { class: "grid" });
  document.getElementById("charts").append(el("details", { class: "section", id: sectionId(name), open },
    el("summary", {}, el("h2", {}, name), el("span", { class: "muted" }, hint)), grid));
  return grid;
}

// Unfolds the section that a link points to.
function unfold(link) {
  const section = link?.startsWith("#section-") ? document.getElementById(link.slice(1)) : null;
  if (section?.tagName === "DETAILS") section.open = true;
}

function tools(steps) {
  const slider = document.getElementById("smoothing"), theme = document.getElementById("theme");
  const weigh = () => {
    cursor.weight = +slider.value;
    document.getElementById("smoothing-value").textContent = cursor.weight ? cursor.weight.toFixed(2) : "off";
    cursor.redraw();
  };
  slider.addEventListener("input", weigh);
  if (steps.length > 100) slider.value = steps.length > 600 ? 0.9 : 0.7; // so many points would blur; the raw values stay visible below the curve
  weigh();
  document.getElementById("reset-zoom").addEventListener("click", () => { cursor.zoom = null; cursor.redraw(); });
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = name === "dark" ? "light" : "dark";
  };
  const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
  set(asked ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  theme.addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

const day = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") + " UTC";

// Unpacks the overview, and renders the page.
async function begin(start) {
  try {
    const overview = await unpack("overview");
    document.getElementById("written").textContent = day(overview.written);
    document.getElementById("clicks").textContent = overview.runs ? "click a run in the legend to show or hide it, double-click to show only this run."
      : "click to open the rollouts of the step.";
    cursor.steps = overview.steps;
    tools(overview.steps);
    document.addEventListener("click", (event) => unfold(event.target.closest("a")?.getAttribute("href")));
    await start(overview);
    unfold(location.hash);
    document.documentElement.dataset.ready = "";
  } catch (error) {
    const trouble = document.getElementById("trouble");
    trouble.hidden = false;
    trouble.textContent = typeof DecompressionStream === "undefined" ? "This browser is too old: it lacks DecompressionStream, which browsers have had since 2023." : `The page could not be rendered: ${error}`;
  }
}
