// Draws curves, shows the values of tokens, and reloads the page's content when the run has written something.
"use strict";

async function drawChart(figure) {
  const plot = figure.querySelector(".plot");
  const response = await fetch(figure.dataset.src);
  if (!response.ok) return;
  const traces = await response.json();
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  const names = new Set(traces.map((trace) => trace.name));
  const layout = {
    margin: { l: 45, r: 10, t: 5, b: 30 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: color("--text"), size: 12 }, xaxis: axis, yaxis: axis, hovermode: "x unified",
    hoverlabel: { bgcolor: color("--back") }, showlegend: names.size > 1, legend: { orientation: "h", y: -0.15 },
    uirevision: figure.dataset.src,
  };
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

function prepare(content) {
  content.querySelectorAll(".chart").forEach((figure) => whenVisible.observe(figure));
  content.querySelectorAll(".tokens").forEach(watchTokens);
  content.querySelectorAll("form[data-auto]").forEach((form) =>
    form.addEventListener("change", (event) => event.target.multiple || form.requestSubmit()));
}

// While someone types, chooses runs or reads tokens, only the curves are refreshed.
function isBusy(content) {
  return content.querySelector(".tokens, input:checked:not([id])") !== null
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
      if (old) figure.replaceWith(old);
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
  events.addEventListener("open", () => { live.textContent = "live"; });
  events.addEventListener("error", () => { live.textContent = "disconnected"; });
  events.addEventListener("change", () => {
    timer ??= setTimeout(() => { timer = null; refresh(); }, 1000);
  });
  addEventListener("pagehide", () => events.close());
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  document.querySelectorAll(".chart").forEach(drawChart));
prepare(document);
listen();
