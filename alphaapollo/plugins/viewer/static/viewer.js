// Draws curves, opens rows, shows the values of tokens, moves by keys, saves notes, and follows the run.
"use strict";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function drawChart(figure) {
  const plot = figure.querySelector(".plot");
  const response = await fetch(figure.dataset.src);
  if (!response.ok) return;
  const traces = await response.json();
  const steps = traces.flatMap((trace) => trace.x ?? []);
  const span = Math.max(...steps) - Math.min(...steps);
  const axis = { gridcolor: style("--line"), linecolor: style("--line"), zeroline: false, automargin: true, exponentformat: "e" };
  const names = new Set(traces.map((trace) => trace.name)), isLog = Boolean(figure.dataset.log);
  const hasLegend = names.size > 1 && !figure.dataset.plain;
  // intervals do not set the axis: two seeds may have a wide one
  const values = traces.filter((one) => one.type === "scatter" && !one.fill).flatMap((one) => one.y)
    .filter((value) => !isLog || value > 0).map((value) => (isLog ? Math.log10(value) : value));
  // a difference of rounding is no curve: its axis would have labels such as 0.999999997
  const low = Math.min(...values), high = Math.max(...values), range = high - low, isFlat = range < 1e-5 * Math.abs(high);
  const margin = isFlat ? Math.abs(high) / 10 : range / 15 || 0.5;
  const colorscale = [[0, style("--back")], [1, style("--fill-blue")]];
  traces.filter((one) => one.type === "heatmap").forEach((trace) => Object.assign(trace, { colorscale, zmin: 0, xgap: 1 }));
  const layout = {
    margin: { l: 38, r: 8, t: hasLegend ? 18 : 4, b: 22 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: style("--soft"), size: 11, family: "system-ui, sans-serif" },
    xaxis: { ...axis, showgrid: false, tickformat: ",d", ...(span < 8 ? { dtick: 1 } : {}) },
    yaxis: { ...axis, nticks: 5, type: isLog ? "log" : "linear",
      ...(values.length ? { range: [low - margin, high + margin] } : {}) },
    hovermode: traces[0]?.type === "heatmap" ? "closest" : "x unified",
    hoverlabel: { bgcolor: style("--back"), bordercolor: style("--line") },
    showlegend: hasLegend, legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom" },
    uirevision: figure.dataset.src,
  };
  if (!traces.length) layout.annotations = [{ text: "all values are equal", showarrow: false }];
  await Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
}

const whenVisible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    whenVisible.unobserve(entry.target);
    drawChart(entry.target);
  }
});

function watchTokens(box) {
  const facts = document.getElementById("token");
  let current = null;
  const show = (token) => {
    if (!token || token === box) return;
    current?.classList.remove("current");
    current = token;
    current.classList.add("current");
    facts.textContent = current.dataset.facts;
  };
  const moves = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
  box.addEventListener("mouseover", (event) => show(event.target));
  box.addEventListener("focus", () => show(current ?? box.firstElementChild));
  box.addEventListener("keydown", (event) => {
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(current ? current[moves[event.key]] : box.firstElementChild);
    current?.scrollIntoView({ block: "nearest" });
  });
}

// Opens or closes the details of a table's row: the conversation of a sample, or the samples of a group.
async function toggleRow(button) {
  const row = button.closest("tr"), isOpen = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!isOpen));
  if (isOpen) return row.nextElementSibling.remove();
  const detail = row.parentElement.insertRow(row.sectionRowIndex + 1), cell = detail.insertCell();
  detail.className = "detail";
  cell.colSpan = row.cells.length;
  const response = await fetch(button.dataset.src);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  cell.append(...(page.querySelector("main") ?? page.body).childNodes);
}

// Hides the rows of tables without the words, and opens folded tables with matches.
function filterRows(input) {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const table of document.querySelectorAll(input.dataset.filter)) {
    const rows = [...table.tBodies[0].rows], folded = table.closest("details");
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    if (folded && words.length) folded.open = rows.some((row) => !row.hidden);
  }
}

async function saveNotes(element, changes) {
  const response = await fetch(element.dataset.notes, {
    method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify(changes),
  });
  const said = element.querySelector("output");
  if (said) said.textContent = response.ok ? "saved" : await response.text();
  return response.ok;
}

function prepare(content) {
  content.querySelectorAll(".chart").forEach((figure) => whenVisible.observe(figure));
  content.querySelectorAll(".tokens").forEach(watchTokens);
  content.querySelectorAll("form[data-auto]").forEach((form) =>
    form.addEventListener("change", (event) => event.target.multiple || form.requestSubmit()));
  content.querySelectorAll("input[data-filter]").forEach((input) => input.addEventListener("input", () => filterRows(input)));
  content.querySelectorAll("form[data-notes]").forEach((form) => {
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", (event) => saveNotes(form, { [event.target.name]: event.target.value }));
  });
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.matches(".more")) toggleRow(button);
  if (button?.matches("[data-hide]") && (await saveNotes(button, { hidden: button.dataset.hide === "1" }))) location.reload();
  if (button?.matches("[data-keys]")) document.getElementById("keys").showModal();
});

// Keys: links have theirs in data-key; in a table, j and k move between rows; / goes to the search.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (link || event.key === "/") event.preventDefault();
  if (link) link.click();
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll(".more, .rows a.first")];
    const at = rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    rows[Math.max(0, Math.min(at, rows.length - 1))]?.focus();
  }
});

// While someone types, chooses runs, or reads tokens or an open row, only the curves are refreshed.
function isBusy(content) {
  return content.querySelector(".tokens, tr.detail, input:checked:not([id], [data-view])") !== null
    || content.contains(document.activeElement);
}

async function refresh() {
  const content = document.getElementById("main");
  if (document.hidden) return;
  if (!isBusy(content)) {
    const response = await fetch(location.href);
    if (!response.ok) return;
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const next = page.getElementById("main");
    const drawn = new Map([...content.querySelectorAll(".chart")].map((figure) => [figure.dataset.src, figure]));
    next.querySelectorAll(".chart").forEach((figure) => {
      const old = drawn.get(figure.dataset.src);
      if (!old) return;
      old.querySelector("figcaption").replaceWith(figure.querySelector("figcaption"));
      figure.replaceWith(old);
    });
    const sections = content.querySelectorAll("details");
    next.querySelectorAll("details").forEach((section, number) => { section.open = sections[number]?.open ?? section.open; });
    content.replaceChildren(...next.childNodes);
    prepare(content);
  } else {
    content.querySelectorAll(".chart").forEach((figure) => whenVisible.observe(figure));
  }
}

function listen() {
  const live = document.getElementById("live");
  const events = new EventSource(`/events?run=${document.body.dataset.run}`);
  let timer = null;
  const show = (text) => { live.textContent = text; live.classList.toggle("on", text === "live"); };
  events.addEventListener("open", () => show("live"));
  events.addEventListener("error", () => show("disconnected"));
  events.addEventListener("change", () => {
    timer ??= setTimeout(() => { timer = null; refresh(); }, 1000);
  });
  events.addEventListener("status", (event) => {
    const status = document.getElementById("status");
    if (status) status.textContent = event.data;
  });
  addEventListener("pagehide", () => events.close());
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.querySelectorAll(".chart").forEach(drawChart));
prepare(document);
listen();
