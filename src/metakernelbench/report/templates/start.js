// The search box, keys, the theme, news from a live store, and the first page.

let index;
async function hits(words) {
  index ??= JSON.parse(await textOf("search"));
  if (!words.length) return [];
  const fits = ([, title, more]) => words.every((word) => `${title} ${more}`.toLowerCase().includes(word));
  return index.filter(fits).slice(0, 12);
}

function searching(input, list) {
  const pick = (step) => {
    const options = all("[role=option]", list);
    if (!options.length) return;
    const now = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
    const next = options[(now + step + options.length) % options.length];
    options.forEach((option) => option.setAttribute("aria-selected", option === next));
    input.setAttribute("aria-activedescendant", next.id);
    next.scrollIntoView({ block: "nearest" });
  };
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  const go = (option) => { if (option) { location.hash = option.dataset.to; input.value = ""; close(); main.focus({ preventScroll: true }); } };
  input.addEventListener("input", async () => {
    const found = await hits(input.value.toLowerCase().split(/\s+/).filter(Boolean));
    list.replaceChildren(...found.map(([to, title, more], number) => {
      const option = document.createElement("li");
      option.id = `hit-${number}`;
      option.dataset.to = to;
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", number === 0);
      const small = document.createElement("small");
      small.textContent = more;
      option.append(title, " ", small);
      option.addEventListener("pointerdown", (event) => { event.preventDefault(); go(option); });
      return option;
    }));
    list.hidden = !found.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") pick(1);
    else if (event.key === "ArrowUp") pick(-1);
    else if (event.key === "Enter") go(list.querySelector("[aria-selected=true]"));
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
  });
  input.addEventListener("blur", close);
}

function themed() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("mkb-theme", root.dataset.theme); } catch { /* a browser that keeps nothing */ }
}

function keyed(event) {
  if (event.target.closest?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const neighbour = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const scrolls = event.target.closest?.(".scroll, pre");
  if (event.key === "/") { byId("search").focus(); event.preventDefault(); }
  else if (event.key === "t") themed();
  else if (neighbour && !scrolls) main.querySelector(`.neighbours a[rel=${neighbour}]`)?.click();
}

// A live store says when something has changed; the page in view is asked for again and replaced where it differs.
function listening() {
  const light = byId("live");
  const news = new EventSource("events");
  let version;
  news.addEventListener("version", async (event) => {
    light.textContent = "live";
    if (event.data === version) return;
    const first = version === undefined;
    version = event.data;
    if (first) return;
    loaded.clear();
    index = undefined;
    await show(location.hash, { keep: true });
  });
  news.addEventListener("error", () => { light.textContent = "no connection"; });
}

try { if (localStorage.getItem("mkb-theme")) document.documentElement.dataset.theme = localStorage.getItem("mkb-theme"); } catch { /* a browser that keeps nothing */ }
const first = document.createElement("template");
first.content.append(byId("overview").cloneNode(true));
loaded.set("overview", first.content);
history.scrollRestoration = "manual";
searching(byId("search"), byId("hits"));
byId("theme").addEventListener("click", themed);
document.addEventListener("keydown", keyed);
document.addEventListener("toggle", (event) => { if (event.target.open) opened(event.target); }, true);
document.addEventListener("click", (event) => {
  if (!event.target.closest?.(".skip")) return;
  event.preventDefault(); // `#page` is no page of the report
  main.focus();
});
addEventListener("hashchange", () => { numbered(); show(location.hash); });
addEventListener("scroll", () => { byId("tip").hidden = true; }, { passive: true });
numbered();
show(location.hash);
if (live) listening();
